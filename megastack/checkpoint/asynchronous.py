"""Save while training continues: copy this rank's boxes into staging buffers, then write and publish from a thread.

The caller waits only for the plan and the copy. The thread never communicates: a rank that has written its file places
a report next to it; the first rank's thread waits for the reports of all ranks, removes them and publishes. Ranks
synchronize in :meth:`AsynchronousSave.wait`, on the training thread. The thread is started before the copy, because a
thread that starts working immediately would make its starter wait for the interpreter lock.

One save is in flight at a time. The next one reuses its plan and its staging buffer (:class:`SaveCache`): planning
requires collectives over all ranks, and allocating memory takes longer than the copy itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megastack.checkpoint.collectives import all_true, describe_error, describe_failures, make_global_plan
from megastack.checkpoint.manifest import report_file
from megastack.checkpoint.planners import BoxSavePlanner
from megastack.checkpoint.publish import Guard, discard, make_writing_folder, writing_folder
from megastack.checkpoint.state import State
from megastack.checkpoint.writer import WriteReport, complete, trainer_text, write_rank_file
from megastack.comm.group import AxisGroup
from megastack.comm.objects import all_gather_objects
from megastack.errors import CheckpointError, MegastackError
from megastack.placement.boxes import Box
from megastack.records import read_record

REPORT_TIMEOUT_S = 1800.0
"""How long the first rank waits for the reports of the others."""
EXIT_TIMEOUT_S = 60.0
"""The same time-out after the main thread has ended without waiting."""
_POLL_S = (0.002, 0.2)
_ALIGNMENT = 16


class StagingBuffer:
    """Memory for a copy of the tensors that a rank writes; reused, and reallocated only to grow."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies on the CPU, valid until the next call."""
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        if sum(sizes) > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=bool(devices))
        copies, start = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            room = self._buffer[start : start + tensor.numel() * tensor.element_size()]
            copies.append(room.view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor.detach(), non_blocking=True)
            start += size
        for device in devices:
            torch.cuda.synchronize(device)
        return copies


@dataclass(frozen=True)
class WritePlan:
    """The data that this rank writes and, on the first rank, the metadata of the whole checkpoint.

    Attributes:
        items: the planned boxes.
        tensors: the live tensor of each item.
        metadata: all tensors and boxes; ``None`` except on the first rank.
        trainer: the content of ``trainer.json``; empty except on the first rank.
    """

    items: Sequence[WriteItem]
    tensors: Sequence[Tensor]
    metadata: Metadata | None = None
    trainer: str = ""


def make_plan(path: Path, state: State, world: AxisGroup, guard: Guard | None = None) -> WritePlan:
    """Agree on which rank writes what, and create the folder; called on all ranks.

    Raises:
        CheckpointError: on every rank, if the state of any rank is invalid or the folder cannot be created.
    """
    planner = BoxSavePlanner(state)
    first_rank: list[tuple[Metadata, str]] = []

    def local_plan() -> SavePlan:
        planner.set_up_planner({})
        return planner.create_local_plan()

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        final, metadata = planner.create_global_plan(plans)
        first_rank.append((metadata, trainer_text(state.trainer)))
        make_writing_folder(path, guard)
        return final

    items = make_global_plan(f"{path}: was not saved", world, local_plan, global_plan).items
    return WritePlan(items, [planner.tensor(item) for item in items], *(first_rank[0] if first_rank else ()))


_ItemLayout = tuple[str, tuple[int, ...], list[tuple[Box, tuple[int, ...], torch.dtype]], list[tuple[Box, str]]]
"""Name, shape, boxes and replica checksums of an item."""


class SaveCache:
    """State that the next asynchronous save of a mesh reuses: the staging buffer, and the plan for the same layout."""

    def __init__(self) -> None:
        self.buffer = StagingBuffer()
        self._layout: list[_ItemLayout] | None = None
        self._plan: WritePlan | None = None

    def plan(self, path: Path, state: State, world: AxisGroup, guard: Guard | None = None) -> WritePlan:
        """Return the last plan if the layout is unchanged on all ranks, else a new one; called on all ranks.

        Only a new plan compares replicas, so their checksums count as part of the layout.

        Raises:
            CheckpointError: as in :func:`make_plan`.
        """
        layout = _layout_of(state)
        trainer = _prepare_folder(path, state, world, guard) if layout == self._layout else None
        if all_true(trainer is not None, world) and self._plan is not None:
            tensors = {(item.name, box.offset): tensor for item in state.items for box, tensor in item.boxes}
            found = [tensors[item.index.fqn, tuple(item.index.offset or ())] for item in self._plan.items]
            return replace(self._plan, tensors=found, trainer=trainer or "")
        plan = make_plan(path, state, world, guard)
        self._layout, self._plan = layout, replace(plan, tensors=())
        return plan


def _layout_of(state: State) -> list[_ItemLayout]:
    return [
        (
            item.name,
            item.shape,
            [(box, tuple(tensor.shape), tensor.dtype) for box, tensor in item.boxes],
            [*item.checksums()],
        )
        for item in state.items
    ]


def _prepare_folder(path: Path, state: State, world: AxisGroup, guard: Guard | None) -> str | None:
    """Create the folder on the first rank and return the content of ``trainer.json`` there.

    ``None`` if this fails: planning from scratch then raises the error on all ranks.
    """
    if world.rank:
        return ""
    try:
        text = trainer_text(state.trainer)
        make_writing_folder(path, guard)
    except (MegastackError, OSError):
        return None
    return text


class AsynchronousSave:
    """A checkpoint that is being written.

    Attributes:
        path: the checkpoint folder, which appears when it is published.
        blocked_s: how long the constructor blocked the caller.
    """

    def __init__(
        self, path: Path, state: State, world: AxisGroup, cache: SaveCache, guard: Guard | None = None
    ) -> None:
        began = time.perf_counter()
        self.path = path
        self._world = world
        self._guard = guard
        plan = cache.plan(path, state, world, guard)
        self._plan = replace(plan, tensors=())
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._copied = threading.Event()
        self._local_error = ""  # this rank's error
        self._outcome: str | None = None  # the same on all ranks: None until they have agreed, "" for success
        self._failed: tuple[int, ...] = ()
        self._cause: RuntimeError | None = None
        self._written = threading.Event()
        self._aborted = threading.Event()
        self._began, self._ended = began, began
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}")
        self._thread.start()
        try:
            copies = cache.buffer.copy(plan.tensors)
            self._copies = {item.index: copy for item, copy in zip(plan.items, copies, strict=True)}
        except BaseException as error:
            self._local_error = describe_error(error)
            raise
        finally:
            self._copied.set()
        self.blocked_s = time.perf_counter() - began

    @property
    def done(self) -> bool:
        """Whether this rank has finished; the save is over once all ranks have."""
        return not self._thread.is_alive()

    @property
    def settled(self) -> bool:
        """Whether all ranks know the outcome."""
        return self._outcome is not None

    @property
    def seconds(self) -> float:
        """Time from the call until this rank finished."""
        return self._ended - self._began

    def wait(self) -> Path:
        """Wait until the checkpoint is published and return its folder; called on all ranks, on the training thread.

        Raises:
            CheckpointError: the same on every rank and in every call, if any rank failed.
        """
        if self._outcome is None:
            self._outcome = self._agree_on_outcome()
        if self._outcome:
            raise CheckpointError(self._outcome).about(self._failed) from self._cause
        return self.path

    def _agree_on_outcome(self) -> str:
        """Exchange errors after writing and again after publishing; either exchange fails if a rank has exited."""
        self._written.wait()
        try:
            errors = all_gather_objects(self._local_error, self._world)
            if any(errors):
                self._aborted.set()
            self._thread.join()
            late_errors = all_gather_objects(self._local_error, self._world)
        except RuntimeError as error:
            self._aborted.set()
            self._cause = error
            return f"{self.path}: was not saved\na rank has exited ({error})"
        found = {rank: error for rank, error in enumerate(errors) if error}
        found = found or {rank: error for rank, error in enumerate(late_errors) if error}
        self._failed = tuple(found)
        return f"{self.path}: was not saved\n{describe_failures(found)}" if found else ""

    def _run(self) -> None:
        """Body of the thread: write, report and, on the first rank, publish."""
        report = WriteReport()
        self._copied.wait()
        try:
            if not self._local_error:
                rank, items = self._world.rank, self._plan.items
                report = write_rank_file(self.path, rank, items, lambda item: self._copies[item.index])
        except Exception as error:
            self._local_error = describe_error(error)
        try:
            if self._world.rank:
                self._send_report(report)
            else:
                self._written.set()
                self._publish(report)
        except Exception as error:
            self._local_error = self._local_error or describe_error(error)
        self._copies = {}
        self._ended = time.perf_counter()
        self._written.set()

    def _send_report(self, report: WriteReport) -> None:
        """Write this rank's report into the folder, where the first rank reads it."""
        target = writing_folder(self.path) / report_file(self._world.rank)
        partial = target.with_suffix(".part")
        partial.write_text(json.dumps({"fault": self._local_error, "report": report.as_json()}), encoding="utf-8")
        partial.rename(target)

    def _publish(self, own: WriteReport) -> None:
        """Wait for the other ranks' reports and publish the checkpoint, or remove it if a rank failed."""
        try:
            others = self._receive_reports()
            errors = {rank: error for rank, (error, _) in others.items() if error}
            if self._local_error or errors:
                raise CheckpointError(self._local_error or describe_failures(errors))
            reports = [own, *(report for _, (_, report) in sorted(others.items()))]
            for rank in others:
                (writing_folder(self.path) / report_file(rank)).unlink()
            assert self._plan.metadata is not None
            complete(self.path, self._plan.metadata, reports, self._plan.trainer, self._guard)
        except Exception:
            with suppress(OSError, MegastackError):
                discard(self.path, self._guard)
            raise

    def _receive_reports(self) -> dict[int, tuple[str, WriteReport]]:
        """Poll until the reports of all other ranks have arrived, and return each rank's error and report."""
        found: dict[int, tuple[str, WriteReport]] = {}
        folder, pause, began = writing_folder(self.path), _POLL_S[0], time.monotonic()
        main_ended: float | None = None
        while len(found) < self._world.size - 1:
            for rank in set(range(1, self._world.size)) - set(found):
                with suppress(FileNotFoundError):
                    record = read_record(folder / report_file(rank))
                    found[rank] = str(record["fault"]), WriteReport.from_json(record["report"])
                    pause = _POLL_S[0]
            now = time.monotonic()
            if main_ended is None and not threading.main_thread().is_alive():
                main_ended = now
            late = now - began > REPORT_TIMEOUT_S or (main_ended is not None and now - main_ended > EXIT_TIMEOUT_S)
            if len(found) < self._world.size - 1 and (late or self._aborted.wait(pause)):
                missing = sorted(set(range(1, self._world.size)) - set(found))
                raise CheckpointError(f"no report from ranks {missing}")
            pause = min(2 * pause, _POLL_S[1])
        return found
