"""What the commands that use the weights of a checkpoint have in common: what is meant, what is refused, the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import require_legal
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.interop.saved import find_saved
from megastack.launch.environment import is_first_rank, world_size
from megastack.launch.worker import is_refusal
from megastack.observe.console import Console

FAILED = 1


@dataclass(frozen=True)
class Use:
    """A checkpoint, and the legal configuration that it is used with."""

    checkpoint: Path
    config: TrainConfig

    def __str__(self) -> str:
        shape = mesh_shape(self.config, world_size())
        sizes = [f"{axis}{size}" for axis, size in (("pp", shape.pp), ("dp", shape.dp), ("tp", shape.tp)) if size > 1]
        ranks = f"{' × '.join(sizes)} = {shape.world_size} ranks" if sizes else "one rank"
        return f"{self.checkpoint}, {ranks}, {self.config.precision.compute.value}"


def use_of(options: argparse.Namespace) -> Use:
    """What a command is to work with.

    Raises:
        ConfigError: there is no checkpoint, or the configuration is refused.
    """
    saved = find_saved(options.source, config_dir=options.config_dir, config_name=options.config_name)
    config = saved.configured(options.overrides)
    require_legal(config, world_size())
    return Use(saved.checkpoint, config)


def run_command(options: argparse.Namespace, run: Callable[[argparse.Namespace, Console], dict[str, Any]]) -> int:
    """Run a command and write its record; returns the exit code.

    Raises:
        ConfigError: what was asked for is refused.
    """
    first = is_first_rank()
    try:
        record = run(options, Console(enabled=first))
    except MegastackError as error:
        if is_refusal(error):
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
        Console(stderr=True).line(str(error), style="red")
        return FAILED
    if options.json and first:
        text = json.dumps(record, indent=1, ensure_ascii=False)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0
