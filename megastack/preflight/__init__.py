"""Checks of a run before any rank starts, and its run folder."""
