"""The manifest of a checkpoint: its files, and the location of each box of each tensor in them.

``manifest.json`` is plain JSON, readable without torch. It contains a checksum of itself, the size and crc32 of every
other file, and the dtype, global shape and boxes of every tensor. It is written last, into a folder that is published
afterwards. A checkpoint is complete if its manifest exists and its files match it.

Reading a manifest checks that it is consistent: file names stay in the folder, each box lies within its file, and the
boxes of a tensor cover it exactly once. A reader then only has to check the files. ``trainer.json`` contains the
trainer's state, which can be any JSON object. The types of the fields that a training run writes are checked here,
since the trainer and the data rely on them.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any

from megastack.errors import CheckpointError, counted
from megastack.placement.boxes import Box, coverage_error
from megastack.records import (
    MAX_INTEGER,
    RecordError,
    integer,
    integers,
    mapping,
    number,
    parse_record,
    sequence,
    shown,
    string,
)

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
RANK_FILE = re.compile(r"rank_[0-9]{5,}\.safetensors")
REPORT_FILE = re.compile(r"rank_[0-9]{5,}\.(json|part)")
"""The report that a rank writes next to its file during an asynchronous save; removed before publishing."""
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1
}  # fmt: skip
"""Bytes per element by safetensors dtype name."""

_FORMAT, _VERSION = "megastack-checkpoint", 1
_CHUNK_BYTES = 1 << 20
_CRC32 = re.compile(r"[0-9a-f]{8}")
_LAST_TIME = 253_402_300_799
"""The end of the year 9999, in unix seconds."""
_MOST_DIMS = 64
_TRAINER_COUNTS = ("step", "consumed_tokens", "consumed_samples", "skipped")


@dataclass(frozen=True)
class FileRecord:
    """The expected size and crc32 of a file of the checkpoint."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class BoxRecord:
    """A box of a tensor and the file offset of its bytes, which are row-major."""

    box: Box
    file: str
    begin: int


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor: safetensors dtype name, shape, and the boxes that cover it."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[BoxRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """The files and tensors of a checkpoint, by name."""

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    world_size: int = 1
    time: float = field(default=0.0, compare=False)


def rank_file(rank: int) -> str:
    """Return the name of a rank's file, e.g. ``rank_00003.safetensors``."""
    return f"rank_{rank:05d}.safetensors"


def report_file(rank: int) -> str:
    """Return the name of a rank's report, e.g. ``rank_00003.json``."""
    return f"rank_{rank:05d}.json"


def box_key(name: str, offset: tuple[int, ...]) -> str:
    """Return the key of a box in its safetensors file, e.g. ``model/blocks.0.mlp.up.weight@0,64,0``."""
    return f"{name}@{','.join(map(str, offset))}"


def dump_manifest(manifest: Manifest) -> str:
    """Return the content of ``manifest.json``."""
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "time": manifest.time,
        "world_size": manifest.world_size,
        "files": {file.name: {"size": file.size, "crc32": f"{file.crc32:08x}"} for file in manifest.files.values()},
        "tensors": {name: _tensor_json(tensor) for name, tensor in manifest.tensors.items()},
    }
    return json.dumps({"crc32": f"{_checksum(body):08x}", "body": body}) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises:
        CheckpointError: the manifest is missing, invalid or inconsistent; the message names the file.
    """
    path = folder / MANIFEST
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the folder does not hold a complete checkpoint") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (OSError, RecordError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable manifest ({type(error).__name__}: {error})") from error


def size_errors(folder: Path, manifest: Manifest) -> list[str]:
    """Return one message for each file that is missing or has the wrong size."""
    return [error for file in manifest.files.values() if (error := size_error(folder, file))]


def size_error(folder: Path, file: FileRecord) -> str | None:
    """Return an error that names the file if it is missing or has the wrong size."""
    path = folder / file.name
    try:
        size = path.stat().st_size
    except OSError:
        return f"{path}: missing"
    kind = "truncated" if size < file.size else "too long"
    return None if size == file.size else f"{path}: {counted(size, 'byte')}, must be {file.size} ({kind})"


class OutOfTimeError(Exception):
    """A file could not be read before the deadline."""


def file_error(folder: Path, file: FileRecord, deadline: float | None = None) -> str | None:
    """Return an error that names the file if its size or content differs from the manifest, else ``None``.

    Raises:
        OutOfTimeError: the file could not be read before ``deadline`` (on the monotonic clock).
    """
    path = folder / file.name
    if problem := size_error(folder, file):
        return problem
    try:
        found = crc32_of(path, deadline)
    except OSError as error:
        return f"{path}: cannot be read ({error})"
    return None if found == file.crc32 else f"{path}: crc32 {found:08x}, must be {file.crc32:08x} (corrupt)"


def crc32_of(path: Path, deadline: float | None = None) -> int:
    """Compute the crc32 of a file's content.

    Raises:
        OutOfTimeError: the file could not be read before ``deadline``.
    """
    crc, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            if deadline is not None and time.monotonic() > deadline:
                raise OutOfTimeError
            crc = zlib.crc32(chunk[:count], crc)
    return crc


def read_trainer(folder: Path) -> dict[str, Any]:
    """Read the trainer's state in a checkpoint; the caller has checked the file.

    Raises:
        CheckpointError: the file is missing, not a JSON object, or has a known field of the wrong type.
    """
    path = folder / TRAINER
    try:
        trainer = parse_record(path.read_bytes())
        _check_trainer(trainer)
    except (OSError, RecordError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return trainer


def _check_trainer(trainer: Mapping[str, Any]) -> None:
    """Check the types of the fields that a training run writes.

    Raises:
        RecordError: a field has the wrong type.
    """
    for name in set(_TRAINER_COUNTS) & set(trainer):
        integer(trainer, name)
    if trainer.get("batch") is not None:
        mapping(trainer, "batch")
    _check_blend(trainer)
    for phase in sequence(trainer, "stages") if "stages" in trainer else ():
        record = mapping({"stages": phase}, "stages")
        integer(record, "from_step")
        _check_blend(record)


def _check_blend(record: Mapping[str, Any]) -> None:
    for item in sequence(record, "blend") if "blend" in record else ():
        entry = mapping({"blend": item}, "blend")
        integer(entry, "begin")
        for weight in mapping(entry, "weights").values():
            number({"weights": weight}, "weights")


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _tensor_json(tensor: TensorRecord) -> dict[str, Any]:
    boxes = [
        {"offset": record.box.offset, "size": record.box.size, "file": record.file, "begin": record.begin}
        for record in tensor.boxes
    ]
    return {"dtype": tensor.dtype, "shape": tensor.shape, "boxes": boxes}


def _parse(text: bytes) -> Manifest:
    outer = parse_record(text)
    body = mapping(outer, "body")
    _require(body.get("format") == _FORMAT, f"format {shown(body.get('format'))} is not {_FORMAT!r}")
    version = integer(body, "version")
    _require(version <= _VERSION, f"version {version} is newer than {_VERSION}; upgrade megastack")
    _require(_checksum(body) == _crc32(outer), "its checksum does not match its content (corrupt)")
    files = {name: _parse_file(name, mapping(body["files"], name)) for name in mapping(body, "files")}
    _require(TRAINER in files, f"{TRAINER} is not among its files")
    tensors = {name: _parse_tensor(name, mapping(body["tensors"], name)) for name in mapping(body, "tensors")}
    for error in chain(_tensor_errors(files, tensors), _file_errors(tensors)):
        raise CheckpointError(error)
    written = number(body, "time", least=0, most=_LAST_TIME)
    return Manifest(files, tensors, integer(body, "world_size", least=1), written)


def _parse_file(name: str, file: dict[str, Any]) -> FileRecord:
    _require(name == TRAINER or RANK_FILE.fullmatch(name) is not None, f"{shown(name)} is not a file of a checkpoint")
    return FileRecord(name, integer(file, "size"), _crc32(file))


def _parse_tensor(name: str, tensor: dict[str, Any]) -> TensorRecord:
    boxes = tuple(_parse_box(mapping({name: box}, name)) for box in sequence(tensor, "boxes"))
    return TensorRecord(string(tensor, "dtype"), integers(tensor, "shape"), boxes)


def _parse_box(box: dict[str, Any]) -> BoxRecord:
    return BoxRecord(Box(integers(box, "offset"), integers(box, "size")), string(box, "file"), integer(box, "begin"))


def _crc32(record: Mapping[str, Any]) -> int:
    text = string(record, "crc32")
    _require(_CRC32.fullmatch(text) is not None, f"crc32 must be eight hexadecimal digits, not {shown(text)}")
    return int(text, 16)


def _tensor_errors(files: Mapping[str, FileRecord], tensors: Mapping[str, TensorRecord]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_SIZES:
            yield f"{shown(name)}: dtype {shown(tensor.dtype)} is not supported"
        elif len(tensor.shape) > _MOST_DIMS or _allocated(tensor) > MAX_INTEGER:
            yield f"{shown(name)}: shape {shown(list(tensor.shape))} is too large"
        elif error := coverage_error(tensor.shape, [record.box for record in tensor.boxes]):
            yield f"{name}: {error}"
        else:
            ends = ((r, r.begin + _nbytes(tensor, r)) for r in tensor.boxes)
            yield from (f"{name}: lies outside {shown(r.file)}" for r, end in ends if end > _size(files, r))


def _file_errors(tensors: Mapping[str, TensorRecord]) -> Iterator[str]:
    """Yield an error for each pair of boxes whose bytes overlap in a file."""
    spans = defaultdict(list)
    for name, tensor in tensors.items():
        for record in tensor.boxes:
            if count := _nbytes(tensor, record):
                spans[record.file].append((record.begin, record.begin + count, name))
    for file, found in spans.items():
        found.sort()
        for (_, end, first), (begin, _, second) in pairwise(found):
            if begin < end:
                yield f"{first} and {second}: share bytes of {file}"


def _allocated(tensor: TensorRecord) -> int:
    """Return the tensor's size in bytes, counting extents of 0 as 1, as torch does for strides."""
    return prod(max(1, extent) for extent in tensor.shape) * ITEM_SIZES[tensor.dtype]


def _nbytes(tensor: TensorRecord, record: BoxRecord) -> int:
    return prod(record.box.size) * ITEM_SIZES[tensor.dtype]


def _size(files: Mapping[str, FileRecord], record: BoxRecord) -> int:
    return files[record.file].size if record.file in files else -1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(message)
