"""The bytes of a checkpoint, behind the storage interfaces of ``torch.distributed.checkpoint``.

torch's own storage pickles its metadata; this one keeps one safetensors file a rank, and JSON. The writer's folder is
made once the plan is approved, every rank writes its file into it, and when all have reported the coordinator adds
``trainer.json`` and the manifest and publishes the folder. A rank that fails before that is reported to all.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megastack.checkpoint.items import DTYPE_NAMES, DTYPES
from megastack.checkpoint.manifest import (
    MANIFEST,
    TRAINER,
    BoxRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    box_key,
    dump_manifest,
    rank_file,
)
from megastack.checkpoint.planners import narrow
from megastack.checkpoint.publish import begin, note_latest, publish, write_text, writing_folder
from megastack.checkpoint.tensorfile import Block, TensorFile, write_tensors
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box


@dataclass(frozen=True)
class _Written:
    """Where a box went."""

    file: FileRecord
    record: BoxRecord


class BoxWriter(StorageWriter):
    """Writes this rank's planned boxes into one file of the checkpoint at ``path``.

    Args:
        path: the folder that the checkpoint will be.
        rank: this rank; it names the file.
        world_size: the number of ranks, for the record.
        trainer: the trainer's state; the coordinator's is written.
    """

    def __init__(self, path: Path, rank: int, world_size: int, trainer: dict[str, Any]) -> None:
        self._path = path
        self._rank = rank
        self._world_size = world_size
        self._trainer = trainer
        self._trainer_text = ""

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder; only the coordinator is asked, and nobody writes before it answers."""
        self._trainer_text = _json_text(self._trainer)
        begin(self._path)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; a rank without boxes writes none."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan.items, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add the trainer's state and the manifest, and publish; called on the coordinator after all ranks wrote."""
        folder, data = writing_folder(self._path), self._trainer_text.encode()
        trainer = FileRecord(TRAINER, write_text(folder / TRAINER, self._trainer_text), zlib.crc32(data))
        written = [result for rank in results for result in rank]
        manifest = _manifest(metadata, written, trainer, self._world_size)
        write_text(folder / MANIFEST, dump_manifest(manifest))
        publish(self._path)
        note_latest(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Writers are made with their path."""
        return False

    def _write(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        path = writing_folder(self._path) / rank_file(self._rank)
        boxes = {box_key(item.index.fqn, _box(item).offset): item for item in items}
        try:
            file, begins = write_tensors(path, [_block(key, item, planner) for key, item in boxes.items()])
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: cannot be written ({error})") from error
        return [
            WriteResult(item.index, _block(key, item, planner).nbytes, _Written(file, record))
            for key, item in boxes.items()
            for record in [BoxRecord(_box(item), file.name, begins[key])]
        ]


class BoxReader(StorageReader):
    """Reads planned boxes from the files of a checkpoint whose manifest and files the caller has checked."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in torch's terms."""
        return Metadata({name: _storage_metadata(tensor) for name, tensor in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each planned part into its place, one file after another."""
        names = {item.storage_index.fqn for item in plan.items}
        tensors = {name: self._manifest.tensors[name] for name in names}
        records = {(name, record.box.offset): record for name in names for record in tensors[name].boxes}
        by_file = defaultdict(list)
        for item in plan.items:
            name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            record = records[name, offset]
            by_file[record.file].append((item, record, tensors[name].dtype))
        for name, reads in by_file.items():
            file = TensorFile(self._path / name)
            for item, record, dtype in reads:
                stored = narrow(file.tensor(record, dtype), tuple(item.storage_offsets), tuple(item.lengths))
                target = planner.resolve_tensor(item)
                target.copy_(stored)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Readers are made with their path."""
        return False


def _block(key: str, item: WriteItem, planner: SavePlanner) -> Block:
    assert item.tensor_data is not None

    def tensor() -> Tensor:
        data = planner.resolve_data(item)
        assert isinstance(data, Tensor)
        return data

    return Block(key, DTYPE_NAMES[item.tensor_data.properties.dtype], _box(item).size, tensor)


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _manifest(metadata: Metadata, written: list[WriteResult], trainer: FileRecord, world_size: int) -> Manifest:
    files = {result.storage_data.file.name: result.storage_data.file for result in written}
    boxes = defaultdict(list)
    for result in written:
        boxes[result.index.fqn].append(result.storage_data.record)
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        records = tuple(sorted(boxes[name], key=lambda record: record.box.offset))
        tensors[name] = TensorRecord(DTYPE_NAMES[tensor.properties.dtype], tuple(tensor.size), records)
    return Manifest(dict(sorted(files.items())) | {TRAINER: trainer}, tensors, world_size, time.time())


def _storage_metadata(tensor: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(r.box.offset), torch.Size(r.box.size)) for r in tensor.boxes]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks)


def _json_text(trainer: dict[str, Any]) -> str:
    try:
        return json.dumps(trainer, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"trainer state: must be plain JSON ({error})") from error
