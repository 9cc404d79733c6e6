"""What ranks write, and how their files become a checkpoint; the same for saves that block and saves that do not.

:func:`write_share` is each rank's part: one file, and a :class:`RankReport` of what went where. :func:`complete` is
the first rank's, once all reports are in: trainer state, manifest, publication.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megastack.checkpoint.items import DTYPE_NAMES
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
from megastack.checkpoint.publish import Guard, note_latest, publish, write_texts, writing_folder
from megastack.checkpoint.tensorfile import Block, write_tensors
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box


@dataclass(frozen=True)
class RankReport:
    """What one rank wrote: its file (``None`` where it had nothing to write) and the boxes in it, by name."""

    file: FileRecord | None = None
    boxes: tuple[tuple[str, BoxRecord], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        file = self.file
        boxes = [[name, record.box.offset, record.box.size, record.begin] for name, record in self.boxes]
        return {"file": None if file is None else [file.name, file.size, file.crc32], "boxes": boxes}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RankReport:
        """The inverse of :meth:`as_json`."""
        if record["file"] is None:
            return cls()
        file = FileRecord(*record["file"])
        boxes = ((name, Box(tuple(offset), tuple(size)), begin) for name, offset, size, begin in record["boxes"])
        return cls(file, tuple((name, BoxRecord(box, file.name, begin)) for name, box, begin in boxes))


def write_share(path: Path, rank: int, items: Sequence[WriteItem], tensor: Callable[[WriteItem], Tensor]) -> RankReport:
    """Write this rank's file of the checkpoint at ``path``; a rank without boxes writes none.

    Args:
        path: the folder that the checkpoint will be.
        rank: this rank; it names the file.
        items: the planned boxes.
        tensor: the elements of a planned box, asked for when its turn comes.

    Raises:
        CheckpointError: the file cannot be written.
    """
    if not items:
        return RankReport()
    target = writing_folder(path) / rank_file(rank)
    boxes = {box_key(item.index.fqn, box_of(item).offset): item for item in items}
    blocks = [Block(key, _dtype(item), box_of(item).size, partial(tensor, item)) for key, item in boxes.items()]
    try:
        file, begins = write_tensors(target, blocks)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{target}: cannot be written ({error})") from error
    records = ((item.index.fqn, BoxRecord(box_of(item), file.name, begins[key])) for key, item in boxes.items())
    return RankReport(file, tuple(records))


def complete(
    path: Path, metadata: Metadata, reports: Sequence[RankReport], trainer: str, guard: Guard | None = None
) -> None:
    """Add the trainer's state and the manifest to what all ranks wrote, and publish; one rank calls."""
    data = trainer.encode()
    manifest = _manifest(metadata, reports, FileRecord(TRAINER, len(data), zlib.crc32(data)))
    write_texts(writing_folder(path), {TRAINER: trainer, MANIFEST: dump_manifest(manifest)})
    if guard is not None:
        guard()
    publish(path)
    note_latest(path)


def trainer_text(trainer: dict[str, Any]) -> str:
    """The text of ``trainer.json``.

    Raises:
        CheckpointError: the state is no JSON.
    """
    try:
        return json.dumps(trainer, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"trainer state: must be plain JSON ({error})") from error


def box_of(item: WriteItem) -> Box:
    """The box of the global tensor that a planned item is."""
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _dtype(item: WriteItem) -> str:
    assert item.tensor_data is not None
    return DTYPE_NAMES[item.tensor_data.properties.dtype]


def _manifest(metadata: Metadata, reports: Sequence[RankReport], trainer: FileRecord) -> Manifest:
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
