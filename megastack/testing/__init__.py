"""Parity tools for users and for megastack's own tests."""
