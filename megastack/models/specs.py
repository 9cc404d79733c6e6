"""A decoder as a value: the specs of its layers, from the configuration alone; torch-free.

Each key ``model.*`` becomes the field of the same name of a layer's spec (:mod:`megastack.layers.spec`). The decoder is
built from these specs, and :mod:`megastack.models.profile` and :mod:`megastack.models.activations` add them up. If a
``_target_`` replaces a layer, the specs describe the built-in layer in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megastack.config.schema import ModelOptions, TrainConfig
from megastack.layers.attention_spec import AttentionSpec
from megastack.layers.mlp_spec import MLPSpec
from megastack.layers.spec import LayerSpec, LocalMicrobatch, NormSpec, SavedTensor, named, spec_of
from megastack.layers.vocabulary_spec import EmbeddingSpec, HeadSpec, LearnedPositionsSpec
from megastack.models.config import ModelConfig
from megastack.placement.placement import Normal, Placement


@dataclass(frozen=True)
class BlockSpec(LayerSpec):
    """A pre-norm block: attention and MLP, each after a norm and added to the residual stream.

    Args:
        norm: the spec of both norms.
        attention: the attention layer.
        mlp: the MLP.
        dropout: drop probability of the outputs of the two layers.
    """

    norm: NormSpec
    attention: AttentionSpec
    mlp: MLPSpec
    dropout: float = 0.0

    def placements(self, tp: int = 1) -> dict[str, Placement]:
        """The parameters of the four modules."""
        return {
            **named("attention_norm", self.norm.placements(tp)),
            **named("attention", self.attention.placements(tp)),
            **named("mlp_norm", self.norm.placements(tp)),
            **named("mlp", self.mlp.placements(tp)),
        }

    def saved(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The residual stream before each norm, the output of the norm, and the tensors saved in the layer after it."""
        found = []
        for name, stream, layer in (("attention", "input", self.attention), ("mlp", "middle", self.mlp)):
            found += norm_saved(self.norm, f"{name}_norm", stream, microbatch)
            found += [tensor.within(name) for tensor in layer.saved(microbatch)]
            found += dropout_saved(self.dropout, name, self.norm.hidden, microbatch)
        return found

    def deferred(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The inputs of the first linear layers, and the tensors that the two layers hold."""
        found = []
        for name, layer in (("attention", self.attention), ("mlp", self.mlp)):
            found.append(_hidden_states(f"{name}_norm output", self.norm.hidden, microbatch))
            found += [tensor.within(name) for tensor in layer.deferred(microbatch)]
        return found

    @property
    def matmul_parameters(self) -> int:
        """The projections of both layers."""
        return self.attention.matmul_parameters + self.mlp.matmul_parameters

    @property
    def elements(self) -> int:
        """Two norms, two additions to the residual stream, and the activation."""
        return 2 * self.norm.elements + 4 * self.norm.hidden + self.attention.elements + self.mlp.elements

    def flops(self, sequence: int, *, causal: bool = True) -> int:
        """Both layers."""
        return self.attention.flops(sequence, causal=causal) + self.mlp.flops(sequence, causal=causal)


def norm_saved(norm: NormSpec, name: str, stream: str, microbatch: LocalMicrobatch) -> list[SavedTensor]:
    """The tensor that a norm reads, its statistics, and its output, which the next layer reads."""
    rows = (microbatch.batch, microbatch.rows)
    return [
        _hidden_states(stream, norm.hidden, microbatch),
        *(tensor.within(name) for tensor in norm.statistics(name, rows, microbatch.wide)),
        _hidden_states(f"{name} output", norm.hidden, microbatch),
    ]


def dropout_saved(p: float, site: str, hidden: int, microbatch: LocalMicrobatch) -> list[SavedTensor]:
    """The mask of dropout of hidden states; a GPU computes it again."""
    shape = (microbatch.batch, microbatch.rows, hidden)
    return [SavedTensor(f"dropped behind {site}", shape, 1)] if p and microbatch.cpu else []


def _hidden_states(name: str, hidden: int, microbatch: LocalMicrobatch) -> SavedTensor:
    return SavedTensor(name, (microbatch.batch, microbatch.rows, hidden), microbatch.width)


@dataclass(frozen=True)
class DecoderSpec:
    """All layers of a decoder.

    Args:
        layers: the number of blocks.
        embedding: the token embedding.
        positions: the table of learned positions; None for rotary positions.
        block: every block.
        norm: the final norm.
        head: the output projection with the loss.
        tied: whether the output projection's weight is the embedding's.
    """

    layers: int
    embedding: EmbeddingSpec
    positions: LearnedPositionsSpec | None
    block: BlockSpec
    norm: NormSpec
    head: HeadSpec
    tied: bool

    def stage_placements(self, layers: range, *, embedding: bool, head: bool, tp: int) -> dict[str, Placement]:
        """The parameters of a stage by global name; a tied head without the embedding has a copy of its weight."""
        parts: dict[str, LayerSpec] = {}
        if embedding or (head and self.tied):
            parts["embedding"] = self.embedding
        if embedding and self.positions is not None:
            parts["positions"] = self.positions
        placements = _named(parts, tp)
        block = self.block.placements(tp) if layers else {}
        for layer in layers:
            placements |= named(f"blocks.{layer}", block)
        if head:
            placements |= _named({"norm": self.norm} | ({} if self.tied else {"head": self.head}), tp)
        return placements


def _named(parts: Mapping[str, LayerSpec], tp: int) -> dict[str, Placement]:
    return {name: each for part, spec in parts.items() for name, each in named(part, spec.placements(tp)).items()}


def attention_sizes(model: ModelOptions) -> AttentionSpec:
    """The attention layer of a model, with its sizes only."""
    return spec_of(AttentionSpec, model)


def decoder_spec(config: ModelConfig | TrainConfig, tp: int = 1) -> DecoderSpec:
    """The layers of a configuration's decoder on ``tp`` tensor-parallel ranks."""
    config = ModelConfig.of(config)
    model, init = config.model, Normal(config.model.init_std)
    shared = {"sequence_parallel": config.sequence_parallel and tp > 1}
    # Projections that add to the residual stream start smaller in deeper models (GPT-2).
    depth = math.sqrt(2 * model.layers) if model.depth_scaled_init else 1.0
    inits = {"init": init, "out_init": Normal(model.init_std / depth)}
    rotary, norm = model.positions == "rope", spec_of(NormSpec, model, norm=model.norm.value, **shared)
    attention = spec_of(
        AttentionSpec,
        model,
        rotary=rotary,
        norm_eps=model.norm_eps if model.qk_norm else AttentionSpec.norm_eps,
        **inits,
        **shared,
    )
    mlp = spec_of(MLPSpec, model, activation=model.activation.value, **inits, **shared)
    return DecoderSpec(
        layers=model.layers,
        embedding=spec_of(EmbeddingSpec, model, init=init, **shared),
        positions=None if rotary else LearnedPositionsSpec(config.max_positions, model.hidden, init=init, **shared),
        block=BlockSpec(norm, attention, mlp, model.dropout),
        norm=norm,
        head=spec_of(HeadSpec, model, init=init, chunked=config.loss.chunked, **shared),
        tied=model.tied,
    )
