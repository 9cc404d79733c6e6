"""Transformers built from the parallel layers, as flat lists of units that a pipeline stage slices."""
