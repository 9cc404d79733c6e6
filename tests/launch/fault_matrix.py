"""Fault injection: every kind of fault on several ranks of several layouts in every phase, and the required end.

A cell is a run of about a second, with its own launcher forked from this process, and a layer that fails
(:mod:`tests.launch.fault_block`). :func:`run_cell` returns how it ended, :func:`find_errors` what is wrong with that.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.checkpoint.reader import CheckpointReader
from megastack.cli.main import main
from megastack.errors import MegastackError
from megastack.launch import local, run
from megastack.mesh.shape import MeshShape, describe_coordinates
from megastack.observe.folder import RunFolder
from megastack.observe.metrics import read_metrics
from megastack.observe.status import read_status
from tests.launch.fault_block import KINDS, PHASES, STEP
from tests.tiny_runs import events, overrides

LAYOUTS = {
    "pp3": ("parallel.pp=3", "model.layers=3", "batch.global_size=4", "batch.micro_size=2"),
    "dp3": ("parallel.dp=3", "batch.global_size=6", "batch.micro_size=1"),
    "tp4": ("parallel.tp=4", "model.heads=4", "model.kv_groups=4", "batch.global_size=4", "batch.micro_size=2"),
    "dp4": ("parallel.dp=4", "batch.global_size=8", "batch.micro_size=1"),
    "dp2-tp2": ("parallel.dp=2", "parallel.tp=2", "batch.global_size=4", "batch.micro_size=1"),
    "dp2-pp2": ("parallel.dp=2", "parallel.pp=2", "batch.global_size=4", "batch.micro_size=1"),
    "tp2-pp2": ("parallel.tp=2", "parallel.pp=2", "batch.global_size=4", "batch.micro_size=1"),
    "dp2-zero1": ("parallel.dp=2", "parallel.zero.stage=1", "batch.global_size=4", "batch.micro_size=1"),
    "dp2-zero2": ("parallel.dp=2", "parallel.zero.stage=2", "batch.global_size=4", "batch.micro_size=1"),
    "dp2-zero3": ("parallel.dp=2", "parallel.zero.stage=3", "batch.global_size=4", "batch.micro_size=1"),
}
"""Choices that make a layout, by name."""
RANKS = {"pp3": (0, 1, 2), "dp3": (0, 2), "tp4": (0, 3)}
"""The ranks that fail in the table, by its layouts."""
HANGS = ("SIGSTOP", "sleep")
TIMEOUT_S, GRACE_S = 10, 2
SAVED = 2
"""The step of the checkpoint before the fault; the next one would be of step ``STEP + 1``."""
PATIENCE_S = 120
SOON_S = 10.0
"""All processes of a run have ended by then, unless the rank only stopped."""


@dataclass(frozen=True)
class Cell:
    """One fault: what, on which rank of which layout, when."""

    kind: str
    layout: str
    rank: int
    phase: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.layout}, rank {self.rank}, {self.phase}"

    @property
    def where(self) -> str:
        """The coordinates of the rank."""
        degrees = {"pp": 1, "dp": 1, "tp": 1}
        degrees |= {key: int(found) for key, found in re.findall(r"parallel\.(pp|dp|tp)=(\d)", " ".join(self.choices))}
        shape = MeshShape(**degrees)
        return describe_coordinates(shape.coordinates(self.rank))

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices of the layout."""
        return LAYOUTS[self.layout]

    @property
    def impossible(self) -> str | None:
        """Why there is no such fault."""
        if self.kind == "NaN" and self.phase in ("before step 1", "save"):
            return "nothing is computed then"
        if self.kind == "disk full" and self.rank > 0 and self.phase != "save":
            return "only the first rank writes then"
        return None


CELLS = tuple(
    Cell(kind, layout, rank, phase)
    for layout, kind in itertools.product(RANKS, KINDS)
    for rank, phase in itertools.product(RANKS[layout], PHASES)
)


@dataclass
class Ending:
    """How a run ended; ``seconds`` are from the fault until the launcher had ended."""

    exit_code: int | None
    seconds: float
    screen: str
    status: dict[str, Any]
    alive: list[int]


LOADED = (run, local)
"""Imported here, so that a forked launcher need not."""


def choices(folder: Path, cell: Cell) -> list[str]:
    """The command line of a cell's run: a checkpoint of step 2, the fault at step 3."""
    layer = f"_target_: tests.launch.fault_block.FailingMLP, kind: '{cell.kind}', rank: {cell.rank}"
    mlp = f"model.mlp={{{layer}, phase: {cell.phase}, mark: {folder / 'mark'}}}"
    saves = ["checkpoint.every=1" if cell.phase == "save" else f"checkpoint.every={SAVED}", "run.validate_every=3"]
    limits = ["run.steps=5", f"launch.timeout_s={TIMEOUT_S}", f"launch.grace_s={GRACE_S}"]
    return [*overrides(folder), *cell.choices, *saves, *limits, mlp]


def run_cell(folder: Path, cell: Cell) -> Ending:
    """Run a cell in an empty folder."""
    screen = folder / "screen.txt"
    launcher = multiprocessing.get_context("fork").Process(target=_launch, args=(choices(folder, cell), screen))
    launcher.start()
    launcher.join(PATIENCE_S)
    if launcher.is_alive():
        launcher.kill()
        launcher.join()
    mark = folder / "mark"
    seconds = time.time() - mark.stat().st_mtime if mark.exists() else float("inf")
    run = RunFolder(folder / "run")
    alive = [pid for pid in _pids(run) if _is_alive(pid)]
    return Ending(launcher.exitcode, seconds, screen.read_text(), read_status(run.status) or {}, alive)


def _launch(command: list[str], screen: Path) -> None:
    """The launcher: ``megastack train``, with the output of it and its ranks in a file."""
    descriptor = os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    raise SystemExit(main(["train", *command]))


def _pids(run: RunFolder) -> Iterator[int]:
    for log in sorted(run.path.glob("logs/*.log")):
        for found in re.findall(r"started with pid (\d+)", log.read_text()):
            yield int(found)


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def find_errors(folder: Path, cell: Cell, ending: Ending) -> list[str]:
    """What is wrong with an ending; empty if nothing is."""
    run = RunFolder(folder / "run")
    wrong = [f"process {pid} is left" for pid in ending.alive]
    limit = SOON_S + (TIMEOUT_S + GRACE_S if cell.kind in HANGS else 0)
    if ending.seconds > limit:
        wrong.append(f"took {ending.seconds:.1f} s, more than {limit:g}")
    wrong += _wrong_files(run)
    if cell.kind == "SIGTERM":
        return wrong + _wrong_preemption(run, cell, ending)
    if cell.kind == "NaN" and cell.phase == "validation":
        return wrong + _wrong_validation(run, ending)
    if cell.kind == "NaN":
        return wrong + _wrong_divergence(run, cell, ending)
    return wrong + _wrong_failure(run, cell, ending)


def _wrong(ending: Ending, exit_code: int, **expected: Any) -> list[str]:
    wrong = [] if ending.exit_code == exit_code else [f"exit code {ending.exit_code}, not {exit_code}"]
    expected["exit_code"] = exit_code
    found = {name: ending.status.get(name) for name in expected}
    return wrong + [
        f"{name} {found[name]!r}, not {expected[name]!r}" for name in expected if found[name] != expected[name]
    ]


def _wrong_files(run: RunFolder) -> list[str]:
    """In any case: complete rows, complete checkpoints, and `latest` names the newest."""
    wrong = []
    if run.metrics.exists() and not run.metrics.read_text().endswith("\n") and run.metrics.stat().st_size:
        wrong.append("metrics.jsonl ends in the middle of a row")
    for path in sorted(run.checkpoints.glob("step_*")):
        try:
            CheckpointReader(path).verify()
        except MegastackError as error:
            wrong.append(str(error))
    return wrong


def _wrong_failure(run: RunFolder, cell: Cell, ending: Ending) -> list[str]:
    where, hangs = cell.where, cell.kind in HANGS
    step = {"before step 1": 0, "validation": STEP + 1, "save": 1}.get(cell.phase, STEP)
    wrong = _wrong(ending, 1, status="failed", rank=cell.rank, coordinates=where)
    expected_text = {
        "raise": "the layer broke",
        "SIGKILL": "ended by SIGKILL",
        "disk full": "cannot write|File too large",
    }.get(cell.kind, rf"did not (arrive at .+|join) within launch\.timeout_s={TIMEOUT_S}")
    tail = "\n".join(ending.screen.rstrip().splitlines()[-4:])
    if not re.search(expected_text, tail) or f"[rank {cell.rank} | {where}]" not in tail:
        wrong.append(f"the screen ends with {tail!r}")
    if hangs and "waits for" not in ending.screen:
        wrong.append("no rank reports what it waited for")
    saved = sorted(path.name for path in run.checkpoints.glob("step_*"))
    expected = [] if cell.phase in ("before step 1", "save") else [f"step_{SAVED:08d}"]
    if saved != expected and cell.phase != "data":  # data of a step is read ahead
        wrong.append(f"checkpoints {saved}, not {expected}")
    step += cell.kind == "disk full" and cell.phase == "step"  # done, but its row does not fit
    if cell.kind in ("raise", "disk full") and ending.status.get("step") != step:
        wrong.append(f"step {ending.status.get('step')}, not {step}")
    return wrong


def _wrong_preemption(run: RunFolder, cell: Cell, ending: Ending) -> list[str]:
    step = {"before step 1": 0, "step": STEP + 1, "validation": STEP + 1, "save": 2}[cell.phase]
    wrong = _wrong(ending, 75, status="preempted", reason="received SIGTERM", step=step)
    if not (run.checkpoint(step) / "manifest.json").exists():
        wrong.append(f"step {step} is not saved")
    return wrong


def _wrong_divergence(run: RunFolder, cell: Cell, ending: Ending) -> list[str]:
    block = cell.rank if cell.layout == "pp3" else 0
    wrong = _wrong(ending, 1, status="diverged", step=STEP, rank=cell.rank, coordinates=cell.where)
    reason = str(ending.status.get("reason"))
    for part in (
        f"step {STEP + 1}",
        f"blocks.{block}.mlp",
        "microbatch 0",
        f"rank {cell.rank}",
        "first gradient",
    ):
        if part not in reason:
            wrong.append(f"{part!r} is not in the reason {reason!r}")
    if not any(event["name"] == "nonfinite" for event in events(run.path)):
        wrong.append("no event nonfinite")
    return wrong


def _wrong_validation(run: RunFolder, ending: Ending) -> list[str]:
    """Weights and gradients are unaffected: the row has null and training continues."""
    scored = read_metrics(run.metrics, "validation")
    wrong = _wrong(ending, 0, status="completed", step=5)
    return wrong if scored[0]["loss"] is None else [*wrong, f"validation loss {scored[0]['loss']}"]


def outcome(cell: Cell, ending: Ending) -> str:
    """The ending in a few words, for a table."""
    status = ending.status.get("status", "none")
    if cell.kind == "NaN" and cell.phase == "validation":
        return f"0 {status}, the row is null"
    took = f"{ending.seconds:.0f} s" if ending.seconds >= 1 else "< 1 s"
    return f"{ending.exit_code} {status}, {took}"
