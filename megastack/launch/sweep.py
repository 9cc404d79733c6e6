"""``megastack train -m``: the product of the values as written, one world and one folder for each job, one table.

Jobs run one after another; each forks its own ranks from this parent, which stays free of anything that one job could
leave to the next. An illegal job is listed as refused with its reason and the rest run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table

from megastack.config.overrides import sweep_jobs
from megastack.errors import ConfigError
from megastack.launch.environment import is_worker
from megastack.launch.local import launch
from megastack.observe.console import Console
from megastack.observe.folder import RunFolder, claim
from megastack.observe.metrics import read_metrics
from megastack.plan.describe import short

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


def sweep_command(options: argparse.Namespace) -> int:
    """Run a sweep; 1 if any job failed, else 75 if any was preempted, else 78 if any was refused, else 0."""
    if is_worker():
        raise ConfigError("-m: a sweep starts its own ranks; run it without torchrun or srun")
    jobs = sweep_jobs(options.overrides, config_dir=options.config_dir)
    varied = [key for key in _keys(jobs[0]) if len({_value(job, key) for job in jobs}) > 1]
    done: list[Job] = []
    root: Path | None = None
    for number, overrides in enumerate(jobs, 1):
        shown = " ".join(f"{key}={_value(overrides, key)}" for key in varied)
        Console().line(f"job {number}/{len(jobs)}  {shown}", style="bold")
        done_job, root = _run(options, overrides, number, root)
        done.append(done_job)
        if done_job.status == "preempted":
            break
    RichConsole().print(_table(done, varied))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(job) for job in done], indent=1) + "\n")
    codes = {job.exit_code for job in done}
    return next((code for code in (1, 75, REFUSED) if code in codes), 0)


def _run(
    options: argparse.Namespace, overrides: Sequence[str], number: int, root: Path | None
) -> tuple[Job, Path | None]:
    """One job; the folder of the sweep is made with the first that is legal."""
    from megastack.launch.command import checked

    named = tuple(overrides)
    try:
        config = checked(argparse.Namespace(**vars(options) | {"overrides": list(overrides)}))
        if root is None:
            root = claim(config.run.dir, Path(config.run.root) / "multirun").path
        folder = str(root / str(number))
        final = [*overrides, f"run.dir={folder}"]
        config = checked(argparse.Namespace(**vars(options) | {"overrides": final}))
        result = launch(config, final, opening=short(config))
    except ConfigError as error:
        Console().line(str(error), style="red")
        return Job(named, "refused", REFUSED, reason=str(error).splitlines()[0]), root
    return _job(named, result), root


def _job(overrides: tuple[str, ...], result: Any) -> Job:
    folder = RunFolder(result.folder)
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
    scored = read_metrics(folder.metrics, "validation") if folder.metrics.exists() else []
    times = sorted(row["step_time_s"] for row in rows[len(rows) // 4 :])
    return Job(
        overrides,
        result.status,
        result.exit_code,
        result.step,
        rows[-1]["loss"] if rows else None,
        scored[-1]["loss"] if scored else None,
        times[len(times) // 2] if times else None,
        str(result.folder),
        result.reason,
    )


def _table(jobs: Sequence[Job], varied: Sequence[str]) -> Table:
    table = Table(title=f"{len(jobs)} jobs, {time.strftime('%Y-%m-%d %H:%M')}")
    for name in (*varied, "status", "step", "loss", "validation", "step time", "folder"):
        table.add_column(name, overflow="fold")
    for job in jobs:
        table.add_row(
            *(_value(job.overrides, key) for key in varied),
            job.status,
            str(job.step),
            _number(job.loss, ".4f"),
            _number(job.validation_loss, ".4f"),
            _number(job.step_time_s and job.step_time_s * 1e3, ".0f", " ms"),
            job.reason if job.status == "refused" else job.folder,
        )
    return table


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None else format(value, spec) + unit


def _keys(overrides: Sequence[str]) -> list[str]:
    return [override.partition("=")[0] for override in overrides]


def _value(overrides: Sequence[str], key: str) -> str:
    return next((value for name, _, value in (o.partition("=") for o in overrides) if name == key), "")
