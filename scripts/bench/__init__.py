"""What the benchmarks under ``scripts/`` share."""
