"""Which documents are held out for validation: those whose hash is small.

The side of a document depends on its bytes and the fraction alone, never on a seed, its place or its neighbours. So
runs with different seeds are validated on the same text, equal documents never stand on both sides, and a corpus that
grows keeps its old documents where they were.
"""

from __future__ import annotations

import hashlib

from megastack.errors import DataError


def check_fraction(fraction: float) -> None:
    """Raises :class:`DataError` unless 0 <= fraction < 1; 0 means a run without validation."""
    if not 0 <= fraction < 1:
        raise DataError(f"data.validation_fraction={fraction}: must be at least 0 and below 1; use for example 0.05")


def held_out(document: bytes, fraction: float) -> bool:
    """Whether `document` belongs to the validation split; true for about `fraction` of all documents."""
    number = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest())
    return number < fraction * 2.0**64
