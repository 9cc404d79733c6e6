"""What a path on the command line means: a checkpoint, the newest of a run, or what an import made; and its model.

A run folder has the configuration of its run, an import the YAML of its model and a tokenizer. Either is where the
configuration of a command about the checkpoint begins; what is given on the command line comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megastack.checkpoint.find import find_checkpoint
from megastack.config.compose import PartialConfig, compose_partial
from megastack.config.convert import replace_values, value_of
from megastack.config.reading import from_yaml
from megastack.errors import CheckpointError, ConfigError
from megastack.interop.folder import RUN_CONFIG
from megastack.interop.transfer import HUB, MODEL

ALONE = {
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
}
"""What a use of the weights takes over from no run; ``tp``, ``pp`` and the layers of each stage stay the run's."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and the configuration that lies beside it.

    Attributes:
        checkpoint: its folder.
        config_dir: a folder with the configuration; None where there is none.
        config_name: the file to start from.
        choices: what makes it the checkpoint's model; an import's, which no run belongs to.
    """

    checkpoint: Path
    config_dir: Path | None = None
    config_name: str = "train"
    choices: tuple[str, ...] = ()

    def lacks_tokenizer(self, overrides: Sequence[str]) -> bool:
        """Whether it is an import without a ``tokenizer.json``, and no tokenizer is given."""
        given = any(_key(each) == "data.tokenizer" for each in (*self.choices, *overrides))
        return bool(self.choices) and not given

    def lacks_data(self, overrides: Sequence[str]) -> bool:
        """Whether it is an import, which no run belongs to, and no data are given."""
        keys = {_key(each) for each in overrides} - {"data.tokenizer"}
        return bool(self.choices) and not any(key.partition(".")[0] in ("data", "experiment") for key in keys)

    def compose_partial(self, overrides: Sequence[str]) -> PartialConfig:
        """The configuration for one use of the weights, on one replica of the run's grid or as ``overrides`` say.

        Raises:
            ConfigError: there is nothing that could be read, or nothing that says what the model is.
        """
        if self.config_dir is None and self.config_name == "train" and not any(map(_names_a_model, overrides)):
            rule = "no configuration lies beside it; give the model as model=NAME and key=value"
            raise ConfigError(f"{self.checkpoint}: {rule}")
        keys = {_key(override) for override in overrides}
        base = [choice for choice in self.choices if choice.partition("=")[0] not in keys]
        base += [f"{key}={value}" for key, value in ALONE.items() if key not in keys]
        if "parallel.layers_per_stage" not in keys and not self._keeps_split(keys):
            base.append("parallel.layers_per_stage=null")
        given = compose_partial([*base, *overrides], config_dir=self.config_dir, config_name=self.config_name)
        longest = value_of(given.config, "model.max_positions")
        if self.choices and isinstance(longest, int) and "batch.sequence_length" not in keys:
            of_length = replace_values(given.config, {"batch.sequence_length": longest})  # an import names no length
            return replace(given, config=of_length)
        return given

    def _keeps_split(self, keys: set[str]) -> bool:
        """Whether the run's list of layers is for as many stages as there will be."""
        beside = self.checkpoint.absolute().parents[1] / RUN_CONFIG
        if {"parallel.pp", "schedule.chunks", "model.layers"} & keys or not beside.is_file():
            return False
        return from_yaml(beside.read_text(encoding="utf-8")).schedule.chunks == 1


def _names_a_model(override: str) -> bool:
    return _key(override).partition(".")[0] in ("model", "experiment")


def _key(override: str) -> str:
    """The key or group that an override is about."""
    return override.partition("=")[0].lstrip("+~")


def checkpoint_of(path: str | Path) -> Path:
    """The checkpoint that a path on the command line means; its content is checked when it is loaded.

    Raises:
        ConfigError: there is none.
    """
    try:
        return find_checkpoint(Path(path))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def find_saved(path: str | Path, *, config_dir: str | None = None, config_name: str = "train") -> Saved:
    """The checkpoint that ``path`` means with the configuration that is given, else the one beside it.

    Raises:
        ConfigError: no checkpoint.
    """
    checkpoint = checkpoint_of(path)
    if config_dir is not None or config_name != "train":
        return Saved(checkpoint, None if config_dir is None else Path(config_dir), config_name)
    beside = checkpoint.absolute().parent
    if (beside.parent / RUN_CONFIG).is_file():
        return Saved(checkpoint, beside.parent, RUN_CONFIG.removesuffix(".yaml"))
    models = list((beside / MODEL).glob("*.yaml"))
    if len(models) == 1:
        tokenizer = beside / HUB / "tokenizer.json"
        choices = [f"model={models[0].stem}"]
        choices += [f"data.tokenizer='{tokenizer}'"] if tokenizer.is_file() else []
        return Saved(checkpoint, beside, choices=tuple(choices))
    return Saved(checkpoint)
