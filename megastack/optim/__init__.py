"""Optimizers on flat buckets and learning-rate schedules."""
