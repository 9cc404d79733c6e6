"""The bytes behind ``torch.distributed.checkpoint``.

torch's own storage pickles its metadata; this one keeps one safetensors file a rank, and JSON. The writer's folder is
made once the plan is approved, every rank writes its file into it, and when all have reported the coordinator adds
``trainer.json`` and the manifest and publishes the folder. A rank that fails before that is reported to all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megastack.checkpoint.collectives import local_work
from megastack.checkpoint.items import DTYPES
from megastack.checkpoint.manifest import ITEM_SIZES, BoxRecord, Manifest, TensorRecord
from megastack.checkpoint.parts import Part, read_parts
from megastack.checkpoint.publish import Guard
from megastack.checkpoint.recovery import begin
from megastack.checkpoint.write import RankReport, complete, trainer_text, write_share
from megastack.comm.group import AxisGroup
from megastack.placement.boxes import Box


class BoxWriter(StorageWriter):
    """Writes this rank's planned boxes into one file of the checkpoint at ``path``.

    Args:
        path: the folder that the checkpoint will be.
        world: all ranks; this one names the file.
        trainer: the trainer's state; the coordinator's is written.
        guard: the coordinator's, as for :func:`~megastack.checkpoint.save.save`.
    """

    def __init__(self, path: Path, world: AxisGroup, trainer: dict[str, Any], guard: Guard | None = None) -> None:
        self.flight_recorder = world.flight_recorder
        self._path = path
        self._rank = world.rank
        self._trainer = trainer
        self._trainer_text = ""
        self._guard = guard

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, as it is."""
        return plan

    @local_work
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder; only the coordinator is asked, and nobody writes before it answers."""
        self._trainer_text = trainer_text(self._trainer)
        begin(self._path, self._guard)
        return plans

    @local_work
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; the one result is its report."""

        def tensor(item: WriteItem) -> Tensor:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            return data

        report = write_share(self._path, self._rank, plan.items, tensor)
        size = report.file.size if report.file else 0
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(f"rank {self._rank}"), size, report)])
        return done

    @local_work
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add the trainer's state and the manifest, and publish; called on the coordinator after all ranks wrote."""
        reports: list[RankReport] = [result.storage_data for rank in results for result in rank]
        complete(self._path, metadata, reports, self._trainer_text, self._guard)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Writers are made with their path."""
        return False


class BoxReader(StorageReader):
    """Reads planned boxes from the files of a checkpoint, whose manifest and file sizes the caller has checked.

    Every file that any rank reads from is checked by one rank, the one that reads most of it, in the same pass.
    """

    def __init__(self, path: Path, manifest: Manifest, world: AxisGroup) -> None:
        self.flight_recorder = world.flight_recorder
        self._path = path
        self._manifest = manifest
        self._records = {
            (name, record.box.offset): record for name, tensor in manifest.tensors.items() for record in tensor.boxes
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in torch's terms."""
        return Metadata({name: _storage_metadata(tensor) for name, tensor in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    @local_work
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the bytes that this rank reads of each file."""
        wanted: dict[str, int] = defaultdict(int)
        for item in plan.items:
            size = ITEM_SIZES[self._manifest.tensors[item.storage_index.fqn].dtype]
            wanted[self._record(item).file] += item.lengths.numel() * size
        return replace(plan, storage_data=dict(wanted))

    @local_work
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell each rank which files it is to check; only the coordinator is asked."""
        checks = share_checks([plan.storage_data for plan in plans])
        return [replace(plan, storage_data=mine) for plan, mine in zip(plans, checks, strict=True)]

    @local_work
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors, one file after another."""
        parts = defaultdict(list)
        for item in plan.items:
            record = self._record(item)
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            dtype = self._manifest.tensors[item.storage_index.fqn].dtype
            parts[record.file].append(Part(record, dtype, box, planner.resolve_tensor(item)))
        for name in sorted({*parts, *plan.storage_data}):
            check = self._manifest.files[name] if name in plan.storage_data else None
            read_parts(self._path / name, parts[name], check=check)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Readers are made with their path."""
        return False

    def _record(self, item: ReadItem) -> BoxRecord:
        return self._records[item.storage_index.fqn, tuple(item.storage_index.offset or ())]


def share_checks(wanted: list[dict[str, int]]) -> list[set[str]]:
    """Which rank checks which file, from the bytes that each rank reads of each: who reads most, then who checks least.

    The checks go from the largest file to the smallest, so that ranks that read the same have equal shares.
    """
    most: dict[str, int] = defaultdict(int)
    for files in wanted:
        for name, count in files.items():
            most[name] = max(most[name], count)
    checks: list[set[str]] = [set() for _ in wanted]
    load = [0] * len(wanted)
    for name, count in sorted(most.items(), key=lambda pair: (-pair[1], pair[0])):
        readers = [rank for rank, files in enumerate(wanted) if files.get(name, 0) == count]
        rank = min(readers, key=lambda reader: (load[reader], reader))
        checks[rank].add(name)
        load[rank] += count
    return checks


def _storage_metadata(tensor: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(r.box.offset), torch.Size(r.box.size)) for r in tensor.boxes]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks)
