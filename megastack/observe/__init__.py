"""Records and output of a run: metrics, logs, status, failure reports, the run folder and its owner."""
