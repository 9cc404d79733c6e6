"""Gradients of the data-parallel group: flat buckets, ZeRO, FSDP, and the global norm."""
