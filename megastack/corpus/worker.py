"""Worker process: tokenize one slice of the input into files that are renamed into place when complete."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from megastack.corpus.inputs import BadLines, InputSlice, read_slice
from megastack.data.tokenizers import Tokenizer, append_end, load_tokenizer

_BATCH_BYTES, _BATCH = 1 << 20, 1024
"""A tokenizer batch ends with the document that reaches either limit."""


@dataclass(frozen=True)
class Settings:
    """Settings that determine the tokens; `digest` hashes the tokenizer's file, `dtype` is the type of stored ids."""

    tokenizer: str
    digest: str
    dtype: str
    field: str
    skip: bool
    allow_special_tokens: bool = False


@dataclass(frozen=True)
class Counts:
    """Counts of one or more slices; `first_bad` is the error of the first bad line that was skipped."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    skipped: int = 0
    largest_id: int = -1
    first_bad: str | None = None

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.text_bytes + other.text_bytes,
            self.skipped + other.skipped,
            max(self.largest_id, other.largest_id),
            self.first_bad or other.first_bad,
        )


@dataclass(frozen=True)
class SliceOutput:
    """The files of one finished slice: ids, document lengths, and counts, which are written last."""

    stem: str

    @property
    def ids(self) -> Path:
        return Path(self.stem + ".ids")

    @property
    def lengths(self) -> Path:
        return Path(self.stem + ".npy")

    @property
    def counts(self) -> Path:
        return Path(self.stem + ".json")

    def read_counts(self, settings: Settings) -> Counts | None:
        """Read the counts of an output; None if it is incomplete or skipped lines that `settings` do not allow."""
        width = np.dtype(settings.dtype).itemsize
        try:
            counts = Counts(**json.loads(self.counts.read_text(encoding="utf-8")))
            complete = self.ids.stat().st_size == counts.tokens * width and self.lengths.is_file()
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return counts if complete and (settings.skip or not counts.skipped) else None


def tokenize_slice(input_slice: InputSlice, settings: Settings, output: SliceOutput) -> Counts:
    """Write the output of a slice.

    Raises:
        DataError: a line is bad, and bad lines are not skipped.
    """
    bad, lengths, total = BadLines(settings.skip), [np.empty(0, "<i4")], Counts()
    tokenizer, dtype = _tokenizer(settings), np.dtype(settings.dtype)
    with open(f"{output.ids}.part", "wb") as out:
        for batch in _batches(read_slice(input_slice, settings.field, bad)):
            ids, sizes = _encoded(tokenizer, batch)
            out.write(ids.astype(dtype).tobytes())
            lengths.append(sizes)
            largest = int(ids.max()) if len(ids) else -1
            total += Counts(len(sizes), len(ids), sum(map(len, batch)), largest_id=largest)
    total += Counts(skipped=bad.count, first_bad=bad.first)
    os.replace(f"{output.ids}.part", output.ids)
    with open(output.lengths, "wb") as file:
        np.save(file, np.concatenate(lengths))
    unfinished = output.counts.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(total)), encoding="utf-8")
    os.replace(unfinished, output.counts)
    return total


def start_worker() -> None:
    """Set up a pool process: one tokenizer thread, and interrupts handled by the parent alone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@cache
def _tokenizer(settings: Settings) -> Tokenizer:
    """Load the tokenizer, once per process and file content."""
    return load_tokenizer(settings.tokenizer, allow_special_tokens=settings.allow_special_tokens)


def _encoded(tokenizer: Tokenizer, batch: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated ids of all documents with their end ids, and the length of each, without empty ones."""
    encoded = [append_end(ids, tokenizer.end) for ids in tokenizer.encode(batch) if len(ids)]
    return _concatenated(encoded), np.array([len(ids) for ids in encoded], "<i4")


def _concatenated(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _batches(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_BYTES or len(batch) == _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
