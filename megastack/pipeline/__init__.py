"""Pipeline schedules as data, and the one runtime that executes them."""
