"""Write a checkpoint: each rank writes one file, then the first rank adds trainer state and manifest and publishes.

:func:`write_rank_file` and :func:`complete` are the two steps, shared by blocking and asynchronous saves.
:class:`BoxWriter` runs them inside ``torch.distributed.checkpoint``. Torch's own storage pickles its metadata; this one
writes one safetensors file per rank, and JSON. The folder is created once the plan is valid. A failure of any rank
before publication is reported to all ranks. :func:`write_checkpoint` writes whole tensors from a single process.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megastack.checkpoint.collectives import local_work
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
from megastack.checkpoint.publish import (
    Guard,
    make_writing_folder,
    publish,
    update_latest,
    write_text,
    write_texts,
    writing_folder,
)
from megastack.checkpoint.state import DTYPE_NAMES
from megastack.checkpoint.tensor_files import LazyTensor, group_by_size, write_tensors
from megastack.comm.group import AxisGroup
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box, whole_box

MOST_FILE_BYTES = 4 << 30
"""Maximum size of a file of :func:`write_checkpoint`, so that ranks can share the work of checking them."""


@dataclass(frozen=True)
class WriteReport:
    """The output of one rank: its file (``None`` if it had nothing to write) and the boxes in it, by name."""

    file: FileRecord | None = None
    boxes: tuple[tuple[str, BoxRecord], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        file = self.file
        boxes = [[name, record.box.offset, record.box.size, record.begin] for name, record in self.boxes]
        return {"file": None if file is None else [file.name, file.size, file.crc32], "boxes": boxes}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> WriteReport:
        """Inverse of :meth:`as_json`."""
        if record["file"] is None:
            return cls()
        file = FileRecord(*record["file"])
        boxes = ((name, Box(tuple(offset), tuple(size)), begin) for name, offset, size, begin in record["boxes"])
        return cls(file, tuple((name, BoxRecord(box, file.name, begin)) for name, box, begin in boxes))


class BoxWriter(StorageWriter):
    """Writes this rank's planned boxes into one file of the checkpoint at ``path``.

    Args:
        path: the checkpoint folder, which appears when it is published.
        world: all ranks.
        trainer: the trainer's state, written by the coordinator.
        guard: called on the coordinator, see :func:`~megastack.checkpoint.save.save`.
    """

    def __init__(self, path: Path, world: AxisGroup, trainer: dict[str, Any], guard: Guard | None = None) -> None:
        self.flight_recorder = world.flight_recorder
        self._path = path
        self._rank = world.rank
        self._trainer = trainer
        self._trainer_text = ""
        self._guard = guard

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: each writer writes a single checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder is created once the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    @local_work
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder; torch calls this on the coordinator before any rank writes."""
        self._trainer_text = trainer_text(self._trainer)
        make_writing_folder(self._path, self._guard)
        return plans

    @local_work
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; the only result is the report."""

        def tensor(item: WriteItem) -> Tensor:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            return data

        report = write_rank_file(self._path, self._rank, plan.items, tensor)
        size = report.file.size if report.file else 0
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(f"rank {self._rank}"), size, report)])
        return done

    @local_work
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete and publish the checkpoint; torch calls this on the coordinator after all ranks have written."""
        reports: list[WriteReport] = [result.storage_data for rank in results for result in rank]
        complete(self._path, metadata, reports, self._trainer_text, self._guard)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return False: the path is passed to the constructor."""
        return False


def write_rank_file(
    path: Path, rank: int, items: Sequence[WriteItem], tensor: Callable[[WriteItem], Tensor]
) -> WriteReport:
    """Write this rank's file of the checkpoint at ``path``; a rank without boxes writes none.

    Args:
        path: the checkpoint folder, which appears when it is published.
        rank: this rank.
        items: the planned boxes.
        tensor: returns the elements of a planned box; called just before the box is written.

    Raises:
        CheckpointError: the file cannot be written.
    """
    if not items:
        return WriteReport()
    target = writing_folder(path) / rank_file(rank)
    boxes = {box_key(item.index.fqn, box_of(item).offset): item for item in items}
    tensors = [LazyTensor(key, _dtype(item), box_of(item).size, partial(tensor, item)) for key, item in boxes.items()]
    try:
        file, begins = write_tensors(target, tensors)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{target}: cannot be written ({error})") from error
    records = ((item.index.fqn, BoxRecord(box_of(item), file.name, begins[key])) for key, item in boxes.items())
    return WriteReport(file, tuple(records))


def complete(
    path: Path, metadata: Metadata, reports: Sequence[WriteReport], trainer: str, guard: Guard | None = None
) -> None:
    """Add the trainer's state and the manifest to the files of all ranks, and publish; called on one rank."""
    data = trainer.encode()
    manifest = _manifest(metadata, reports, FileRecord(TRAINER, len(data), zlib.crc32(data)))
    write_texts(writing_folder(path), {TRAINER: trainer, MANIFEST: dump_manifest(manifest)})
    if guard is not None:
        guard()
    publish(path)
    update_latest(path)


def write_checkpoint(folder: Path, tensors: Sequence[LazyTensor], trainer: Mapping[str, Any]) -> None:
    """Write a checkpoint of whole tensors from one process directly into ``folder``; any layout can load it.

    Args:
        folder: the folder, which must not exist.
        tensors: the tensors; the key is the name in the checkpoint.
        trainer: the trainer's state.
    """
    folder.mkdir()
    files: dict[str, FileRecord] = {}
    records: dict[str, TensorRecord] = {}
    for number, group in enumerate(group_by_size(tensors, MOST_FILE_BYTES)):
        keyed = [LazyTensor(box_key(x.key, (0,) * len(x.shape)), x.dtype, x.shape, x.load) for x in group]
        file, begins = write_tensors(folder / rank_file(number), keyed)
        files[file.name] = file
        for tensor, stored in zip(group, keyed, strict=True):
            box = BoxRecord(whole_box(tensor.shape), file.name, begins[stored.key])
            records[tensor.key] = TensorRecord(tensor.dtype, tensor.shape, (box,))
    text = trainer_text(dict(trainer))
    files[TRAINER] = FileRecord(TRAINER, write_text(folder / TRAINER, text), zlib.crc32(text.encode()))
    write_text(folder / MANIFEST, dump_manifest(Manifest(files, records, len(files) - 1, time.time())))


def trainer_text(trainer: dict[str, Any]) -> str:
    """Return the content of ``trainer.json``.

    Raises:
        CheckpointError: the state cannot be written as JSON.
    """
    try:
        return json.dumps(trainer, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"trainer state: must be plain JSON ({error})") from error


def box_of(item: WriteItem) -> Box:
    """Return the box of the global tensor that a planned item writes."""
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _dtype(item: WriteItem) -> str:
    assert item.tensor_data is not None
    return DTYPE_NAMES[item.tensor_data.properties.dtype]


def _manifest(metadata: Metadata, reports: Sequence[WriteReport], trainer: FileRecord) -> Manifest:
    files = {report.file.name: report.file for report in reports if report.file is not None}
    boxes = defaultdict(list)
    for name, record in (pair for report in reports for pair in report.boxes):
        boxes[name].append(record)
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        records = tuple(sorted(boxes[name], key=lambda record: record.box.offset))
        tensors[name] = TensorRecord(DTYPE_NAMES[tensor.properties.dtype], tuple(tensor.size), records)
    return Manifest(dict(sorted(files.items())) | {TRAINER: trainer}, tensors, len(reports), time.time())
