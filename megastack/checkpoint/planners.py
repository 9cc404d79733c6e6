"""Planners for ``torch.distributed.checkpoint``, which decide which rank writes and reads which box.

The default planners accept only torch's own tensor types; these accept :class:`StateItem` values with any boxes. When
saving, the coordinator receives the boxes of all ranks and assigns each box to one of the ranks that hold it (the one
with the fewest bytes so far). It rejects a plan that does not cover every tensor exactly once or in which replicas
differ. When loading, each rank intersects its boxes with the stored ones; no coordination is needed.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

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
from megastack.checkpoint.state import State, StateItem
from megastack.comm.flight_recorder import FlightRecorder
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box, coverage_error, intersect, relative_to

_Replicas = dict[MetadataIndex, dict[int, WriteItem]]
"""The write items of each box by rank."""


@dataclass(frozen=True)
class _PlannerData:
    """Data that a local plan contains besides its boxes.

    Attributes:
        empty: names of items without a box on this rank.
        checksums: the checksum of each box whose replicas are compared, with this rank's coordinates.
    """

    empty: set[str]
    checksums: Mapping[MetadataIndex, tuple[str, str | None]]


class BoxSavePlanner(SavePlanner):
    """Plans the writes of all ranks; each box is written by one of the ranks that hold it."""

    def __init__(self, state: State, flight_recorder: FlightRecorder | None = None) -> None:
        self.flight_recorder = flight_recorder or FlightRecorder()
        self._state = state
        self._tensors: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(self, state_dict: object, storage_meta: object = None, is_coordinator: bool = False) -> None:
        """Check this rank's items; torch's arguments are not used."""
        self._items = self._state.by_name().values()

    @local_work
    def create_local_plan(self) -> SavePlan:
        """Return all boxes of this rank and the names of items without one, so that the coordinator can detect gaps."""
        writes = [self._write_item(item, box, tensor) for item in self._items for box, tensor in item.filled_boxes()]
        empty = {item.name for item in self._items if not any(item.filled_boxes())}
        checksums = {
            MetadataIndex(item.name, box.offset): (checksum, item.replica)
            for item in self._items
            for box, checksum in item.checksums()
        }
        return SavePlan(writes, planner_data=_PlannerData(empty, checksums))

    @local_work
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign each box to one rank and describe all tensors.

        Raises:
            CheckpointError: ranks disagree on a tensor, their boxes do not cover it exactly once, or replicas that must
                be identical differ.
        """
        replicas = _replicas_by_index(all_plans)
        data: list[_PlannerData] = [plan.planner_data for plan in all_plans]
        errors = _mismatches(replicas) or _differing_replicas([each.checksums for each in data])
        assigned = _assign(replicas, len(all_plans))
        tensors = _tensor_metadata(assigned)
        errors += [
            f"{name}: {error}"
            for name, tensor in tensors.items()
            if (error := coverage_error(tensor.size, [Box(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks]))
        ]
        missing = {name for each in data for name in each.empty} - set(tensors)
        errors += [f"{name}: no rank holds any of it" for name in sorted(missing)]
        if errors:
            raise CheckpointError("\n".join(errors))
        plans = [replace(plan, items=items, planner_data=None) for plan, items in zip(all_plans, assigned, strict=True)]
        return plans, Metadata(dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the coordinator's plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the tensor of a planned box, for torch."""
        return self.tensor(write_item)

    def tensor(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of a planned box."""
        return self._tensors[write_item.index]

    def _write_item(self, item: StateItem, box: Box, tensor: Tensor) -> WriteItem:
        index = MetadataIndex(item.name, box.offset)
        self._tensors[index] = tensor
        chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
        data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(item.shape))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class BoxLoadPlanner(LoadPlanner):
    """Plans the reads of one rank: each of its boxes is filled from the stored boxes that intersect it.

    Args:
        items: the items to load, by name; the checkpoint holds all of them, with the same shapes.
    """

    def __init__(self, items: dict[str, StateItem]) -> None:
        self._items = items
        self._tensors = {
            MetadataIndex(item.name, box.offset): tensor
            for item in items.values()
            for box, tensor in item.filled_boxes()
        }

    def set_up_planner(
        self, state_dict: object, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Store the metadata of the checkpoint."""
        assert metadata is not None
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill this rank's boxes."""
        reads: list[ReadItem] = []
        for item in self._items.values():
            stored = self._stored[item.name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
            for box, _ in item.filled_boxes():
                reads += _reads(item.name, box, chunks)
        return LoadPlan(reads)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Raise an error: checkpoints contain only tensors and JSON."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: a checkpoint does not hold pickled objects")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the view of this rank's tensor that a read fills."""
        tensor = self._tensors[read_item.dest_index].detach()
        return tensor[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: data is read directly into the tensor."""


def _reads(name: str, box: Box, chunks: list[Box]) -> list[ReadItem]:
    shared = ((chunk, common) for chunk in chunks if (common := intersect(box, chunk)))
    return [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(name, box.offset),
            torch.Size(relative_to(common, box).offset),
            MetadataIndex(name, chunk.offset),
            torch.Size(relative_to(common, chunk).offset),
            torch.Size(common.size),
        )
        for chunk, common in shared
    ]


def _replicas_by_index(plans: list[SavePlan]) -> _Replicas:
    replicas: _Replicas = defaultdict(dict)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            replicas[item.index][rank] = item
    return replicas


def _mismatches(replicas: _Replicas) -> list[str]:
    """Return errors for replicas of a box that differ in size, and boxes of a tensor that differ in dtype or shape."""
    errors: list[str] = []
    first: dict[str, tuple[tuple[tuple[int, ...], str], int]] = {}
    for index, holders in replicas.items():
        for rank, item in holders.items():
            data = _data(item)
            here = (tuple(data.size), str(data.properties.dtype).removeprefix("torch."))
            there, other = first.setdefault(index.fqn, (here, rank))
            if here != there:
                errors.append(
                    f"{index.fqn}: rank {other} has {_shape_and_dtype(*there)}, rank {rank} {_shape_and_dtype(*here)}"
                )
        sizes = {tuple(_data(item).chunk.sizes) for item in holders.values()}
        if len(sizes) > 1:
            errors.append(f"{index.fqn}: ranks {sorted(holders)} hold boxes of sizes {sorted(sizes)} at one offset")
    return errors


def _differing_replicas(checksums: Sequence[Mapping[MetadataIndex, tuple[str, str | None]]]) -> list[str]:
    """Return errors for boxes whose bits differ between two ranks, one message per tensor."""
    errors: dict[str, str] = {}
    first: dict[MetadataIndex, tuple[str, int, str | None]] = {}
    for rank, own in enumerate(checksums):
        for index, (checksum, where) in own.items():
            expected, other, there = first.setdefault(index, (checksum, rank, where))
            if checksum != expected:
                errors.setdefault(
                    index.fqn,
                    f"{index.fqn}: rank {other} ({there}) and rank {rank} ({where}) hold different values of this "
                    "buffer, which must be identical on all ranks that hold it; compute it from values they share or "
                    "all-reduce it, declare its shards in placements(), or register it with persistent=False",
                )
    return list(errors.values())


def _shape_and_dtype(shape: tuple[int, ...], dtype: str) -> str:
    return f"shape {shape} {dtype}"


def _assign(replicas: _Replicas, ranks: int) -> list[list[WriteItem]]:
    """Assign each box to the holder with the fewest bytes so far, large boxes first; deterministic."""
    assigned: list[list[WriteItem]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    ordered = sorted(replicas.items(), key=lambda pair: (-_nbytes(next(iter(pair[1].values()))), pair[0].fqn))
    for _, holders in ordered:
        rank = min(holders, key=lambda holder: (load[holder], holder))
        assigned[rank].append(holders[rank])
        load[rank] += _nbytes(holders[rank])
    return assigned


def _tensor_metadata(plans: list[list[WriteItem]]) -> dict[str, TensorStorageMetadata]:
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
