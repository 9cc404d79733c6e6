"""Train Transformers over a grid of data, tensor and pipeline parallel ranks."""
