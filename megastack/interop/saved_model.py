"""The checkpoint that a path on the command line refers to, and the configuration of its model.

The path is a checkpoint, a run folder (its newest checkpoint) or an imported folder. A run folder contains the
configuration of its run, an imported folder the YAML of its model and a tokenizer. Commands that use the checkpoint
start from this configuration; values on the command line override it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megastack.checkpoint.folder import RUN_CONFIG, find_checkpoint
from megastack.config.compose import PartialConfig, compose_partial
from megastack.config.convert import replace_values, value_of
from megastack.config.reading import from_yaml
from megastack.errors import CheckpointError, ConfigError
from megastack.interop.transfer import HUB, MODEL

WEIGHTS_ONLY = {
    "parallel.dp": "1",
    "parallel.cp": "1",
    "parallel.ep": "1",
    "parallel.zero.stage": "0",
    "parallel.zero.shard_size": "null",
    "parallel.zero.offload": "false",
    "parallel.sequence_parallel": "false",
    "schedule.name": "1f1b",
    "schedule.chunks": "1",
    "schedule.round": "null",
    "schedule.path": "null",
    "schedule._target_": "null",
    "schedule.options": "null",
    "recompute.mode": "none",
    "recompute.pattern": "null",
    "cluster.nodes": "1",
    "cluster.ranks_per_node": "null",
    "checkpoint.load_weights": "null",
    "resume": "null",
    "launch.elastic": "false",
    "launch.numa_binding": "none",
}
"""Overrides for commands that only use the weights; ``tp``, ``pp`` and the layers of each stage come from the run."""


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint, and the configuration next to it.

    Attributes:
        checkpoint: its folder.
        config_dir: the folder of the configuration; None if there is none.
        config_name: the file to start from.
        choices: for an import, the overrides that select its model and tokenizer; empty otherwise.
    """

    checkpoint: Path
    config_dir: Path | None = None
    config_name: str = "train"
    choices: tuple[str, ...] = ()

    def lacks_tokenizer(self, overrides: Sequence[str]) -> bool:
        """Whether this is an import without a ``tokenizer.json`` and no tokenizer is configured."""
        configured = any(_key(each) == "data.tokenizer" for each in (*self.choices, *overrides))
        return bool(self.choices) and not configured

    def lacks_data(self, overrides: Sequence[str]) -> bool:
        """Whether this is an import, which has no run, and no data is configured."""
        keys = {_key(each) for each in overrides} - {"data.tokenizer"}
        return bool(self.choices) and not any(key.partition(".")[0] in ("data", "experiment") for key in keys)

    def compose_partial(self, overrides: Sequence[str]) -> PartialConfig:
        """Compose the configuration for using the weights, on one replica of the run's layout unless overridden.

        Raises:
            ConfigError: there is no configuration and ``overrides`` do not select a model.
        """
        if self.config_dir is None and self.config_name == "train" and not any(map(_selects_model, overrides)):
            rule = "has no configuration next to it; use model=NAME and key=value for the model"
            raise ConfigError(f"{self.checkpoint}: {rule}")
        keys = {_key(override) for override in overrides}
        base = [choice for choice in self.choices if choice.partition("=")[0] not in keys]
        base += [f"{key}={value}" for key, value in WEIGHTS_ONLY.items() if key not in keys]
        if "parallel.layers_per_stage" not in keys and not self._keeps_split(keys):
            base.append("parallel.layers_per_stage=null")
        partial = compose_partial([*base, *overrides], config_dir=self.config_dir, config_name=self.config_name)
        longest = value_of(partial.config, "model.max_positions")
        if self.choices and isinstance(longest, int) and "batch.sequence_length" not in keys:
            # an import has no sequence length
            return replace(partial, config=replace_values(partial.config, {"batch.sequence_length": longest}))
        return partial

    def _keeps_split(self, keys: set[str]) -> bool:
        """Whether the run's list of layers per stage matches the number of stages."""
        run_config = self.checkpoint.absolute().parents[1] / RUN_CONFIG
        if {"parallel.pp", "schedule.chunks", "model.layers"} & keys or not run_config.is_file():
            return False
        return from_yaml(run_config.read_text(encoding="utf-8")).schedule.chunks == 1


def _selects_model(override: str) -> bool:
    return _key(override).partition(".")[0] in ("model", "experiment")


def _key(override: str) -> str:
    """Return the key or group of an override."""
    return override.partition("=")[0].lstrip("+~")


def find_saved_model(path: str | Path, *, config_dir: str | None = None, config_name: str = "train") -> SavedModel:
    """Find the checkpoint that ``path`` refers to, with the given configuration or else the one next to it.

    The content of the checkpoint is checked when it is loaded.

    Raises:
        ConfigError: there is no usable checkpoint.
    """
    try:
        checkpoint = find_checkpoint(Path(path))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if config_dir is not None or config_name != "train":
        return SavedModel(checkpoint, None if config_dir is None else Path(config_dir), config_name)
    folder = checkpoint.absolute().parent
    if (folder.parent / RUN_CONFIG).is_file():
        return SavedModel(checkpoint, folder.parent, RUN_CONFIG.removesuffix(".yaml"))
    models = list((folder / MODEL).glob("*.yaml"))
    if len(models) == 1:
        tokenizer = folder / HUB / "tokenizer.json"
        choices = [f"model={models[0].stem}"]
        choices += [f"data.tokenizer='{tokenizer}'"] if tokenizer.is_file() else []
        return SavedModel(checkpoint, folder, choices=tuple(choices))
    return SavedModel(checkpoint)
