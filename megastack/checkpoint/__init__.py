"""State that moves between layouts: items, save, load, reader."""
