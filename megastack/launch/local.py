"""Start all ranks of a run on this machine and turn their ends into one result.

Torch's elastic agent forks the ranks, watches them and leaves nothing running. This parent runs no torch operation
before it forks, so that ranks may use several threads. Ranks return how the run ended; when one fails, the accounts
that ranks wrote are sorted by time, and the first is shown last.
"""

from __future__ import annotations

import logging
import math
import signal
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.launch.preflight import Prepared, prepare
from megastack.launch.worker import work
from megastack.mesh.shape import MeshShape, describe_coordinates
from megastack.observe.console import Console
from megastack.observe.failure import first_failure
from megastack.observe.folder import RunFolder
from megastack.observe.status import read_status, write_status
from megastack.training.state import RunResult


def launch(config: TrainConfig, overrides: Sequence[str] = (), *, opening: str = "") -> RunResult:
    """Train on as many local ranks as the degrees multiply to.

    Args:
        config: a legal configuration.
        overrides: the command line it came from, for the run folder.
        opening: what to print before the run starts.

    Raises:
        ConfigError: data, resume path or run folder cannot be used; nothing was started.
    """
    prepared = prepare(config, overrides)
    console, folder = Console(), RunFolder(prepared.assignment.folder)
    for line in (opening, *prepared.notes, f"run folder {folder.path}"):
        if line:
            console.line(line)
    shape = mesh_shape(config)
    write_status(folder.status, "running", step=0)
    try:
        returned = elastic_launch(_agent(config, shape), work)(prepared.assignment, prepared.dataset)
    except ChildFailedError as error:
        return _failed(error, prepared, shape, console)
    except SignalException as error:
        return _interrupted(error, prepared, console)
    result: RunResult = returned[0]
    return result


def _agent(config: TrainConfig, shape: MeshShape) -> LaunchConfig:
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=shape.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        shutdown_timeout=math.ceil(config.launch.grace_s),
    )


def _failed(error: ChildFailedError, prepared: Prepared, shape: MeshShape, console: Console) -> RunResult:
    """Show the first failure and write it into ``status.json``, unless the ranks did so themselves."""
    folder = RunFolder(prepared.assignment.folder)
    record = first_failure(folder.path / "failures")
    if record is not None:
        rank, coordinates, reason, account = record.rank, record.coordinates, record.error, record.describe()
        step: int = record.step
    else:
        rank, failure = error.get_first_failure()
        coordinates, step = describe_coordinates(shape.coordinates(rank)), _last_step(folder)
        reason = f"ended by {_cause(failure.exitcode)}"
        account = f"[rank {rank} | {coordinates}] {reason}, pid {failure.pid}"
    write_status(folder.status, "failed", step=step, reason=reason, rank=rank, coordinates=coordinates, exit_code=1)
    console.line(account, style="red")
    return RunResult("failed", step, None, folder.path, reason)


def _interrupted(error: Any, prepared: Prepared, console: Console) -> RunResult:
    """The launcher was asked to stop and passed it on; the ranks have had their grace to save."""
    folder = RunFolder(prepared.assignment.folder)
    status = read_status(folder.status) or {}
    name = signal.Signals(error.sigval).name
    if status.get("status") == "running":
        reason = f"received {name}; the ranks did not save in time"
        write_status(folder.status, "failed", step=status.get("step"), reason=reason, exit_code=1)
        console.line(reason, style="red")
        return RunResult("failed", status.get("step") or 0, None, folder.path, reason)
    return RunResult(status["status"], status["step"], None, folder.path, status["reason"])


def _last_step(folder: RunFolder) -> int:
    return (read_status(folder.status) or {}).get("step") or 0


def _cause(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
