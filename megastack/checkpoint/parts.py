"""Reading parts of stored boxes into tensors, with the file's checksum taken in the same pass.

A part that is contiguous on both sides is read straight into the tensor. Any other goes through a mapping of the file,
of which only the pages that hold the part are touched. So a reader needs its own tensors and one chunk, however large
the files are. A file that is to be checked is read once from beginning to end; what lies between the parts is read into
the chunk and thrown away.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megastack.checkpoint.items import DTYPE_NAMES, DTYPES
from megastack.checkpoint.manifest import ITEM_SIZES, BoxRecord, FileRecord
from megastack.checkpoint.tensorfile import CHUNK_BYTES, bytes_of
from megastack.errors import CheckpointError, counted
from megastack.placement.boxes import Box


@dataclass(frozen=True)
class Part:
    """A part of a stored box and the tensor that it fills.

    Attributes:
        record: the stored box.
        dtype: its safetensors dtype name.
        box: the part, counted from the first element of the stored box.
        target: a tensor of the part's shape, of any layout, device and dtype.
    """

    record: BoxRecord
    dtype: str
    box: Box
    target: Tensor

    @property
    def begin(self) -> int:
        """Where in the file the part's first byte is."""
        return self.record.begin + self._flat(self.box.offset) * ITEM_SIZES[self.dtype]

    @property
    def end(self) -> int:
        """Where in the file its last byte ends."""
        last = tuple(start + size - 1 for start, size in zip(self.box.offset, self.box.size, strict=True))
        return self.record.begin + (self._flat(last) + 1) * ITEM_SIZES[self.dtype]

    @property
    def direct(self) -> bool:
        """Whether the part's bytes in the file are the tensor's, one after another."""
        target = self.target
        alike = target.device.type == "cpu" and DTYPE_NAMES[target.dtype] == self.dtype and target.is_contiguous()
        return alike and self.end - self.begin == target.numel() * target.element_size()

    def _flat(self, index: tuple[int, ...]) -> int:
        flat = 0
        for position, extent in zip(index, self.record.box.size, strict=True):
            flat = flat * extent + position
        return flat


def read_parts(path: Path, parts: Sequence[Part], *, check: FileRecord | None = None) -> None:
    """Fill the targets of the parts, all of which lie in the file at ``path``.

    Args:
        path: a file of the size that the manifest says.
        parts: what to read.
        check: what the whole file must be; given, all of it is read.

    Raises:
        CheckpointError: the file is not what ``check`` says (targets are filled nevertheless), ends too early, or is
            not readable; it may be gone, since a run removes checkpoints while others read them.
    """
    try:
        _read_parts(path, parts, check)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; its run may have removed the checkpoint meanwhile") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _read_parts(path: Path, parts: Sequence[Part], check: FileRecord | None) -> None:
    filled = sorted((part for part in parts if part.target.numel()), key=lambda part: part.begin)
    with _Scan(path) as scan:
        for part in filled:
            if check is not None and part.direct and part.begin >= scan.position:
                scan.skip_to(part.begin)
                scan.take(bytes_of(part.target))
                continue
            if check is not None:
                scan.skip_to(part.end)
            scan.fill(part)
        if check is None:
            return
        scan.skip_to(check.size)
    if scan.crc != check.crc32:
        raise CheckpointError(f"{path}: crc32 {scan.crc:08x}, must be {check.crc32:08x} (corrupt)")


class _Scan:
    """An open file that is read in order, with the crc32 of what lies before the current position."""

    def __init__(self, path: Path) -> None:
        self.crc = 0
        self.position = 0
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def skip_to(self, end: int) -> None:
        """Read on to ``end``, for the checksum alone."""
        while self.position < end:
            self.take(self._scratch[: end - self.position])

    def take(self, target: memoryview) -> None:
        """Read on into ``target``."""
        for start in range(0, len(target), CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            self._read(chunk, self.position)
            self.crc = zlib.crc32(chunk, self.crc)
            self.position += len(chunk)

    def fill(self, part: Part) -> None:
        """Read a part wherever it lies, leaving position and checksum alone."""
        if part.direct:
            self._read(bytes_of(part.target), part.begin)
            return
        record = part.record
        flat = torch.frombuffer(self._map, dtype=DTYPES[part.dtype], count=prod(record.box.size), offset=record.begin)
        part.target.detach().copy_(flat.view(record.box.size)[part.box.slices])
        self._map.madvise(mmap.MADV_DONTNEED)  # the pages need not count as ours until the file is closed

    @cached_property
    def _scratch(self) -> memoryview:
        return memoryview(bytearray(CHUNK_BYTES))

    @cached_property
    def _map(self) -> mmap.mmap:
        # A private mapping counts as writable, which torch wants of a buffer; nothing ever writes to it.
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)

    def _read(self, target: memoryview, position: int) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], position)
            if not count:
                raise CheckpointError(f"{self._path}: ends after {counted(position, 'byte')} (truncated)")
            target, position = target[count:], position + count
