"""Who writes and who reads which box: planners for ``torch.distributed.checkpoint``.

The default planners accept tensors of torch's own kinds only; these accept :class:`StateItem` values, whose boxes may
be any parts of a tensor. When saving, the coordinator sees the boxes of all ranks, keeps one copy of each (on the rank
with the fewest bytes so far), and refuses a plan that does not cover every tensor exactly once, or in which replicas
that must be identical are not. When loading, each rank intersects its boxes with the stored ones; ranks need not agree
on anything.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megastack.checkpoint.collectives import local_work
from megastack.checkpoint.cover import cover_error, overlap, within
from megastack.checkpoint.items import State, StateItem
from megastack.comm.flight_recorder import FlightRecorder
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box


@dataclass(frozen=True)
class _Beside:
    """What a rank tells beside its boxes: items of which it has none, and checksums of boxes with where it is."""

    absent: set[str]
    checksums: Mapping[MetadataIndex, tuple[str, str | None]]


class BoxSavePlanner(SavePlanner):
    """Plans the writing of every rank's items; each box is written by one of the ranks that hold it."""

    def __init__(self, state: State, flight_recorder: FlightRecorder | None = None) -> None:
        self.flight_recorder = flight_recorder or FlightRecorder()
        self._state = state
        self._tensors: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Check this rank's items; what torch passes is not needed."""
        self._items = self._state.by_name().values()

    @local_work
    def create_local_plan(self) -> SavePlan:
        """All boxes of this rank; items that have none here travel by name, so that nothing vanishes."""
        writes = [self._write_item(item, box, tensor) for item in self._items for box, tensor in item.filled_boxes()]
        absent = {item.name for item in self._items if not any(item.filled_boxes())}
        checksums = {
            MetadataIndex(item.name, box.offset): (checksum, item.replica)
            for item in self._items
            for box, checksum in item.checksums()
        }
        return SavePlan(writes, planner_data=_Beside(absent, checksums))

    @local_work
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Keep one copy of each box and describe the whole.

        Raises:
            CheckpointError: ranks disagree about a tensor, their boxes are not the whole tensor exactly once, or
                replicas that must be identical differ.
        """
        copies = _copies_by_index(all_plans)
        beside: list[_Beside] = [plan.planner_data for plan in all_plans]
        errors = _disagreements(copies) or _unlike_replicas([each.checksums for each in beside])
        kept = _share_out(copies, len(all_plans))
        tensors = _describe(kept)
        errors += [
            f"{name}: {error}"
            for name, tensor in tensors.items()
            if (error := cover_error(tensor.size, [Box(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks]))
        ]
        absent = {name for each in beside for name in each.absent} - set(tensors)
        errors += [f"{name}: no rank holds any of it" for name in sorted(absent)]
        if errors:
            raise CheckpointError("\n".join(errors))
        plans = [replace(plan, items=items, planner_data=None) for plan, items in zip(all_plans, kept, strict=True)]
        return plans, Metadata(dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The coordinator's plan, as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The tensor behind a planned box, in torch's terms."""
        return self.tensor(write_item)

    def tensor(self, write_item: WriteItem) -> Tensor:
        """The tensor behind a planned box."""
        return self._tensors[write_item.index]

    def _write_item(self, item: StateItem, box: Box, tensor: Tensor) -> WriteItem:
        index = MetadataIndex(item.name, box.offset)
        self._tensors[index] = tensor
        chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
        data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(item.shape))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class BoxLoadPlanner(LoadPlanner):
    """Plans the reading of one rank's items: each of its boxes from the stored boxes that share elements with it.

    Args:
        items: what to load, by name; every one of them is in the checkpoint, with the same shape.
    """

    def __init__(self, items: dict[str, StateItem]) -> None:
        self._items = items
        self._tensors = {
            MetadataIndex(item.name, box.offset): tensor
            for item in items.values()
            for box, tensor in item.filled_boxes()
        }

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the description of the checkpoint."""
        assert metadata is not None
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """The reads that fill this rank's boxes."""
        reads: list[ReadItem] = []
        for item in self._items.values():
            stored = self._stored[item.name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
            for box, _ in item.filled_boxes():
                reads += _reads(item.name, box, chunks)
        return LoadPlan(reads)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan, as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Checkpoints hold tensors and JSON only."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: a checkpoint holds no pickled objects")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of this rank's tensor that a read fills."""
        tensor = self._tensors[read_item.dest_index].detach()
        return narrow(tensor, tuple(read_item.dest_offsets), tuple(read_item.lengths))

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: reads go straight into place."""


def narrow(tensor: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """The view of a box of a tensor."""
    return tensor[Box(offset, size).slices]


def _reads(name: str, box: Box, chunks: list[Box]) -> list[ReadItem]:
    shared = ((chunk, common) for chunk in chunks if (common := overlap(box, chunk)))
    return [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(name, box.offset),
            torch.Size(within(common, box).offset),
            MetadataIndex(name, chunk.offset),
            torch.Size(within(common, chunk).offset),
            torch.Size(common.size),
        )
        for chunk, common in shared
    ]


def _copies_by_index(plans: list[SavePlan]) -> dict[MetadataIndex, dict[int, WriteItem]]:
    copies: dict[MetadataIndex, dict[int, WriteItem]] = defaultdict(dict)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            copies[item.index][rank] = item
    return copies


def _disagreements(copies: dict[MetadataIndex, dict[int, WriteItem]]) -> list[str]:
    """Copies of a box that are not alike, and boxes of a tensor that differ in dtype or global shape."""
    errors: list[str] = []
    first: dict[str, tuple[tuple[tuple[int, ...], str], int]] = {}
    for index, holders in copies.items():
        for rank, item in holders.items():
            data = _data(item)
            here = (tuple(data.size), str(data.properties.dtype).removeprefix("torch."))
            there, other = first.setdefault(index.fqn, (here, rank))
            if here != there:
                errors.append(f"{index.fqn}: rank {other} has {_said(there)}, rank {rank} {_said(here)}")
        sizes = {tuple(_data(item).chunk.sizes) for item in holders.values()}
        if len(sizes) > 1:
            errors.append(f"{index.fqn}: ranks {sorted(holders)} hold boxes of sizes {sorted(sizes)} at one offset")
    return errors


def _unlike_replicas(checksums: Sequence[Mapping[MetadataIndex, tuple[str, str | None]]]) -> list[str]:
    """Boxes of which two ranks hold other bits, one message a tensor."""
    errors: dict[str, str] = {}
    first: dict[MetadataIndex, tuple[str, int, str | None]] = {}
    for rank, own in enumerate(checksums):
        for index, (checksum, where) in own.items():
            expected, other, there = first.setdefault(index, (checksum, rank, where))
            if checksum != expected:
                errors.setdefault(
                    index.fqn,
                    f"{index.fqn}: rank {other} ({there}) and rank {rank} ({where}) hold different values of this "
                    "buffer, which must be identical on all ranks that hold it; compute it from what they share or "
                    "all-reduce it, declare its shards in placements(), or register it with persistent=False",
                )
    return list(errors.values())


def _said(shape_and_dtype: tuple[tuple[int, ...], str]) -> str:
    return f"shape {shape_and_dtype[0]} {shape_and_dtype[1]}"


def _share_out(copies: dict[MetadataIndex, dict[int, WriteItem]], ranks: int) -> list[list[WriteItem]]:
    """Give each box to the holder with the fewest bytes so far, large boxes first; the same for the same plans."""
    kept: list[list[WriteItem]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    ordered = sorted(copies.items(), key=lambda pair: (-_nbytes(next(iter(pair[1].values()))), pair[0].fqn))
    for _, holders in ordered:
        rank = min(holders, key=lambda holder: (load[holder], holder))
        kept[rank].append(holders[rank])
        load[rank] += _nbytes(holders[rank])
    return kept


def _describe(plans: list[list[WriteItem]]) -> dict[str, TensorStorageMetadata]:
    tensors: dict[str, TensorStorageMetadata] = {}
    for item in (item for items in plans for item in items):
        data = _data(item)
        empty = TensorStorageMetadata(data.properties, data.size, [])
        tensors.setdefault(item.index.fqn, empty).chunks.append(data.chunk)
    return dict(sorted(tensors.items()))


def _nbytes(item: WriteItem) -> int:
    return prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data
