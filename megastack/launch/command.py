"""``megastack train``: compose, check, then start ranks or be one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megastack.config.compose import PartialConfig, compose_partial
from megastack.config.convert import coerce, value_of
from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import fit_data_parallel, violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, ErrorLine
from megastack.launch.environment import is_worker, world_size
from megastack.plan.describe import short
from megastack.training.state import Hooks, RunResult


def train(config: TrainConfig, *, hooks: Hooks | None = None) -> RunResult:
    """Train what a configuration describes.

    Starts the ranks on this machine; under torchrun or srun this process is one of the ranks, and every rank calls.
    Local ranks are forked from this process, always: hooks may be closures, the main module is not imported again (a
    script needs no ``if __name__ == "__main__":``, a notebook or an interpreter will do), and this process may have
    computed on any number of threads before. What hooks change in a rank stays in that rank. A process that has
    called the CUDA runtime (``torch.cuda.is_available()`` does) or that holds a process group cannot fork ranks; this
    is an error before anything starts.

    Args:
        config: from :func:`megastack.compose`; changes to it by ``dataclasses.replace`` are checked as well.
        hooks: what to call on every rank after steps, validations and checkpoints.

    Returns:
        How the run ended; a failed or diverged one raises nothing.

    Raises:
        ConfigError: the configuration, its data, its resume path or its run folder cannot be used; nothing was trained.
    """
    config, mistyped = coerce(config)
    return _train(config, (), hooks, unread=mistyped)


def _settled(config: TrainConfig, unread: Sequence[ErrorLine]) -> tuple[TrainConfig, int | None, list[ErrorLine]]:
    """The configuration with its degrees, the number of ranks that train where a launcher has started them, and what is
    wrong with it: values that could not be read, broken rules, an elastic job whose ranks no degree fits."""
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


def _train(
    config: TrainConfig, overrides: Sequence[str], hooks: Hooks | None, unread: Sequence[ErrorLine] = ()
) -> RunResult:
    config, ranks, broken = _settled(config, unread)
    opening = "" if broken else short(config, ranks)
    if is_worker():
        from megastack.launch.external import join

        return join(config, overrides, broken=broken, opening=opening, hooks=hooks)
    from megastack.launch.local import launch

    return launch(config, overrides, broken=broken, opening=opening, hooks=hooks)


def train_command(options: argparse.Namespace) -> int:
    """The verb ``train``; returns the exit code."""
    if options.multirun:
        from megastack.launch.sweep import sweep_command

        return sweep_command(options)
    given = _compose(options)
    with given.located_errors():
        result = _train(given.config, options.overrides, None, unread=given.errors)
    if options.json:
        Path(options.json).write_text(json.dumps(as_record(result), indent=1) + "\n", encoding="utf-8")
    return result.exit_code


def _compose(options: argparse.Namespace) -> PartialConfig:
    try:
        return compose_partial(options.overrides, config_dir=options.config_dir, config_name=options.config_name)
    except ConfigError as error:
        if not is_worker():
            raise
        from megastack.launch.refusal import refuse_early

        refuse_early(error.errors)


def as_record(result: RunResult) -> dict[str, object]:
    """A result as JSON."""
    return {
        "status": result.status,
        "step": result.step,
        "loss": result.loss,
        "folder": str(result.folder),
        "reason": result.reason,
        "exit_code": result.exit_code,
    }
