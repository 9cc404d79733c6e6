"""Planning layouts without processes: memory, cost, search."""
