"""Text to ids: bytes by default, or any `tokenizer.json` (:mod:`megastack.data.tokenizer_file`).

A tokenizer may mark the end of a document with an end id. The byte tokenizer needs no 257th id for that: 0xFF never
occurs in UTF-8 text, so it ends documents, and a vocabulary of 256 suffices. Document boundaries are never inferred
from ids (see :mod:`megastack.data.stream`), so a tokenizer without an end id works as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastack.data.tokenizer_file import FileTokenizer
from megastack.errors import DataError, counted

Ids = npt.NDArray[np.integer]


class Tokenizer(Protocol):
    """A tokenizer with ids below `size`, and the id that ends a document if there is one."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, without its end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not text are replaced."""


class ByteTokenizer:
    """Each byte is its own id; 0xFF, which UTF-8 never uses, ends a document."""

    name = "byte"
    size = 256
    end: int | None = 0xFF

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end).decode(errors="replace")


def load_tokenizer(name: str | Path = "byte", *, allow_special_tokens: bool = False) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `byte`, or the path of a `tokenizer.json`.

    Args:
        name: the value of `data.tokenizer`.
        allow_special_tokens: whether text that spells a special token becomes its id; bytes have none.
    """
    return ByteTokenizer() if str(name) == "byte" else FileTokenizer(name, allow_special_tokens=allow_special_tokens)


def append_end(ids: Ids, end: int | None) -> Ids:
    """A document's ids followed by the end id; unchanged if the document is empty or ends with that id already."""
    if end is None or not len(ids) or ids[-1] == end:
        return ids
    return np.append(ids, np.array(end, dtype=ids.dtype))


def least_vocab(name: str | Path = "byte") -> int:
    """The smallest valid `model.vocab` for the tokenizer that `data.tokenizer` names."""
    return load_tokenizer(name).size


def check_vocab(vocab: int, tokenizer: Tokenizer) -> None:
    """Raise :class:`DataError` unless `vocab` (`model.vocab`) holds every id of the tokenizer."""
    if vocab < tokenizer.size:
        raise DataError(
            f"model.vocab={vocab}: must hold the {counted(tokenizer.size, 'id')} of data.tokenizer={tokenizer.name}; "
            f"use {tokenizer.size} or more"
        )
