"""Text to token batches: sources, tokenizers, the sample order, the loader."""
