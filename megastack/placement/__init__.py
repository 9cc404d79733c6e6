"""The single source of truth for a parameter: its global shape, its shards and replicas, its initial values."""
