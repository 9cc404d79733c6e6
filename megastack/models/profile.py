"""What a decoder costs, from its configuration alone: parameters, static bytes, floating point operations, split
costs.

Torch-free, so that ``show`` and the planner describe a 405-billion-parameter model in milliseconds. A model is made
of three kinds of **unit**: the embedding (with learned positions), a block, and the head (final norm and output
projection). :func:`stage_placements` lists the parameters that a stage holds, with the placements that the built
modules declare; a test holds the two equal, so counts are exact, padding, kv copies and tied copies included. Where a
``_target_`` replaces a layer, the built-in one is described in its place.

**FLOPs.** A multiplication and an addition are 2; the backward costs twice the forward; recomputation is not counted.
Embedding lookups, norms, activations and the softmax count nothing; kv heads count as they are. Attention scores
follow one of two conventions: *causal* counts the half that causal attention needs, *full* all S × S. **MFU uses
causal**: it cannot flatter. For full, as in PaLM's and Megatron-LM's papers, pass ``causal=False``.

Not here: activations (:mod:`megastack.models.activations`), time, and communication.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from megastack.config.schema import ModelOptions, TrainConfig
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import local_shape
from megastack.placement.placement import Placement, Shard

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
ELEMENT_FLOPS = 16
"""FLOPs of a matrix product in the time of one element of an element-wise pass; a rough figure, for the split only."""


def head_dim(model: ModelOptions) -> int:
    """K, the width of a head."""
    return model.head_dim or model.hidden // model.heads


def kv_groups(model: ModelOptions) -> int:
    """G, the number of key and value heads."""
    return model.kv_groups or model.heads


def padded_vocab(model: ModelOptions) -> int:
    """Rows of the embedding with padding; depends on no parallel degree."""
    return -(-model.vocab // model.vocab_multiple) * model.vocab_multiple


def max_positions(config: TrainConfig) -> int:
    """Rows of the learned position table."""
    return config.model.max_positions or config.batch.sequence_length


def stage_placements(config: TrainConfig, layers: range, *, embedding: bool, head: bool) -> dict[str, Placement]:
    """The parameters of a stage by global name: shape, padding and cut (initial values and partial axes left out).

    Args:
        config: the run; its ``parallel.tp`` decides how many copies of a kv group there are.
        layers: global numbers of the stage's blocks.
        embedding: whether the stage holds the embedding.
        head: whether it holds the head.
    """
    placements: dict[str, Placement] = {}
    if embedding or (head and config.model.tied):
        placements["embedding.weight"] = _vocabulary(config.model)
    if embedding and config.model.positions == "learned":
        placements["positions.weight"] = Placement((max_positions(config), config.model.hidden))
    block = block_placements(config)
    placements |= {f"blocks.{layer}.{name}": block[name] for layer in layers for name in block}
    if head:
        placements |= _norm("norm", config.model.hidden, config.model)
        if not config.model.tied:
            placements["head.weight"] = _vocabulary(config.model)
    return placements


def block_placements(config: TrainConfig) -> dict[str, Placement]:
    """The parameters of one block, by name within the block."""
    model, tp = config.model, config.parallel.tp
    hidden, heads, groups, width = model.hidden, model.heads, kv_groups(model), head_dim(model)
    copies = tp // groups if tp > groups else 1
    qkv_bias = model.bias or model.qkv_bias
    up = (2, model.ffn) if model.activation == "swiglu" else (model.ffn,)
    return {
        **_norm("attention_norm", hidden, model),
        **_linear("attention.q", (heads, width), hidden, Shard(0), qkv_bias),
        **_linear("attention.kv", (groups, 2, width), hidden, Shard(0, copies), qkv_bias),
        **(_scale("attention.q_norm", width) | _scale("attention.k_norm", width) if model.qk_norm else {}),
        **_linear("attention.out", (hidden,), heads * width, Shard(1), model.bias),
        **_norm("mlp_norm", hidden, model),
        **_linear("mlp.up", up, hidden, Shard(len(up) - 1), model.bias),
        **_linear("mlp.down", (hidden,), model.ffn, Shard(1), model.bias),
    }


def _linear(name: str, out: tuple[int, ...], inputs: int, shard: Shard, bias: bool) -> dict[str, Placement]:
    weight = Placement((*out, inputs), {Axis.TP: shard})
    row = shard.dim == len(out)
    offset = Placement(out, {} if row else {Axis.TP: shard})
    return {f"{name}.weight": weight, **({f"{name}.bias": offset} if bias else {})}


def _scale(name: str, width: int) -> dict[str, Placement]:
    return {f"{name}.weight": Placement((width,))}


def _norm(name: str, width: int, model: ModelOptions) -> dict[str, Placement]:
    bias = {f"{name}.bias": Placement((width,))} if model.norm == "layer" else {}
    return _scale(name, width) | bias


def _vocabulary(model: ModelOptions) -> Placement:
    padded = (padded_vocab(model), model.hidden)
    return Placement((model.vocab, model.hidden), {Axis.TP: Shard(0)}, padded_shape=padded)


@dataclass(frozen=True)
class UnitParameters:
    """Logical parameters of each kind of unit; a tied head counts its own copy of the vocabulary matrix as 0."""

    embedding: int
    block: int
    head: int


def unit_parameters(config: TrainConfig) -> UnitParameters:
    """Parameters of the embedding, one block and the head, without padding or copies."""
    embedding = _numel(stage_placements(config, range(0), embedding=True, head=False).values())
    both = _numel(stage_placements(config, range(0), embedding=True, head=True).values())
    return UnitParameters(embedding, _numel(block_placements(config).values()), both - embedding)


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
    """Bytes of a rank that stay through the run."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer


def static_bytes(config: TrainConfig, layers: range, *, embedding: bool, head: bool) -> StaticBytes:
    """Weights, gradients and optimizer state (masters and moments) of one rank for a stage.

    ZeRO-1 divides the optimizer state by the ranks that share it, ``parallel.zero.shard_size`` or dp·cp. ZeRO-2 and 3
    keep one full-precision shard of everything and are given without the blocks gathered for use.
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
    master = wide if compute < wide else 0
    return count * compute, count * gradient, count * (moments * wide + master)


def block_matmul_parameters(config: TrainConfig) -> int:
    """Weights of one block that enter a matrix product with every token."""
    matrices = (p for name, p in block_placements(config).items() if name.endswith(".weight") and "norm" not in name)
    return _numel(matrices)


def matmul_parameters(config: TrainConfig) -> int:
    """Weights that enter a matrix product with every token: all projections and the head, tied or not, unpadded."""
    model = config.model
    return model.layers * block_matmul_parameters(config) + model.vocab * model.hidden


def flops_per_token(config: TrainConfig, *, causal: bool = True) -> int:
    """Model FLOPs of a training step (forward and backward) per token, with the attention convention above."""
    return 6 * matmul_parameters(config) + 3 * config.model.layers * _attention_flops(config, causal=causal)


def _attention_flops(config: TrainConfig, *, causal: bool) -> int:
    """Forward FLOPs of one block's scores and of their product with the values, per token."""
    full = 4 * config.batch.sequence_length * config.model.heads * head_dim(config.model)
    return full // 2 if causal else full


@dataclass(frozen=True)
class UnitCosts:
    """What a unit costs in blocks: ``first`` is the embedding, ``last`` the head with the loss."""

    first: float
    last: float
    block: float = 1.0


def unit_costs(config: TrainConfig) -> UnitCosts:
    """Costs of the units for the split of layers over stages.

    Matrix products count by FLOPs, element-wise passes by elements times :data:`ELEMENT_FLOPS`.
    """
    model = config.model
    passes = 12 * model.hidden + 4 * model.ffn
    block = 2 * block_matmul_parameters(config) + _attention_flops(config, causal=True) + ELEMENT_FLOPS * passes
    first = ELEMENT_FLOPS * 2 * model.hidden
    last = 2 * model.vocab * model.hidden + ELEMENT_FLOPS * (4 * model.hidden + 4 * model.vocab)
    return UnitCosts(first / block, last / block)
