"""Checks of the model, which is built once on the meta device: some errors show only in its modules and their names."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megastack.config.convert import InvalidValueError, replace_values, value_of
from megastack.config.fields import keys
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import RecomputeOptions, TrainConfig
from megastack.errors import ConfigError, MegastackError, Violation
from megastack.gradients.parameter_groups import check_patterns
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.decoder import Decoder
from megastack.models.factories import import_target
from megastack.models.recompute import recompute_blocks_
from megastack.placement.module import buffer_placements_of, check_buffers, placements_of
from megastack.preflight.errors import ErrorCollector

LAYERS = ("model.attention", "model.mlp", "model.block")
STAND_INS = {"model.vocab": 256, "batch.sequence_length": 1, "model.max_positions": None}
"""Replacements for invalid keys; a model's names and placements do not depend on the values of these keys."""
BUILT_FROM = tuple(key.name for key in keys(TrainConfig) if key.name.startswith("model.") and key.name not in STAND_INS)
"""The keys that must be valid for the model to be built."""


@dataclass(frozen=True)
class ModelShapes:
    """The global shapes of a model's parameters and persistent buffers, by name."""

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]

    @property
    def all(self) -> dict[str, tuple[int, ...]]:
        """Shapes of parameters and buffers together."""
        return {**self.parameters, **self.buffers}


def check_mesh(config: TrainConfig, errors: ErrorCollector, world_size: int | None = None) -> MeshShape | None:
    """Return the mesh shape of the parallel degrees; None if a key of ``parallel`` is invalid."""
    return errors.check(lambda: mesh_shape(config, world_size), "parallel")


def check_model(config: TrainConfig, errors: ErrorCollector, shape: MeshShape | None) -> ModelShapes | None:
    """Build the whole model once, on one rank and the meta device, and check its modules and names.

    Args:
        config: the configuration, as far as it could be read.
        errors: collects the errors.
        shape: the mesh that the model is trained on; None skips the check that ZeRO can shard its parameters.

    Returns:
        Its shapes; None if it cannot be built or a size in it is unknown.
    """
    before = len(errors.found)
    for key in LAYERS:
        errors.check(partial(_find_layer, config, key), key)
    if len(errors.found) > before:
        return None
    model = errors.check(lambda: _model(config, errors), *BUILT_FROM)
    if model is None:
        return None
    placements = errors.check(lambda: placements_of(model))
    names = {name for name, _ in model.named_parameters()}
    errors.check(lambda: _check_freeze(config.optim.freeze, names), "optim.freeze")
    errors.check(lambda: _check_groups(config, names), "optim.groups")
    errors.check(lambda: _check_recompute(config.recompute, model), "recompute")
    if shape is not None:
        errors.check(lambda: _check_scalars(config, model, shape), "parallel")
    if placements is None:
        return None
    errors.check(lambda: check_buffers(model))
    if errors.any_invalid(*STAND_INS):
        return None
    buffers = {name: placement.shape for name, placement in buffer_placements_of(model).items()}
    return ModelShapes({name: placement.shape for name, placement in placements.items()}, buffers)


def _find_layer(config: TrainConfig, key: str) -> None:
    if (spec := value_of(config, key)) is not None:
        import_target(key, spec)


def _model(config: TrainConfig, errors: ErrorCollector) -> Decoder | None:
    """Build the model; None if a bug prevents this, which the ranks then report with a traceback."""
    values = {key: value for key, value in STAND_INS.items() if errors.any_invalid(key)}
    config = replace_values(config, values | {"recompute": RecomputeOptions()})
    try:
        with torch.device("meta"):
            return Decoder(config, Mesh.single())
    except (MegastackError, InvalidValueError):
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("left to the ranks: %s", error)
        return None


def _check_groups(config: TrainConfig, names: set[str]) -> None:
    check_patterns("optim.groups", [group.pattern for group in config.optim.groups], names)


def _check_freeze(patterns: Sequence[str], names: set[str]) -> None:
    check_patterns("optim.freeze", patterns, names)
    if all(any(re.search(pattern, name) for pattern in patterns) for name in names):
        advice = ("patterns that leave some to train",)
        raise ConfigError.of([Violation("optim.freeze", patterns, "freezes every parameter", advice)])


def _check_recompute(options: RecomputeOptions, model: Decoder) -> None:
    blocks = dict(model.blocks.items())
    recompute_blocks_(blocks, options.mode, options.pattern, layers=len(blocks))


def _check_scalars(config: TrainConfig, model: Decoder, shape: MeshShape) -> None:
    """Check that no parameter is a scalar under ZeRO levels 2 and 3, which shard every parameter."""
    zero = config.parallel.zero
    if zero.stage < 2 or (zero.shard_size or shape.dp * shape.cp) == 1:
        return
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
        rule = f"{', '.join(scalars)}: a scalar cannot be cut over data ranks"
        raise ConfigError.of([Violation("parallel.zero.stage", zero.stage, rule, (0, 1, "declare it with shape (1,)"))])
