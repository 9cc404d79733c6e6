"""Code shared by ``generate`` and ``evaluate``: the checkpoint, its configuration and errors, and the record."""

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
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.config.value_rules import BYTE_IDS
from megastack.errors import ConfigError, MegastackError, RankEnvironmentError, Violation
from megastack.interop.saved_model import find_saved_model
from megastack.launch.environment import is_first_rank, is_worker, world_size
from megastack.launch.failure import FAILED, is_user_error
from megastack.launch.rendezvous import reject_early
from megastack.mesh.shape import MeshShape
from megastack.observe.console import Console
from megastack.preflight.checkpoint import check_fit
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.model import check_mesh, check_model

WITHOUT_TOKENIZER: dict[str, Any] = {
    "source": DataSource.bin,
    "paths": ["ids.npy"],
    "blend": [],
    "phases": [],
    "pack": True,
}
"""Data that already consists of ids, for the rules."""


@dataclass(frozen=True)
class WeightsUse:
    """A checkpoint, the configuration to use it with, and the errors found so far.

    Attributes:
        checkpoint: its folder.
        partial_config: the configuration.
        errors: the errors so far; a command adds its own.
        shape: the mesh; None if its degrees are invalid.
        lacks_data: whether the command needs data and has none; this is one of the errors.
    """

    checkpoint: Path
    partial_config: PartialConfig
    errors: ErrorCollector
    shape: MeshShape | None
    lacks_data: bool = False

    @property
    def config(self) -> TrainConfig:
        """The configuration, as far as it could be read."""
        return self.partial_config.config

    def require_valid(self) -> None:
        """Raise the collected errors; called after every check, before anything is computed.

        Raises:
            ConfigError: every error.
        """
        with self.partial_config.located_errors():
            self.errors.require_none()

    def __str__(self) -> str:
        shape = self.shape or MeshShape()
        sizes = [f"{axis}{size}" for axis, size in (("pp", shape.pp), ("dp", shape.dp), ("tp", shape.tp)) if size > 1]
        ranks = f"{' × '.join(sizes)} = {shape.world_size} ranks" if sizes else "one rank"
        return f"{self.checkpoint}, {ranks}, {self.config.precision.compute.value}"


def find_weights(
    options: argparse.Namespace, *, data: Mapping[str, Any] | None = None, tokenizer: bool = True, split: bool = False
) -> WeightsUse:
    """Find the checkpoint and the configuration of a command, and check everything that commands share.

    Args:
        options: the command-line options.
        data: keys of the section ``data`` that replace the run's keys, if the command reads other data.
        tokenizer: whether the command needs the tokenizer.
        split: whether the command needs the data of a run.

    Raises:
        ConfigError: there is no checkpoint, or no configuration that could be read.
    """
    saved = find_saved_model(options.source, config_dir=options.config_dir, config_name=options.config_name)
    given, missing = saved.compose_partial(options.overrides), list[Violation | str]()
    vocab = value_of(given.config, "model.vocab")
    lacks_data = split and saved.lacks_data(options.overrides)
    if lacks_data:
        rule = "is an import, which no run and no validation split belong to; use --file FILE"
        missing.append(f"{options.source}: {rule}")
    elif tokenizer and saved.lacks_tokenizer(options.overrides) and vocab != BYTE_IDS:
        rule = f"{options.source} has no tokenizer.json, and its {vocab} tokens are not bytes"
        missing.append(Violation("data.tokenizer", "byte", rule, ("the path of its tokenizer.json",)))
    if missing or not tokenizer:
        data = WITHOUT_TOKENIZER
    if data:
        given = replace(given, config=replace_values(given.config, {f"data.{key}": x for key, x in data.items()}))
    errors = ErrorCollector([*given.errors, *missing, *violations(given.config, world_size())])
    shape = check_mesh(given.config, errors, world_size())
    model = check_model(given.config, errors, shape)
    errors.check(lambda: check_fit("checkpoint", saved.checkpoint, model, strict=True))
    return WeightsUse(saved.checkpoint, given, errors, shape, lacks_data)


def run_with_weights(
    options: argparse.Namespace, command: Callable[[argparse.Namespace, Console], dict[str, Any]]
) -> int:
    """Run a command, write its record and return the exit code.

    Raises:
        ConfigError: the configuration is rejected.
    """
    first = is_first_rank()
    try:
        record = command(options, Console(enabled=first))
    except MegastackError as error:
        if isinstance(error, RankEnvironmentError):
            raise
        if is_user_error(error):
            rejection = error if isinstance(error, ConfigError) else ConfigError(str(error)).reported_by(error.reporter)
            if rejection.reporter is None and is_worker():  # raised before the rendezvous
                reject_early(rejection.errors)
            raise rejection from None
        Console(stderr=True).line(str(error), style="red")
        return FAILED
    if options.json and first:
        text = json.dumps(record, indent=1, ensure_ascii=False)
        Path(options.json).write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
    return 0
