"""Dry runs: one rank of a job, built and stepped without its peers, its device and its data."""
