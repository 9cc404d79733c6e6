"""The device mesh: its shape as a value, and its process groups."""
