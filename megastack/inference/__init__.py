"""Texts from a trained model on any layout."""
