"""What the commands that use the weights of a checkpoint have in common: what is meant, what is refused, the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.config.compose import Draft
from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, MegastackError, RankEnvironmentError
from megastack.faults import Faults, ask_model, check_fit
from megastack.interop.saved import find_saved
from megastack.launch.environment import is_first_rank, is_worker, world_size
from megastack.launch.refusal import refuse_early
from megastack.launch.worker import is_refusal
from megastack.observe.console import Console

FAILED = 1


@dataclass(frozen=True)
class Use:
    """A checkpoint, the configuration that it is used with, and what stands against both so far."""

    checkpoint: Path
    draft: Draft
    faults: Faults

    @property
    def config(self) -> TrainConfig:
        """The configuration, as far as it could be read."""
        return self.draft.config

    def require_legal(self) -> None:
        """To be called when everything was asked, before anything is computed.

        Raises:
            ConfigError: every fault.
        """
        with self.draft.origins():
            self.faults.require_none()

    def __str__(self) -> str:
        shape = mesh_shape(self.config, world_size())
        sizes = [f"{axis}{size}" for axis, size in (("pp", shape.pp), ("dp", shape.dp), ("tp", shape.tp)) if size > 1]
        ranks = f"{' × '.join(sizes)} = {shape.world_size} ranks" if sizes else "one rank"
        return f"{self.checkpoint}, {ranks}, {self.config.precision.compute.value}"


def use_of(options: argparse.Namespace) -> Use:
    """What a command is to work with; it adds its own faults and asks for legality.

    Raises:
        ConfigError: there is no checkpoint, or no configuration that could be read.
    """
    saved = find_saved(options.source, config_dir=options.config_dir, config_name=options.config_name)
    draft = saved.draft(options.overrides)
    faults = Faults([*draft.faults, *violations(draft.config, world_size())])
    shapes = ask_model(draft.config, faults)
    faults.ask(lambda: check_fit("checkpoint", saved.checkpoint, shapes, strict=True))
    return Use(saved.checkpoint, draft, faults)


def run_command(options: argparse.Namespace, run: Callable[[argparse.Namespace, Console], dict[str, Any]]) -> int:
    """Run a command and write its record; returns the exit code.

    Raises:
        ConfigError: what was asked for is refused.
    """
    first = is_first_rank()
    try:
        record = run(options, Console(enabled=first))
    except MegastackError as error:
        if isinstance(error, RankEnvironmentError):
            raise
        if is_refusal(error):
            refusal = error if isinstance(error, ConfigError) else ConfigError(str(error)).reported_by(error.reporter)
            if refusal.reporter is None and is_worker():  # from before the ranks met
                refuse_early(refusal.faults)
            raise refusal from None
        Console(stderr=True).line(str(error), style="red")
        return FAILED
    if options.json and first:
        text = json.dumps(record, indent=1, ensure_ascii=False)
        Path(options.json).write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
    return 0
