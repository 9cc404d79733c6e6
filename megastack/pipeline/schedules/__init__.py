"""Pure generators of pipeline schedules."""
