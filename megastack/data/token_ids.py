"""Whether the ids of token files fit a vocabulary, as far as this can be known before a run starts.

What is read is bounded, however large the files are. A type of ids that the vocabulary holds altogether needs no look.
A file within the bound is read whole, in pieces, so that the answer is certain. Of a larger one pieces are read that
lie evenly over it, and what ``megastack tokenize`` noted about its largest id counts. Ids that only a later sample
meets are found when that sample is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megastack.data.token_files import TokenFile, written_about
from megastack.errors import Violation

MOST_READ = 1 << 28
"""Tokens that are read at most, over all files: about a gigabyte of four-byte ids."""

LARGEST_VOCAB = 1 << 31
"""The most that `model.vocab` may be."""

_PIECE = 1 << 16


def id_violations(files: Sequence[TokenFile], vocab: int, *, most: int = MOST_READ) -> list[Violation]:
    """A violation for each file with ids above the vocabulary, and for each with ids below 0.

    Args:
        files: each once.
        vocab: ids are from 0 to below it (`model.vocab`).
        most: tokens to read at most; small files are read whole first, larger ones share the rest.
    """
    left, found = most, {}
    by_size = sorted(range(len(files)), key=lambda at: files[at].tokens)
    for done, at in enumerate(by_size):
        share = min(files[at].tokens, left // (len(files) - done))
        left -= share
        found[at] = list(_violations(files[at], vocab, share))
    return [violation for at in sorted(found) for violation in found[at]]


def _violations(file: TokenFile, vocab: int, most: int) -> Iterator[Violation]:
    limits = np.iinfo(file.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return
    lowest, highest = (0, 0), (-1, 0)
    for begin, end in pieces(file.tokens, most):
        ids = file.read(begin, end)
        low, high = int(ids.argmin()), int(ids.argmax())
        lowest, highest = min(lowest, (int(ids[low]), begin + low)), max(highest, (int(ids[high]), begin + high))
    noted = _noted_largest(file) if most < file.tokens else -1
    if max(highest[0], noted) >= vocab:
        where = f"at token {highest[1]}" if highest[0] >= noted else f"as {file.name}.json says"
        largest = max(highest[0], noted)
        rule = f"token id {largest} in {file.name}, {where}, is outside the vocabulary"
        advice = f"{largest + 1} or more" if largest < LARGEST_VOCAB else "other token files"
        yield Violation("model.vocab", vocab, rule, (advice,))
    if lowest[0] < 0:
        rule = f"token id {lowest[0]} at token {lowest[1]} is below 0"
        yield Violation("data.paths", file.name, rule, ("files whose ids begin at 0",))


def pieces(tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of about `most` of `tokens` tokens in all: everything where that is enough, else spread evenly."""
    count = -(-tokens // _PIECE)
    wanted = count if most >= tokens else max(1, most // _PIECE)
    for number in range(min(count, wanted)):
        begin = _PIECE * (number * (count - 1) // max(1, wanted - 1))
        yield begin, min(tokens, begin + _PIECE)


def _noted_largest(file: TokenFile) -> int:
    """The largest id by the note of ``megastack tokenize``; -1 without one that tells of as many tokens."""
    note = written_about(file.name)
    largest = note.get("largest_id")
    return largest if note.get("tokens") == file.tokens and isinstance(largest, int) else -1
