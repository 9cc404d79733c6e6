"""The parallel layers that users subclass."""
