"""An independent reader and writer of the token file format, so that tests of each do not rely on the other."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def write_by_hand(prefix: Path, documents: Sequence[Sequence[int]], code: int, *, sentences: int = 1) -> Path:
    """Documents, each stored as `sentences` sequences of about equal length."""
    pieces, bounds = [], [0]
    for document in documents:
        cuts = [len(document) * at // sentences for at in range(sentences + 1)]
        pieces += [document[a:b] for a, b in pairwise(cuts)]
        bounds.append(len(pieces))
    width, place, pointers = struct.calcsize("<" + FORMATS[code]), 0, []
    for piece in pieces:
        pointers.append(place)
        place += len(piece) * width
    ids = [token for piece in pieces for token in piece]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(ids)}{FORMATS[code]}", *ids))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(pieces), len(bounds))
    lengths = struct.pack(f"<{len(pieces)}i", *map(len, pieces))
    tail = struct.pack(f"<{len(pieces)}q", *pointers) + struct.pack(f"<{len(bounds)}q", *bounds)
    prefix.with_suffix(".idx").write_bytes(head + lengths + tail)
    return prefix


def read_by_hand(prefix: Path) -> tuple[int, list[list[int]]]:
    """The code of the id type, and the documents."""
    raw = prefix.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, n, d = struct.unpack_from("<QBQQ", raw, 9)
    assert version == 1 and len(raw) == 34 + 12 * n + 8 * d
    lengths = struct.unpack_from(f"<{n}i", raw, 34)
    pointers = struct.unpack_from(f"<{n}q", raw, 34 + 4 * n)
    bounds = struct.unpack_from(f"<{d}q", raw, 34 + 12 * n)
    data = prefix.with_suffix(".bin").read_bytes()
    pieces = [
        list(struct.unpack_from(f"<{length}{FORMATS[code]}", data, at))
        for at, length in zip(pointers, lengths, strict=True)
    ]
    return code, [[t for piece in pieces[a:b] for t in piece] for a, b in pairwise(bounds)]
