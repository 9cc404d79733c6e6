"""Records and output of a run: metrics, logs, status, failure reports, and the run folder with its owner."""
