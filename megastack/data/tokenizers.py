"""Text to ids: bytes by default, or any `tokenizer.json` through the optional `tokenizers` package.

A tokenizer marks the end of a document by an id of its own. The byte tokenizer needs no 257th id for that: 0xFF occurs
in no UTF-8 text, so it ends documents and a vocabulary of 256 holds everything. Document boundaries are never guessed
from ids (see :mod:`megastack.data.stream`), so a tokenizer without an end id works as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from megastack.errors import DataError

if TYPE_CHECKING:
    import tokenizers as hf

Ids = npt.NDArray[np.integer]

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Well-known names of the token that ends a document, where nothing beside the vocabulary names it."""


class Tokenizer(Protocol):
    """What the data needs of a tokenizer: ids below `size`, and the id that ends a document if there is one."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, without its end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, as far as they make text."""


class ByteTokenizer:
    """Each byte is its own id; 0xFF, which UTF-8 never uses, ends a document."""

    name = "byte"
    size = 256
    end: int | None = 0xFF

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`; adds no special tokens of its own to a document.

    The end of a document is the `eos_token` of a `tokenizer_config.json` beside the file, else the first well-known
    name that the vocabulary holds (`<|endoftext|>`, `</s>`, …), else none.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self._tokenizer = _load(Path(path))
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(ids.values(), default=-1) + 1
        named = _configured_end(Path(path))
        if named is not None and named not in ids:
            raise DataError(
                f"data.tokenizer={path}: the eos_token {named!r} beside it is not in its vocabulary; mend it"
            )
        names = END_NAMES if named is None else (named,)
        self.end: int | None = next((ids[name] for name in names if name in ids), None)

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        texts = [document.decode() for document in documents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


def load_tokenizer(name: str | Path = "byte") -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `byte`, or the path of a `tokenizer.json`."""
    return ByteTokenizer() if str(name) == "byte" else FileTokenizer(name)


def least_vocab(name: str | Path = "byte") -> int:
    """The smallest legal `model.vocab` for the tokenizer that `data.tokenizer` names."""
    return load_tokenizer(name).size


def check_vocab(vocab: int, tokenizer: Tokenizer) -> None:
    """Raises :class:`DataError` unless `vocab` (`model.vocab`) holds every id of the tokenizer."""
    if vocab < tokenizer.size:
        raise DataError(
            f"model.vocab={vocab}: must hold the {tokenizer.size} ids of data.tokenizer={tokenizer.name}; "
            f"use {tokenizer.size} or more"
        )


def _load(path: Path) -> hf.Tokenizer:
    if not path.is_file():
        rule = "is a folder" if path.is_dir() else "no such file"
        raise DataError(f"data.tokenizer={path}: {rule}; use byte or the path of a tokenizer.json")
    try:
        import tokenizers as hf
    except ImportError as error:
        raise DataError(
            f"data.tokenizer={path}: needs the tokenizers package; use pip install 'megastack[tokenizers]' or byte"
        ) from error
    try:
        return hf.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a file that it cannot parse
        raise DataError(f"data.tokenizer={path}: not a tokenizer.json ({error}); use byte or another file") from error


def _configured_end(path: Path) -> str | None:
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file():
        return None
    try:
        config = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"data.tokenizer={path}: {beside} is not JSON ({error}); mend or remove it") from error
    end = config.get("eos_token") if isinstance(config, dict) else None
    return end.get("content") if isinstance(end, dict) else end
