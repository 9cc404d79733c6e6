"""What the commands that use the weights of a checkpoint have in common: what is meant, what is refused, the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megastack.config.choices import DataSource
from megastack.config.compose import PartialConfig
from megastack.config.convert import replace_values, value_of
from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.config.value_rules import BYTE_IDS
from megastack.errors import ConfigError, MegastackError, RankEnvironmentError, Violation
from megastack.interop.saved_model import find_saved_model
from megastack.launch.environment import is_first_rank, is_worker, world_size
from megastack.launch.refusal import refuse_early
from megastack.launch.worker import is_refusal
from megastack.observe.console import Console
from megastack.preflight.checks import ErrorCollector, ask_model, check_fit

FAILED = 1


WITHOUT_TOKENIZER: dict[str, Any] = {
    "source": DataSource.bin,
    "paths": ["ids.npy"],
    "blend": [],
    "phases": [],
    "pack": True,
}
"""Data that are ids already, as far as the rules ask."""


@dataclass(frozen=True)
class Use:
    """A checkpoint, the configuration that it is used with, and the errors found so far.

    Attributes:
        checkpoint: its folder.
        draft: the configuration.
        faults: what was found; a command adds its own.
        lacks_data: data are needed, and it has none: that is among the faults.
    """

    checkpoint: Path
    partial_config: PartialConfig
    errors: ErrorCollector
    lacks_data: bool = False

    @property
    def config(self) -> TrainConfig:
        """The configuration, as far as it could be read."""
        return self.partial_config.config

    def require_legal(self) -> None:
        """To be called when everything was asked, before anything is computed.

        Raises:
            ConfigError: every fault.
        """
        with self.partial_config.located_errors():
            self.errors.require_none()

    def __str__(self) -> str:
        shape = mesh_shape(self.config, world_size())
        sizes = [f"{axis}{size}" for axis, size in (("pp", shape.pp), ("dp", shape.dp), ("tp", shape.tp)) if size > 1]
        ranks = f"{' × '.join(sizes)} = {shape.world_size} ranks" if sizes else "one rank"
        return f"{self.checkpoint}, {ranks}, {self.config.precision.compute.value}"


def use_of(
    options: argparse.Namespace, *, data: Mapping[str, Any] | None = None, tokenizer: bool = True, split: bool = False
) -> Use:
    """What a command is to work with; it adds its own faults and asks for legality.

    Args:
        options: of the command line.
        data: keys of the section ``data`` that stand for the run's, where the command reads something else.
        tokenizer: whether it needs the tokenizer.
        split: whether it needs the data of a run.

    Raises:
        ConfigError: there is no checkpoint, or no configuration that could be read.
    """
    saved = find_saved_model(options.source, config_dir=options.config_dir, config_name=options.config_name)
    partial_config, lacking = saved.compose_partial(options.overrides), ErrorCollector()
    vocab = value_of(partial_config.config, "model.vocab")
    lacks_data = split and saved.lacks_data(options.overrides)
    if lacks_data:
        rule = "is an import, which no run and no validation split belong to; use --file FILE"
        lacking.found.append(f"{options.source}: {rule}")
    elif tokenizer and saved.lacks_tokenizer(options.overrides) and vocab != BYTE_IDS:
        rule = f"{options.source} has no tokenizer.json, and its {vocab} tokens are not bytes"
        lacking.found.append(Violation("data.tokenizer", "byte", rule, ("the path of its tokenizer.json",)))
    if lacking.found or not tokenizer:
        data = WITHOUT_TOKENIZER
    if data:
        partial_config = replace(
            partial_config, config=replace_values(partial_config.config, {f"data.{key}": x for key, x in data.items()})
        )
    errors = ErrorCollector([*partial_config.errors, *lacking.found, *violations(partial_config.config, world_size())])
    shapes = ask_model(partial_config.config, errors)
    errors.ask(lambda: check_fit("checkpoint", saved.checkpoint, shapes, strict=True))
    return Use(saved.checkpoint, partial_config, errors, lacks_data)


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
                refuse_early(refusal.errors)
            raise refusal from None
        Console(stderr=True).line(str(error), style="red")
        return FAILED
    if options.json and first:
        text = json.dumps(record, indent=1, ensure_ascii=False)
        Path(options.json).write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
    return 0
