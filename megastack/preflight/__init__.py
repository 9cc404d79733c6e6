"""Checks of a run before any rank starts."""
