"""Checks before any rank starts, and the run folder."""
