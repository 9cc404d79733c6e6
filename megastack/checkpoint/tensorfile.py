"""One safetensors file: written in a single pass with its checksum, read box by box.

Sizes are known before the first byte, so the header goes first and the data follows, tensor by tensor, with the crc32
taken from each chunk while it is warm, and one fsync at the end. Blocks are ordered by falling element size, which
keeps every tensor aligned to its elements. Nothing is copied on the way from a contiguous tensor to the file.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megastack.checkpoint.manifest import ITEM_SIZES, FileRecord

CHUNK_BYTES = 1 << 20
"""What is read or written at a time: it stays in the cache between its copy and its checksum."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class Block:
    """A tensor to be written: its key, safetensors dtype name and shape, and how to get it when its turn comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    tensor: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


def write_tensors(path: Path, blocks: Sequence[Block]) -> tuple[FileRecord, dict[str, int]]:
    """Write a safetensors file and return its record and where in the file each key's bytes begin.

    Raises:
        OSError: the file cannot be written; what there is of it stays for the caller to remove.
    """
    ordered = sorted(blocks, key=lambda block: (-ITEM_SIZES[block.dtype], block.key))
    header, begins = _header(ordered)
    with open(path, "xb", buffering=0) as file:
        crc = _write(file.fileno(), memoryview(header), 0)
        for block in ordered:
            crc = _write(file.fileno(), bytes_of(block.tensor().detach().cpu().contiguous()), crc)
        os.fsync(file.fileno())
        size = file.tell()
    return FileRecord(path.name, size, crc), begins


def _header(blocks: Sequence[Block]) -> tuple[bytes, dict[str, int]]:
    """The length-prefixed header, padded so that the data is aligned, and the position of each key in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, starts = 0, {}
    for block in blocks:
        starts[block.key], end = end, end + block.nbytes
        entries[block.key] = {
            "dtype": block.dtype,
            "shape": list(block.shape),
            "data_offsets": [starts[block.key], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: base + start for key, start in starts.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    # reshape would keep an odd stride where there is one element, and such a tensor has no view as bytes
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _write(descriptor: int, data: memoryview, crc: int) -> int:
    """Write all of the data and return the crc32 that includes it."""
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        crc = zlib.crc32(chunk, crc)
        while chunk:  # a write may take only a part, the first one before a full disk does
            chunk = chunk[os.write(descriptor, chunk) :]
    return crc
