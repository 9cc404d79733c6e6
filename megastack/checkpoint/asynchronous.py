"""Saving while training goes on: a copy of this rank's share, and a thread that writes and publishes it.

The caller is held up by planning and by the copy. Everything else happens on a thread that never communicates: a rank
that has written its file leaves a report beside it, the first rank's thread waits for the reports of all, removes them
and publishes. Ranks meet again in :meth:`AsynchronousSave.wait`, on the thread that trains. The thread is there before
the copy: one that went to work as it started would keep its starter waiting for the interpreter.

One save is in flight at a time. Its plan and its staging buffer are kept for the next: planning takes talks of all
ranks, and fresh memory costs more than the copy itself.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megastack.checkpoint.collectives import described, gather, said
from megastack.checkpoint.items import State
from megastack.checkpoint.manifest import report_file
from megastack.checkpoint.publish import Guard, withdraw, writing_folder
from megastack.checkpoint.staging import Kept
from megastack.checkpoint.write import RankReport, complete, write_share
from megastack.comm.group import AxisGroup
from megastack.errors import CheckpointError, MegastackError
from megastack.records import read_record

PATIENCE_S = 1800.0
"""How long the first rank waits for the reports of the others."""
EXIT_PATIENCE_S = 60.0
"""The same once the program has ended without waiting."""
_POLL_S = (0.002, 0.2)


class AsynchronousSave:
    """A checkpoint that is being written.

    Attributes:
        path: the folder that it will be.
        held_up_s: how long :func:`~megastack.checkpoint.save.save` kept the caller.
    """

    def __init__(self, path: Path, state: State, world: AxisGroup, kept: Kept, guard: Guard | None = None) -> None:
        began = time.perf_counter()
        self.path = path
        self._world = world
        self._guard = guard
        share = kept.plan(path, state, world, guard)
        self._share = replace(share, tensors=())
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._copied = threading.Event()
        self._fault = ""  # what kept this rank from its part
        self._error: str | None = None  # the common verdict, once all ranks know it: "" is success
        self._failed: tuple[int, ...] = ()
        self._cause: RuntimeError | None = None
        self._written = threading.Event()
        self._given_up = threading.Event()
        self._began, self._ended = began, began
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}")
        self._thread.start()
        try:
            copies = kept.staging.copy(share.tensors)
            self._copies = {item.index: copy for item, copy in zip(share.items, copies, strict=True)}
        except BaseException as error:
            self._fault = said(error)
            raise
        finally:
            self._copied.set()
        self.held_up_s = time.perf_counter() - began

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to do; all ranks' being done is the end of the save."""
        return not self._thread.is_alive()

    @property
    def told(self) -> bool:
        """Whether all ranks know how it ended."""
        return self._error is not None

    @property
    def seconds(self) -> float:
        """From the call to the end of this rank's part."""
        return self._ended - self._began

    def wait(self) -> Path:
        """Return the folder once it is published; all ranks call, on the thread that they train on.

        Raises:
            CheckpointError: the same on every rank, as often as it is asked, when any rank failed.
        """
        if self._error is None:
            self._error = self._meet()
        if self._error:
            raise CheckpointError(self._error).about(self._failed) from self._cause
        return self.path

    def _meet(self) -> str:
        """Come together after writing, and again after publishing; a rank that is gone is noticed in either."""
        self._written.wait()
        try:
            errors = gather(self._fault, self._world)
            if any(errors):
                self._given_up.set()
            self._thread.join()
            verdicts = gather(self._fault, self._world)
        except RuntimeError as error:
            self._given_up.set()
            self._cause = error
            return f"{self.path}: was not saved\na rank is gone ({error})"
        found = {rank: problem for rank, problem in enumerate(errors) if problem}
        found = found or {rank: problem for rank, problem in enumerate(verdicts) if problem}
        self._failed = tuple(found)
        return f"{self.path}: was not saved\n{described(found)}" if found else ""

    def _run(self) -> None:
        """The thread: write, report, and on the first rank publish."""
        report = RankReport()
        self._copied.wait()
        try:
            if not self._fault:
                rank, items = self._world.rank, self._share.items
                report = write_share(self.path, rank, items, lambda item: self._copies[item.index])
        except Exception as error:
            self._fault = said(error)
        try:
            if self._world.rank:
                self._leave(report)
            else:
                self._written.set()
                self._publish(report)
        except Exception as error:
            self._fault = self._fault or said(error)
        self._copies = {}
        self._ended = time.perf_counter()
        self._written.set()

    def _leave(self, report: RankReport) -> None:
        """Put this rank's report where the first rank looks for it."""
        target = writing_folder(self.path) / report_file(self._world.rank)
        fresh = target.with_suffix(".part")
        fresh.write_text(json.dumps({"fault": self._fault, "report": report.as_json()}), encoding="utf-8")
        fresh.rename(target)

    def _publish(self, own: RankReport) -> None:
        """Wait for the others and publish what all wrote, or remove it."""
        try:
            others = self._collect()
            errors = {rank: str(other["fault"]) for rank, other in others.items() if other["fault"]}
            if self._fault or errors:
                raise CheckpointError(self._fault or described(errors))
            reports = [own, *(RankReport.from_json(other["report"]) for _, other in sorted(others.items()))]
            for rank in others:
                (writing_folder(self.path) / report_file(rank)).unlink()
            assert self._share.metadata is not None
            complete(self.path, self._share.metadata, reports, self._share.trainer, self._guard)
        except Exception:
            with suppress(OSError, MegastackError):
                withdraw(self.path, self._guard)
            raise

    def _collect(self) -> dict[int, dict[str, Any]]:
        """The reports of the other ranks, as they appear."""
        found: dict[int, dict[str, Any]] = {}
        folder, pause, began = writing_folder(self.path), _POLL_S[0], time.monotonic()
        exits: float | None = None
        while len(found) < self._world.size - 1:
            for rank in set(range(1, self._world.size)) - set(found):
                with suppress(FileNotFoundError):
                    found[rank] = read_record(folder / report_file(rank))
                    pause = _POLL_S[0]
            now = time.monotonic()
            if exits is None and not threading.main_thread().is_alive():
                exits = now
            late = now - began > PATIENCE_S or (exits is not None and now - exits > EXIT_PATIENCE_S)
            if len(found) < self._world.size - 1 and (late or self._given_up.wait(pause)):
                missing = sorted(set(range(1, self._world.size)) - set(found))
                raise CheckpointError(f"nothing was heard of ranks {missing}")
            pause = min(2 * pause, _POLL_S[1])
        return found
