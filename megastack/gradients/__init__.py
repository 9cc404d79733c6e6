"""Flat gradient buckets, their reductions, the global norm."""
