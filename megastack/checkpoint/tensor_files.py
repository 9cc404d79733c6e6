"""Safetensors files: written in one pass with their checksum, read box by box directly into tensors.

Writing: sizes are known in advance, so the header is written first and the data follows, tensor by tensor. The crc32 is
updated with each chunk while it is in the cache, and the file is flushed once at the end. Tensors are sorted by
decreasing element size, which keeps each of them aligned. Contiguous tensors are written without a copy.

Reading: a box that is contiguous in both the file and the tensor is read directly into the tensor. Any other box is
copied from a memory map, which touches only the pages that contain it. A reader therefore needs memory only for its
tensors and one chunk, regardless of the size of the files. To check a file's crc32, it is read once from beginning to
end; bytes between the boxes are read into the chunk and dropped.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megastack.checkpoint.manifest import ITEM_SIZES, BoxRecord, FileRecord
from megastack.checkpoint.state import DTYPE_NAMES, DTYPES
from megastack.errors import CheckpointError, counted
from megastack.placement.boxes import Box

CHUNK_BYTES = 1 << 20
"""Number of bytes read or written at a time; a chunk stays in the cache between its copy and its checksum."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to write: its key, safetensors dtype name and shape, and a function that loads it on demand."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its size in the file, in bytes."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


def write_tensors(path: Path, tensors: Sequence[LazyTensor]) -> tuple[FileRecord, dict[str, int]]:
    """Write a safetensors file; return its record and the file offset of each key's bytes.

    Raises:
        OSError: the file cannot be written; the caller removes the partial file.
    """
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_SIZES[tensor.dtype], tensor.key))
    header, begins = _header(ordered)
    with open(path, "xb", buffering=0) as file:
        crc = _write(file.fileno(), memoryview(header), 0)
        for tensor in ordered:
            crc = _write(file.fileno(), bytes_of(tensor.load().detach().cpu().contiguous()), crc)
        os.fsync(file.fileno())
        size = file.tell()
    return FileRecord(path.name, size, crc), begins


def group_by_size(tensors: Sequence[LazyTensor], limit: int) -> Iterator[list[LazyTensor]]:
    """Yield the tensors in order, in groups of at most ``limit`` bytes; a larger tensor forms its own group."""
    group: list[LazyTensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group


def _header(tensors: Sequence[LazyTensor]) -> tuple[bytes, dict[str, int]]:
    """Return the length-prefixed header, padded so that the data is aligned, and the file offset of each key."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, starts = 0, {}
    for tensor in tensors:
        starts[tensor.key], end = end, end + tensor.nbytes
        entries[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.key], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: base + start for key, start in starts.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    # reshape keeps an unusual stride of a tensor with one element, which then cannot be viewed as bytes
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _write(descriptor: int, data: memoryview, crc: int) -> int:
    """Write all of the data and return the updated crc32."""
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        crc = zlib.crc32(chunk, crc)
        while chunk:  # a write may be partial, e.g. the last one before the disk is full
            chunk = chunk[os.write(descriptor, chunk) :]
    return crc


@dataclass(frozen=True)
class BoxRead:
    """One read: a box within a stored box, and the tensor that it fills.

    Attributes:
        record: the stored box.
        dtype: its safetensors dtype name.
        box: the box to read, relative to the stored box.
        target: a tensor of that box's shape, with any strides, device and dtype.
    """

    record: BoxRecord
    dtype: str
    box: Box
    target: Tensor

    @property
    def begin(self) -> int:
        """File offset of the first byte."""
        return self.record.begin + self._flat(self.box.offset) * ITEM_SIZES[self.dtype]

    @property
    def end(self) -> int:
        """File offset after the last byte."""
        last = tuple(start + size - 1 for start, size in zip(self.box.offset, self.box.size, strict=True))
        return self.record.begin + (self._flat(last) + 1) * ITEM_SIZES[self.dtype]

    @property
    def direct(self) -> bool:
        """Whether the bytes are contiguous in the file and have the tensor's layout."""
        target = self.target
        same = target.device.type == "cpu" and DTYPE_NAMES[target.dtype] == self.dtype and target.is_contiguous()
        return same and self.end - self.begin == target.numel() * target.element_size()

    def _flat(self, index: tuple[int, ...]) -> int:
        flat = 0
        for position, extent in zip(index, self.record.box.size, strict=True):
            flat = flat * extent + position
        return flat


def read_boxes(path: Path, reads: Sequence[BoxRead], *, check: FileRecord | None = None) -> None:
    """Fill the targets of all reads from the file at ``path``.

    Args:
        path: a file whose size matches the manifest.
        reads: the boxes to read, all of them in this file.
        check: the file's record; if given, the whole file is read and checked against it.

    Raises:
        CheckpointError: the file does not match ``check`` (the targets are filled anyway), is truncated or cannot be
            read; it may be missing, since a run can remove checkpoints while others read them.
    """
    try:
        _read_boxes(path, reads, check)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; its run may have removed the checkpoint meanwhile") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _read_boxes(path: Path, reads: Sequence[BoxRead], check: FileRecord | None) -> None:
    filled = sorted((read for read in reads if read.target.numel()), key=lambda read: read.begin)
    with _SequentialFile(path) as file:
        for read in filled:
            if check is not None and read.direct and read.begin >= file.position:
                file.skip_to(read.begin)
                file.read_into(bytes_of(read.target))
                continue
            if check is not None:
                file.skip_to(read.end)
            file.fill(read)
        if check is None:
            return
        file.skip_to(check.size)
    if file.crc != check.crc32:
        raise CheckpointError(f"{path}: crc32 {file.crc:08x}, must be {check.crc32:08x} (corrupt)")


class _SequentialFile:
    """An open file that is read sequentially, with the crc32 of all bytes before the current position."""

    def __init__(self, path: Path) -> None:
        self.crc = 0
        self.position = 0
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def __enter__(self) -> _SequentialFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def skip_to(self, end: int) -> None:
        """Read up to ``end`` for the checksum only."""
        while self.position < end:
            self.read_into(self._scratch[: end - self.position])

    def read_into(self, target: memoryview) -> None:
        """Read the next bytes into ``target``."""
        for start in range(0, len(target), CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            self._read(chunk, self.position)
            self.crc = zlib.crc32(chunk, self.crc)
            self.position += len(chunk)

    def fill(self, read: BoxRead) -> None:
        """Read a box at any position; the current position and the checksum do not change."""
        if read.direct:
            self._read(bytes_of(read.target), read.begin)
            return
        record = read.record
        flat = torch.frombuffer(self._map, dtype=DTYPES[read.dtype], count=prod(record.box.size), offset=record.begin)
        read.target.detach().copy_(flat.view(record.box.size)[read.box.slices])
        self._map.madvise(mmap.MADV_DONTNEED)  # release the pages before the file is closed

    @cached_property
    def _scratch(self) -> memoryview:
        return memoryview(bytearray(CHUNK_BYTES))

    @cached_property
    def _map(self) -> mmap.mmap:
        # torch requires a writable buffer, and a private map counts as one; it is never written to
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)

    def _read(self, target: memoryview, position: int) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], position)
            if not count:
                raise CheckpointError(f"{self._path}: ends after {counted(position, 'byte')} (truncated)")
            target, position = target[count:], position + count
