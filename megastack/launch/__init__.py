"""Start the ranks of a run, and turn their exits into one result."""
