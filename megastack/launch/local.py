"""Start all ranks of a run on this machine and turn their ends into one result.

Torch's elastic agent starts the ranks, watches them and leaves nothing running. Ranks return how the run ended; when
one fails, the accounts that ranks wrote are sorted, and the first is shown last.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, ErrorLine, Violation, counted
from megastack.launch.account import Seen, account_of
from megastack.launch.preflight import Prepared, inspect, take
from megastack.launch.start import START_METHOD, StartLine, agent, die_with_parent, forks_lose_cuda, run_agent
from megastack.launch.stopping import SIGNALS, StopForwarder, StoppedEarly
from megastack.launch.survivors import SurvivorKiller
from megastack.launch.worker import Assignment, work
from megastack.observe.console import Console
from megastack.observe.failure import FailureRecord, any_failed, by_cause, read_failures
from megastack.observe.folder import RunFolder
from megastack.observe.ownership import Heartbeat
from megastack.observe.status import read_status, update_status
from megastack.observe.streams import best_effort_output, protect_output
from megastack.observe.watchdog import read_reports
from megastack.training.state import Hooks, RunResult

RANKS_PER_CPU = 64
"""Most ranks that are started here for each CPU; more is a mistake, not a plan."""


def launch(
    config: TrainConfig,
    overrides: Sequence[str] = (),
    *,
    broken: Sequence[ErrorLine] = (),
    place: Callable[[], str] | None = None,
    opening: str = "",
    hooks: Hooks | None = None,
) -> RunResult:
    """Train on as many local ranks as the degrees multiply to.

    Args:
        config: a configuration, as far as it could be read.
        overrides: the command line it came from, for the run folder.
        broken: what is known to be wrong with it; the report has what else there is.
        place: gives the run folder instead of ``run.dir``, asked when nothing is wrong.
        opening: what to print before the run starts.
        hooks: what ranks call on the way.

    Raises:
        ConfigError: configuration, data, resume path, run folder or checkpoint cannot be used; nothing was trained.
    """
    found = inspect(config, broken, also=_require_startable)
    if place is not None:
        config = replace(config, run=replace(config.run, dir=place()))
    with best_effort_output(), StopForwarder(config.launch.grace_s) as stop:
        prepared = take(config, overrides, found)
        with Heartbeat(prepared.taken.ownership), _told_how_it_ended(prepared.assignment):
            console, folder = Console(), RunFolder(prepared.assignment.folder)
            for line in (opening, *prepared.notes, f"run folder {folder.path}"):
                if line:
                    console.line(line)
            result = _result(prepared, hooks, stop)
    return replace(result, interrupted=stop.received is not None)


@contextlib.contextmanager
def _told_how_it_ended(assignment: Assignment) -> Iterator[None]:
    """A run that ends with an error of its launcher is not left as running."""
    folder = RunFolder(assignment.folder)
    try:
        yield
    except BaseException as error:
        status = read_status(folder.status)
        if status is not None and status["status"] == "running" and assignment.may_write:
            with contextlib.suppress(OSError):
                update_status(folder.status, "failed", reason=f"{type(error).__name__}: {error}".rstrip(": "))
        raise


def _require_startable(config: TrainConfig) -> None:
    """Refuse a world that this machine cannot hold or that this process cannot fork, before anything is made."""
    errors = list[ErrorLine]()
    ranks, cpus = mesh_shape(config).world_size, os.cpu_count() or 1
    if ranks > RANKS_PER_CPU * cpus:
        errors.append(
            f"world={ranks}: pp·dp·cp·tp ranks are too many for the {counted(cpus, 'CPU')} of this machine; use "
            f"torchrun or srun on several, or degrees of at most {RANKS_PER_CPU * cpus} ranks"
        )
    if dist.is_initialized():
        errors.append(
            "train: ranks are forked from this process, which holds a process group; use "
            "torch.distributed.destroy_process_group() before, or torchrun"
        )
    if config.device != "cpu" and torch.cuda.device_count() and forks_lose_cuda():
        rule = "ranks are forked from this process, which has called the CUDA runtime, so they cannot use a GPU"
        called = "train before the first such call (torch.cuda.is_available() is one)"
        advice = ("cpu", called, "PYTORCH_NVML_BASED_CUDA_CHECK=1", "megastack train", "torchrun")
        errors.append(Violation("device", config.device, rule, advice))
    if errors:
        raise ConfigError.of(errors)


def _result(prepared: Prepared, hooks: Hooks | None, stop: StopForwarder) -> RunResult:
    folder, config = RunFolder(prepared.assignment.folder), prepared.assignment.config
    ranks = mesh_shape(config).world_size
    told = multiprocessing.get_context(START_METHOD).SimpleQueue()
    line = StartLine(ranks, config.launch.timeout_s)
    survivors = SurvivorKiller(
        ranks,
        lambda: not told.empty() or any_failed(folder.failures),
        config.launch.grace_s,
    )
    try:
        with survivors:
            work = (line, prepared.assignment, prepared.dataset, hooks, told)
            returned = run_agent(agent(config, ranks), _rank, *work, before=stop.check)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        codes = survivors.exit_codes() | {rank: failure.exitcode}
        seen = Seen(rank, codes, _why_killed(stop), survivors.outlasted)
        return _failed(prepared, seen, by_cause([*read_failures(folder.failures), *_drained(told)]))
    except StoppedEarly as error:
        reason = str(error)
        status = update_status(folder.status, "preempted", reason=reason)
        Console(stderr=True).line(reason, style="red")
        return RunResult("preempted", status["step"] or 0, None, folder.path, reason)
    result: RunResult = returned[0]
    return result


def _drained(told: Any) -> list[FailureRecord]:
    found = []
    while not told.empty():
        found.append(told.get())
    return found


def _rank(line: StartLine, assignment: Assignment, dataset: Dataset, hooks: Hooks | None, told: Any) -> RunResult:
    """A rank of this launcher: it ends with it. A terminal's SIGINT reaches it as well as the launcher; it only asks.

    One that fails has left its account; the agent learns no more than that.
    """
    die_with_parent()
    protect_output()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = work(
            assignment,
            dataset,
            hooks,
            signals=SIGNALS,
            tell=lambda record: told.put(record.shortened()),
            first=line.wait,
        )
    except Exception:
        sys.exit(1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return result


def _why_killed(stop: StopForwarder) -> str | None:
    if not stop.killed or stop.received is None:
        return None
    return f"received {stop.received.name} and did not stop in launch.grace_s"


def _failed(prepared: Prepared, seen: Seen, records: Sequence[FailureRecord]) -> RunResult:
    """Show the first failure and write it into ``status.json``.

    Raises:
        ConfigError: the ranks found, before they trained, that they cannot do what was asked.
    """
    folder, config = RunFolder(prepared.assignment.folder), prepared.assignment.config
    account = account_of(records, read_reports(folder.watch), seen, mesh_shape(config), config.launch.timeout_s)
    step = account.step or (read_status(folder.status) or {}).get("step") or 0
    with contextlib.suppress(OSError):  # a full disk may be the very reason
        if prepared.assignment.may_write:
            update_status(
                folder.status,
                "failed",
                step=step,
                reason=account.reason,
                rank=account.rank,
                coordinates=account.coordinates,
                exit_code=78 if account.refused else 1,
                pid=os.getpid(),
            )
    if account.refused:
        raise ConfigError(account.reason)
    Console(stderr=True).line(f"failed after step {step}; everything is in {folder.path}\n{account.text}", style="red")
    return RunResult("failed", step, None, folder.path, account.reason)
