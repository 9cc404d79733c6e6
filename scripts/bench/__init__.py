"""Modules shared by the benchmarks in ``scripts/``."""
