"""``megastack train -m``: the product of the values as written, one world and one folder for each job, one table.

Jobs run one after another; each starts its own ranks from this parent, which stays free of anything that one job could
leave to the next. An illegal job is listed as refused with its reason and the rest run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from megastack.config.compose import draft
from megastack.config.convert import replace_values
from megastack.config.overrides import sweep_jobs
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError
from megastack.launch.environment import require_no_launcher
from megastack.launch.local import launch
from megastack.observe.console import Console, number
from megastack.observe.folder import RunFolder, claim
from megastack.observe.metrics import read_metrics
from megastack.plan.describe import short
from megastack.training.state import RunResult

REFUSED = 78


@dataclass(frozen=True)
class Job:
    """How one job of a sweep ended; what it did not measure is null."""

    overrides: tuple[str, ...]
    status: str
    exit_code: int
    step: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    step_time_s: float | None = None
    folder: str | None = None
    reason: str | None = None
    interrupted: bool = False


def sweep_command(options: argparse.Namespace) -> int:
    """Run a sweep; 1 if any job failed, else 75 if any was preempted, else 78 if any was refused, else 0."""
    require_no_launcher("train -m")
    jobs = sweep_jobs(options.overrides, config_dir=options.config_dir)
    varied = [key for key in _keys(jobs[0]) if len({_value(job, key) for job in jobs}) > 1]
    folders, done = _Folders(), list[Job]()
    for position, overrides in enumerate(jobs, 1):
        shown = "  ".join(f"{key}={_value(overrides, key)}" for key in varied)
        Console().line(f"\njob {position} of {len(jobs)}  {shown}", style="bold")
        done.append(_run(options, overrides, position, folders))
        if done[-1].interrupted:
            break
    _show(done, varied, left_out=len(jobs) - len(done))
    if options.json:
        Path(options.json).write_text(json.dumps([_record(job) for job in done], indent=1) + "\n", encoding="utf-8")
    codes = {job.exit_code for job in done}
    return next((code for code in (1, 75, REFUSED) if code in codes), 0)


class _Folders:
    """The folder of a sweep, taken with its first legal job, and in it one for each job."""

    def __init__(self) -> None:
        self._root: Path | None = None

    def intended(self, config: TrainConfig, position: int) -> TrainConfig:
        """The configuration of the job at ``position``, in a folder that nobody has made yet."""
        root = self._root or Path(config.run.dir or Path(config.run.root) / "multirun") / "sweep"
        return replace_values(config, {"run.dir": str(root / str(position))})

    def job(self, config: TrainConfig, position: int) -> str:
        """Where the job at ``position`` goes, now that it is legal."""
        if self._root is None:
            try:
                self._root = claim(config.run.dir, Path(config.run.root) / "multirun").path
            except OSError as error:
                raise ConfigError(f"run.dir={config.run.dir or config.run.root}: cannot be made ({error})") from None
        return str(self._root / str(position))


def _run(options: argparse.Namespace, overrides: Sequence[str], position: int, folders: _Folders) -> Job:
    try:
        given = draft(overrides, config_dir=options.config_dir, config_name=options.config_name)
        config, broken = given.config, [*given.faults, *violations(given.config)]
        with given.origins():
            result = launch(
                config if broken else folders.intended(config, position),
                overrides,
                broken=broken,
                place=partial(folders.job, config, position),
                opening="" if broken else short(config),
            )
    except ConfigError as error:
        Console(stderr=True).line(str(error), style="red")
        return Job(tuple(overrides), "refused", REFUSED, reason=str(error))
    return _job(overrides, result)


def _job(overrides: Sequence[str], result: RunResult) -> Job:
    metrics = RunFolder(result.folder).metrics
    rows, scored = ((read_metrics(metrics, kind) if metrics.exists() else []) for kind in ("train", "validation"))
    times = [row["step_time_s"] for row in rows[len(rows) // 4 :]]
    return Job(
        overrides=tuple(overrides),
        status=result.status,
        exit_code=result.exit_code,
        step=result.step,
        loss=rows[-1]["loss"] if rows else None,
        validation_loss=scored[-1]["loss"] if scored else None,
        step_time_s=statistics.median(times) if times else None,
        folder=str(result.folder),
        reason=result.reason,
        interrupted=result.interrupted,
    )


def _record(job: Job) -> dict[str, object]:
    return {name: value for name, value in asdict(job).items() if name != "interrupted"}


def _show(jobs: Sequence[Job], varied: Sequence[str], *, left_out: int) -> None:
    console = Console()
    console.table(
        [*varied, "status", "step", "loss", "validation", "step ms", "folder or reason"],
        [[*(_value(job.overrides, key) for key in varied), *_cells(job)] for job in jobs],
    )
    if left_out:
        console.line(f"interrupted; {left_out} more {'jobs were' if left_out > 1 else 'job was'} not started")


def _cells(job: Job) -> list[str]:
    milliseconds = None if job.step_time_s is None else job.step_time_s * 1e3
    return [
        job.status,
        str(job.step),
        number(job.loss, ".4f"),
        number(job.validation_loss, ".4f"),
        number(milliseconds, ".0f"),
        job.folder or (job.reason or "").splitlines()[0],
    ]


def _keys(overrides: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(override.partition("=")[0] for override in overrides))


def _value(overrides: Sequence[str], key: str) -> str:
    return next((value for name, _, value in (o.partition("=") for o in overrides) if name == key), "")
