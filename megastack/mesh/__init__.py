"""The grid of ranks: its shape as a value, and its live process groups."""
