"""Run training or a short task on the ranks that a configuration describes.

The ranks are started on this machine (:mod:`megastack.launch.local`). Under torchrun or srun, this process is one of
them (:mod:`megastack.launch.external`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megastack.config.convert import coerce, value_of
from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import fit_data_parallel, violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, ErrorLine
from megastack.launch import external, local
from megastack.launch.environment import is_worker, world_size
from megastack.launch.worker import Task
from megastack.plan.describe import short
from megastack.training.state import Hooks, RunResult

T = TypeVar("T")


def train(config: TrainConfig, *, hooks: Hooks | None = None) -> RunResult:
    """Train as described by a configuration.

    Starts the ranks on this machine. Under torchrun or srun, this process is one of the ranks, and every rank calls
    this function. Local ranks are always forked from this process: hooks may be closures, the main module is not
    imported again (a script needs no ``if __name__ == "__main__":``, and notebooks and interpreters work), and this
    process may already have computed on any number of threads. Changes that hooks make in a rank stay in that rank. A
    process that has called the CUDA runtime (as ``torch.cuda.is_available()`` does) or holds a process group cannot
    fork ranks; this is reported before anything starts.

    Args:
        config: from :func:`megastack.compose`; changes to it by ``dataclasses.replace`` are checked as well.
        hooks: called on every rank after steps, validations and checkpoints.

    Returns:
        How the run ended; a failed or diverged run does not raise.

    Raises:
        ConfigError: the configuration, its data, its resume path or its run folder cannot be used. Nothing was trained,
            except if a rank rejects the configuration later: a block that cannot be compiled is found in its first use.
    """
    config, mistyped = coerce(config)
    return train_partial(config, (), hooks, unread=mistyped)


def train_partial(
    config: TrainConfig, overrides: Sequence[str], hooks: Hooks | None = None, unread: Sequence[ErrorLine] = ()
) -> RunResult:
    """Like :func:`train`, with a configuration in which some values could not be read.

    Args:
        config: the configuration, as far as it could be read.
        overrides: the command line that it came from, for the run folder.
        hooks: the user's hooks.
        unread: the errors of the values that could not be read.

    Raises:
        ConfigError: as in :func:`train`, with these errors and all others.
    """
    config, ranks, known = _settle_world(config, unread)
    opening = "" if known else short(config, ranks)
    start = external.join if is_worker() else local.launch
    return start(config, overrides, known=known, opening=opening, hooks=hooks)


def _settle_world(config: TrainConfig, unread: Sequence[ErrorLine]) -> tuple[TrainConfig, int | None, list[ErrorLine]]:
    """Fit the parallel degrees of an elastic job to the started ranks, and check the rules.

    Returns:
        The configuration, the number of ranks that train (None without a launcher), and its errors.
    """
    ranks = world_size()
    if ranks is not None and value_of(config, "launch.elastic") is True:
        if unread:
            return config, ranks, [*unread, *violations(config)]
        try:
            config = fit_data_parallel(config, ranks)
        except ConfigError as error:
            return config, ranks, list(error.errors)
        ranks = mesh_shape(config).world_size
    return config, ranks, [*unread, *violations(config, ranks)]


def on_ranks(name: str, config: TrainConfig, function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function(config, mesh, *arguments)`` on every rank, without a run folder.

    Args:
        name: a description of the task, for reports.
        config: a valid configuration.
        function: neither it nor its arguments need to be picklable.

    Returns:
        The result of rank 0; under a launcher, the result of this rank.

    Raises:
        ConfigError: a rank rejected the configuration.
        TaskFailed: a rank failed in another way.
    """
    task = Task(name, config, mesh_shape(config, world_size()), function, arguments)
    result: T = external.join_task(task) if is_worker() else local.launch_task(task)
    return result
