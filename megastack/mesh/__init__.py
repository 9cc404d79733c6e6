"""The grid of ranks: its shape as a value, its live process groups, the machine under it."""
