"""Chunks of a few tokens, so that small models compute their loss in several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megastack.layers.vocabulary_spec import HeadSpec


@contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    """On the rank that enters it, under ``loss.chunked``."""

    def chunk(self: HeadSpec, number: int, tp: int) -> int | None:
        return tokens if self.chunked and number > tokens else None

    with patch.object(HeadSpec, "chunk", chunk):
        yield
