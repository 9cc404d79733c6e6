"""Read a checkpoint: whole tensors in one process, or each rank's boxes through ``torch.distributed.checkpoint``.

:class:`CheckpointReader` needs neither a process group nor the layout that wrote the checkpoint. :class:`BoxReader` is
used by :func:`megastack.checkpoint.load.load`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megastack.checkpoint.collectives import local_work
from megastack.checkpoint.integrity import checkpoint_error, list_names
from megastack.checkpoint.manifest import (
    ITEM_SIZES,
    TRAINER,
    BoxRecord,
    Manifest,
    TensorRecord,
    file_error,
    read_manifest,
    read_trainer,
)
from megastack.checkpoint.state import DTYPES
from megastack.checkpoint.tensor_files import BoxRead, read_boxes
from megastack.comm.group import AxisGroup
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box, whole_box


class CheckpointReader:
    """A checkpoint folder as a mapping from names to global tensors.

    A file is checked against the manifest on the first read.

    Raises:
        CheckpointError: the folder does not contain a complete checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._manifest = read_manifest(self.path)
        self._checked: set[str] = set()

    @property
    def manifest(self) -> Manifest:
        """The files and tensors, as recorded."""
        return self._manifest

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted."""
        return tuple(sorted(self._manifest.tensors))

    @cached_property
    def trainer(self) -> dict[str, Any]:
        """The trainer's state: step, consumed samples, seed, and other values recorded by the training loop."""
        self._check(TRAINER)
        return read_trainer(self.path)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return self._record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return DTYPES[self._record(name).dtype]

    def read(self, name: str) -> Tensor:
        """Read a whole tensor to the CPU.

        Raises:
            CheckpointError: the name is unknown, or a file with a box of the tensor is damaged.
        """
        tensor = self._record(name)
        result = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        for record in tensor.boxes:
            self._check(record.file)
            read = BoxRead(record, tensor.dtype, whole_box(record.box.size), result[record.box.slices])
            read_boxes(self.path / record.file, [read])
        return result

    def verify(self) -> None:
        """Check every file's size and content.

        Raises:
            CheckpointError: a file is damaged; the message names each damaged file.
        """
        if error := checkpoint_error(self.path):
            raise CheckpointError(error)

    def _record(self, name: str) -> TensorRecord:
        if name not in self._manifest.tensors:
            raise CheckpointError(f"{self.path}: no tensor {name!r}; it has {list_names(self.names)}")
        return self._manifest.tensors[name]

    def _check(self, name: str) -> None:
        if name in self._checked:
            return
        if error := file_error(self.path, self._manifest.files[name]):
            raise CheckpointError(error)
        self._checked.add(name)


class BoxReader(StorageReader):
    """Reads each rank's planned boxes from a checkpoint; the caller has checked its manifest and file sizes.

    In the same pass, every file that any rank reads is checked against its crc32, by the rank that reads most of it.
    """

    def __init__(self, path: Path, manifest: Manifest, world: AxisGroup) -> None:
        self.flight_recorder = world.flight_recorder
        self._path = path
        self._manifest = manifest
        self._records = {
            (name, record.box.offset): record for name, tensor in manifest.tensors.items() for record in tensor.boxes
        }

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: each reader reads a single checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert the manifest to torch's metadata."""
        return Metadata({name: _storage_metadata(tensor) for name, tensor in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the manifest has already been read."""

    @local_work
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the number of bytes that this rank reads from each file."""
        wanted: dict[str, int] = defaultdict(int)
        for item in plan.items:
            size = ITEM_SIZES[self._manifest.tensors[item.storage_index.fqn].dtype]
            wanted[self._record(item).file] += item.lengths.numel() * size
        return replace(plan, storage_data=dict(wanted))

    @local_work
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Assign the files to check to the ranks; torch calls this on the coordinator."""
        checks = assign_checks([plan.storage_data for plan in plans])
        return [replace(plan, storage_data=files) for plan, files in zip(plans, checks, strict=True)]

    @local_work
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors, one file after another."""
        reads = defaultdict(list)
        for item in plan.items:
            record = self._record(item)
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            dtype = self._manifest.tensors[item.storage_index.fqn].dtype
            reads[record.file].append(BoxRead(record, dtype, box, planner.resolve_tensor(item)))
        for name in sorted({*reads, *plan.storage_data}):
            check = self._manifest.files[name] if name in plan.storage_data else None
            read_boxes(self._path / name, reads[name], check=check)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return False: the path is passed to the constructor."""
        return False

    def _record(self, item: ReadItem) -> BoxRecord:
        return self._records[item.storage_index.fqn, tuple(item.storage_index.offset or ())]


def assign_checks(bytes_read: list[dict[str, int]]) -> list[set[str]]:
    """Assign each file's checksum to the rank that reads most of it; ties go to the rank with the least to check.

    Files are assigned from largest to smallest, so that ranks that read the same files have equal shares.

    Args:
        bytes_read: for each rank, the number of bytes that it reads from each file.

    Returns:
        The files that each rank checks.
    """
    most: dict[str, int] = defaultdict(int)
    for files in bytes_read:
        for name, count in files.items():
            most[name] = max(most[name], count)
    checks: list[set[str]] = [set() for _ in bytes_read]
    load = [0] * len(bytes_read)
    for name, count in sorted(most.items(), key=lambda pair: (-pair[1], pair[0])):
        readers = [rank for rank, files in enumerate(bytes_read) if files.get(name, 0) == count]
        rank = min(readers, key=lambda reader: (load[reader], reader))
        checks[rank].add(name)
        load[rank] += count
    return checks


def _storage_metadata(tensor: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(r.box.offset), torch.Size(r.box.size)) for r in tensor.boxes]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks)
