"""Layout-independent checkpoints: items, save, load, reader."""
