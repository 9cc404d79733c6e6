"""Optimizers on flat local shards, main parameters, the loss scale and learning-rate schedules."""
