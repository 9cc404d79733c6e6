"""The cost of a decoder, from its configuration alone: parameters, static bytes, FLOPs, and costs for the split over
stages.

Everything here adds up the specs of the layers (:mod:`megastack.models.specs`) and imports no torch, so that ``show``
and the planner describe a 405-billion-parameter model in milliseconds. A model consists of three kinds of **unit**: the
embedding (with learned positions), a block, and the head (final norm and output projection). :func:`stage_placements`
lists the parameters of a stage with the placements that the built modules declare, so counts are exact, padding, kv
copies and tied copies included.

**FLOPs.** A multiply-add counts as 2; the backward costs twice the forward; recomputation is not counted. Embedding
lookups, norms, activations and the softmax count as 0; kv heads are counted at their actual number. Attention scores
follow one of two conventions: *causal* counts the half that causal attention needs, *full* counts all S × S. **MFU uses
causal**, the lower figure. For full, as in the papers on PaLM and Megatron-LM, pass ``causal=False``. Both count whole
rows: packed documents take less work, which depends on the data and is not deducted.

Not included: activations (:mod:`megastack.models.activations`), time, and communication.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from megastack.config.schema import TrainConfig
from megastack.layers.spec import LayerSpec
from megastack.mesh.shape import MeshShape
from megastack.models.specs import decoder_spec
from megastack.placement.boxes import local_shape
from megastack.placement.placement import Placement

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
ELEMENT_FLOPS = 16
"""FLOPs of a matrix product in the time of one element of an element-wise pass; a rough estimate for the split."""


def stage_placements(config: TrainConfig, layers: range, *, embedding: bool, head: bool) -> dict[str, Placement]:
    """The parameters of a stage by global name, with the placements that the built modules declare.

    Args:
        config: the run; its ``parallel.tp`` determines the number of copies of a kv group.
        layers: global numbers of the stage's blocks.
        embedding: whether the stage holds the embedding.
        head: whether the stage holds the head.
    """
    tp = config.parallel.tp
    return decoder_spec(config, tp).stage_placements(layers, embedding=embedding, head=head, tp=tp)


@dataclass(frozen=True)
class UnitParameters:
    """Logical parameters of each kind of unit; the projection of a tied head counts as 0."""

    embedding: int
    block: int
    head: int


def unit_parameters(config: TrainConfig) -> UnitParameters:
    """Parameters of the embedding, one block and the head, without padding or copies."""
    embedding = _numel(stage_placements(config, range(0), embedding=True, head=False).values())
    both = _numel(stage_placements(config, range(0), embedding=True, head=True).values())
    block = _numel(stage_placements(config, range(1), embedding=False, head=False).values())
    return UnitParameters(embedding, block, both - embedding)


def total_parameters(config: TrainConfig) -> int:
    """Parameters of the model, each element once: no padding, no copies, a tied matrix once."""
    units = unit_parameters(config)
    return units.embedding + config.model.layers * units.block + units.head


def rank_parameters(config: TrainConfig, layers: range, *, embedding: bool, head: bool) -> int:
    """Elements that one rank allocates for a stage: its shards with padding, replicas, kv copies and the tied copy."""
    return sum(_local(config, stage_placements(config, layers, embedding=embedding, head=head)).values())


def _numel(placements: Iterable[Placement]) -> int:
    return sum(placement.numel for placement in placements)


def _local(config: TrainConfig, placements: Mapping[str, Placement]) -> dict[str, int]:
    shape = MeshShape(tp=config.parallel.tp)
    return {name: prod(local_shape(placement, shape)) for name, placement in placements.items()}


@dataclass(frozen=True)
class StaticBytes:
    """Bytes that a rank holds during the whole run."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.parameters + self.gradients + self.optimizer


def static_bytes(config: TrainConfig, layers: range, *, embedding: bool, head: bool) -> StaticBytes:
    """Weights, gradients and optimizer state (main parameters and moments) of one rank for a stage.

    ZeRO-1 divides the optimizer state by the number of ranks that share it, ``parallel.zero.shard_size`` or dp·cp.
    ZeRO-2 and 3 hold one full-precision shard of everything; blocks gathered for use are not included.
    """
    local = _local(config, stage_placements(config, layers, embedding=embedding, head=head))
    parts = [_bytes_of(config, name, count) for name, count in local.items()]
    parameters, gradients, optimizer = (sum(column) for column in zip(*parts, strict=True)) if parts else (0, 0, 0)
    zero, shards = config.parallel.zero.stage, _optimizer_shards(config)
    if zero >= 2:
        parameters, gradients = -(-parameters // shards), -(-gradients // shards)
    return StaticBytes(parameters, gradients, -(-optimizer // shards) if zero else optimizer)


def _optimizer_shards(config: TrainConfig) -> int:
    return config.parallel.zero.shard_size or (config.parallel.dp or 1) * config.parallel.cp


def _bytes_of(config: TrainConfig, name: str, count: int) -> tuple[int, int, int]:
    """Weight, gradient and optimizer bytes of ``count`` elements of a parameter."""
    precision, optim = config.precision, config.optim
    compute = BYTES[precision.compute]
    if config.parallel.zero.stage >= 2 or any(re.search(pattern, name) for pattern in precision.keep_fp32):
        compute = max(compute, 4)
    if any(re.search(pattern, name) for pattern in optim.freeze):
        return count * compute, 0, 0
    wide = max(compute, 4)
    gradient = max(wide, BYTES[precision.reduce]) if precision.reduce else wide
    moments = 2 if optim.name == "adamw" else int(optim.momentum > 0)
    main = wide if compute < wide else 0
    return count * compute, count * gradient, count * (moments * wide + main)


def flops_per_token(config: TrainConfig, *, causal: bool = True) -> int:
    """Model FLOPs of a training step (forward and backward) per token, with the attention convention above."""
    spec, sequence = decoder_spec(config), config.batch.sequence_length
    return 3 * (spec.layers * spec.block.flops(sequence, causal=causal) + spec.head.flops(sequence))


@dataclass(frozen=True)
class UnitCosts:
    """Costs relative to a block: ``first`` is the embedding, ``last`` the head with the loss."""

    first: float
    last: float
    block: float = 1.0


def unit_costs(config: TrainConfig) -> UnitCosts:
    """Costs of the units for the split of layers over stages.

    Matrix products count by FLOPs, element-wise passes by elements times :data:`ELEMENT_FLOPS`.
    """
    spec, sequence = decoder_spec(config), config.batch.sequence_length
    units: list[list[LayerSpec]] = [[spec.embedding], [spec.block], [spec.norm, spec.head]]
    first, block, last = (
        sum(layer.flops(sequence) + ELEMENT_FLOPS * layer.elements for layer in layers) for layers in units
    )
    return UnitCosts(first / block, last / block)
