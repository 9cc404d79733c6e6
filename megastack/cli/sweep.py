"""``megastack train -m``: train every combination of the listed values, and print one table.

Jobs run one after another. Each job starts its own ranks and has its own folder; the launcher keeps no state between
jobs. An invalid job is listed as ``refused`` with its reason, and the other jobs run.

If all jobs have the same ``run.dir``, it is the folder of the sweep, with a numbered folder for each job. If they
differ, as with ``run.dir=out/tp${parallel.tp}``, each job has its own folder; a folder that several jobs share contains
their numbered folders.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from megastack.config.compose import PartialConfig, compose_partial
from megastack.config.convert import replace_values, value_of
from megastack.config.overrides import sweep_jobs
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError
from megastack.launch.environment import require_no_launcher
from megastack.launch.failure import FAILED, REJECTED, USER_ERRORS
from megastack.launch.local import launch
from megastack.observe.console import Console, number
from megastack.observe.folder import RunFolder, TakenFolder, claim
from megastack.observe.metrics import read_metrics
from megastack.observe.ownership import Heartbeat
from megastack.plan.describe import short
from megastack.preflight.folder import current_job
from megastack.training.state import RunResult


@dataclass(frozen=True)
class SweepJob:
    """The outcome of one job of a sweep; values that it did not measure are null."""

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


def run_sweep(options: argparse.Namespace) -> int:
    """Run a sweep; return 1 if any job failed, else 75 if any was preempted, else 78 if any was invalid, else 0."""
    require_no_launcher("train -m")
    jobs = sweep_jobs(options.overrides, config_dir=options.config_dir)
    varied = [key for key in _keys(jobs[0]) if len({_value(job, key) for job in jobs}) > 1]
    partial_configs = [_compose(options, overrides) for overrides in jobs]
    done = list[SweepJob]()
    with _Folders([given.config for given in partial_configs if isinstance(given, PartialConfig)]) as folders:
        for position, (overrides, given) in enumerate(zip(jobs, partial_configs, strict=True), 1):
            shown = "  ".join(f"{key}={_value(overrides, key)}" for key in varied)
            Console().line(f"\njob {position} of {len(jobs)}  {shown}", style="bold")
            done.append(_run(given, overrides, position, folders))
            if done[-1].interrupted:
                break
    _show(done, varied, left_out=len(jobs) - len(done))
    if options.json:
        Path(options.json).write_text(json.dumps([_record(job) for job in done], indent=1) + "\n", encoding="utf-8")
    codes = {job.exit_code for job in done}
    return next((code for code in (1, 75, REJECTED) if code in codes), 0)


class _Folders:
    """The folders of a sweep; a shared one is claimed for its first valid job and has a numbered folder per job.

    Args:
        configs: the configurations of all jobs, as far as they could be read.
    """

    def __init__(self, configs: Sequence[TrainConfig]) -> None:
        places = Counter(_place(config) for config in configs)
        self._unshared = {place for place, jobs in places.items() if jobs == 1 and len(places) > 1}
        self._roots = dict[Any, TakenFolder]()
        self._beats = contextlib.ExitStack()

    def _is_own(self, config: TrainConfig) -> bool:
        """Whether no other job has this ``run.dir``."""
        return isinstance(value_of(config, "run.dir"), str) and _place(config) in self._unshared

    def intended(self, config: TrainConfig, position: int) -> TrainConfig:
        """Return the configuration of the job at ``position``, with a folder that does not exist yet."""
        if self._is_own(config):
            return config
        taken = self._roots.get(_place(config))
        root = _root(config) / "sweep" if taken is None else taken.path
        return replace_values(config, {"run.dir": str(root / str(position))})

    def job(self, config: TrainConfig, position: int) -> str:
        """Return the folder of the valid job at ``position``; claims the shared folder."""
        if self._is_own(config):
            return str(config.run.dir)
        place = _place(config)
        if place not in self._roots:
            try:
                taken = claim(config.run.dir, Path(config.run.root) / "multirun", job=current_job())
            except OSError as error:
                raise ConfigError(f"run.dir={config.run.dir or config.run.root}: cannot be made ({error})") from None
            self._roots[place] = taken
            self._beats.enter_context(Heartbeat(taken.ownership))
        return str(self._roots[place].path / str(position))

    def __enter__(self) -> _Folders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the folders and remove empty ones."""
        self._beats.close()
        for taken in self._roots.values():
            taken.undo()


def _root(config: TrainConfig) -> Path:
    return Path(config.run.dir or Path(config.run.root) / "multirun")


def _place(config: TrainConfig) -> tuple[object, object]:
    """Return the setting that places a job's folder: ``run.dir`` if set, else ``run.root``; invalid values as given."""
    values = (value_of(config, "run.dir"), value_of(config, "run.root"))
    folder, root = (os.path.abspath(value) if isinstance(value, str) else value for value in values)
    return (folder, None) if isinstance(folder, str) else (folder, root)


def _compose(options: argparse.Namespace, overrides: Sequence[str]) -> PartialConfig | ConfigError:
    try:
        return compose_partial(overrides, config_dir=options.config_dir, config_name=options.config_name)
    except ConfigError as error:
        return error


def _run(given: PartialConfig | ConfigError, overrides: Sequence[str], position: int, folders: _Folders) -> SweepJob:
    try:
        if isinstance(given, ConfigError):
            raise given
        config, known = given.config, [*given.errors, *violations(given.config)]
        with given.located_errors():
            result = launch(
                config if known else folders.intended(config, position),
                overrides,
                known=known,
                place=partial(folders.job, config, position),
                opening="" if known else short(config),
            )
    except USER_ERRORS as error:
        Console(stderr=True).line(str(error), style="red")
        return SweepJob(tuple(overrides), "refused", REJECTED, reason=str(error))
    except Exception as error:  # in the launcher itself; the remaining jobs still run
        Console(stderr=True).line("".join(traceback.format_exception(error)).rstrip(), style="red")
        return SweepJob(tuple(overrides), "failed", FAILED, reason=f"{type(error).__name__}: {error}")
    return _job(overrides, result)


def _job(overrides: Sequence[str], result: RunResult) -> SweepJob:
    metrics = RunFolder(result.folder).metrics
    rows, scored = ((read_metrics(metrics, kind) if metrics.exists() else []) for kind in ("train", "validation"))
    times = [row["step_time_s"] for row in rows[len(rows) // 4 :]]
    return SweepJob(
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


def _record(job: SweepJob) -> dict[str, object]:
    return {name: value for name, value in asdict(job).items() if name != "interrupted"}


def _show(jobs: Sequence[SweepJob], varied: Sequence[str], *, left_out: int) -> None:
    console = Console()
    console.table(
        [*varied, "status", "step", "loss", "validation", "step ms", "folder", "reason"],
        [[*(_value(job.overrides, key) for key in varied), *_cells(job)] for job in jobs],
    )
    if left_out:
        console.line(f"interrupted; {left_out} more {'jobs were' if left_out > 1 else 'job was'} not started")


def _cells(job: SweepJob) -> list[str]:
    milliseconds = None if job.step_time_s is None else job.step_time_s * 1e3
    return [
        job.status,
        str(job.step),
        number(job.loss, ".4f"),
        number(job.validation_loss, ".4f"),
        number(milliseconds, ".0f"),
        job.folder or "–",
        _reason(job),
    ]


def _reason(job: SweepJob) -> str:
    """Return why a job did not complete, in one line."""
    if job.status == "completed" or not job.reason:
        return ""
    first, *more = job.reason.strip().splitlines()
    return f"{first} (and {len(more)} more line{'' if len(more) == 1 else 's'})" if more else first


def _keys(overrides: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_key(override) for override in overrides))


def _key(override: str) -> str:
    """Return the key that an override sets, without Hydra's plus signs."""
    return override.partition("=")[0].lstrip("+")


def _value(overrides: Sequence[str], key: str) -> str:
    """Return the value of a key; the last one takes precedence."""
    return next((override.partition("=")[2] for override in reversed(overrides) if _key(override) == key), "")
