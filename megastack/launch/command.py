"""``megastack train``: compose, check, then start ranks or be one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megastack.config.compose import compose
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError
from megastack.launch.environment import is_worker, world_size
from megastack.plan.describe import short
from megastack.training.state import RunResult


def checked(options: argparse.Namespace) -> TrainConfig:
    """The configuration of a command line.

    Raises:
        ConfigError: every violation, one a line.
    """
    config = compose(options.overrides, config_dir=options.config_dir, config_name=options.config_name)
    found = violations(config, world_size())
    if found:
        raise ConfigError("\n".join(str(violation) for violation in found), found)
    return config


def train(config: TrainConfig, overrides: list[str] | None = None) -> RunResult:
    """Train what a configuration describes; under torchrun or srun this process is one of the ranks.

    Raises:
        ConfigError: the configuration, its data, its resume path or its run folder cannot be used.
    """
    found = violations(config, world_size())
    if found:
        raise ConfigError("\n".join(str(violation) for violation in found), found)
    if is_worker():
        from megastack.launch.external import join

        return join(config, overrides or [], opening=short(config, world_size()))
    from megastack.launch.local import launch

    return launch(config, overrides or [], opening=short(config))


def train_command(options: argparse.Namespace) -> int:
    """The verb ``train``; returns the exit code."""
    result = train(checked(options), options.overrides)
    if options.json:
        Path(options.json).write_text(json.dumps(as_record(result), indent=1) + "\n")
    return result.exit_code


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
