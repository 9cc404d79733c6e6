"""From configuration keys to the layers of a decoder: Llama- and Qwen-like, GPT-2-like, and users' own.

``model.family`` names a convention; what is built follows from the other keys alone (norm, bias, activation,
positions, tied, …), so any mixture works. This is where a configuration ends: layers and blocks get plain arguments
and a mesh, and classes named by ``_target_`` get the same ones as those they replace."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import nn

from megastack.config.schema import TrainConfig
from megastack.layers.attention import ParallelAttention
from megastack.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import LayerNorm, RMSNorm
from megastack.layers.positions import LearnedPositions
from megastack.layers.rope import Rope
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.block import Block
from megastack.models.profile import head_dim, max_positions
from megastack.models.targets import layer_factory
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Normal

Vocabulary = TypeVar("Vocabulary", VocabParallelEmbedding, VocabParallelHead)
NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


def splits_sequence(config: TrainConfig, mesh: Mesh) -> bool:
    """Whether hidden states between the layers are split along the sequence over tp."""
    return config.parallel.sequence_parallel and mesh[Axis.TP].size > 1


def rope_of(config: TrainConfig) -> Rope | None:
    """The rotary frequencies of the model, None where positions are learned."""
    if config.model.positions != "rope":
        return None
    options = config.model.rope
    return Rope(
        head_dim(config.model),
        theta=options.theta,
        scaling=options.scaling.value,
        factor=options.factor,
        low_freq_factor=options.low_freq_factor,
        high_freq_factor=options.high_freq_factor,
        original_max_positions=options.original_max_positions,
    )


def residual_init(config: TrainConfig) -> Normal:
    """Initial values of the projections that add to the residual stream, smaller in deeper models (GPT-2)."""
    depth = math.sqrt(2 * config.model.layers) if config.model.depth_scaled_init else 1.0
    return Normal(config.model.init_std / depth)


def vocabulary_layer(kind: type[Vocabulary], config: TrainConfig, mesh: Mesh) -> Vocabulary:
    """The embedding or the output projection; alike but for their kind, so that one weight can serve as both."""
    model = config.model
    return kind(
        model.vocab,
        model.hidden,
        mesh,
        vocab_multiple=model.vocab_multiple,
        sequence_parallel=splits_sequence(config, mesh),
        init=Normal(model.init_std),
    )


def learned_positions(config: TrainConfig, mesh: Mesh) -> LearnedPositions:
    """The table of learned positions."""
    rows, init = max_positions(config), Normal(config.model.init_std)
    sequence_parallel = splits_sequence(config, mesh)
    return LearnedPositions(rows, config.model.hidden, mesh, sequence_parallel=sequence_parallel, init=init)


def norm_factory(config: TrainConfig, mesh: Mesh) -> Callable[[], ParallelModule]:
    """Builds a norm over the hidden states."""
    norm, sequence_parallel = NORMS[config.model.norm], splits_sequence(config, mesh)
    return partial(norm, config.model.hidden, mesh, eps=config.model.norm_eps, sequence_parallel=sequence_parallel)


def attention_factory(config: TrainConfig, mesh: Mesh) -> Callable[[], nn.Module]:
    """Builds an attention layer: the built-in one or ``model.attention``."""
    model = config.model
    extras = {
        "qkv_bias": (model.qkv_bias, False),
        "attention_dropout": (model.attention_dropout, 0.0),
        "norm_eps": (model.norm_eps if model.qk_norm else 1e-5, 1e-5),
        "init": (Normal(model.init_std), None),
        "out_init": (residual_init(config), None),
    }
    return partial(
        layer_factory("model.attention", model.attention, ParallelAttention),
        model.hidden,
        model.heads,
        mesh,
        kv_groups=model.kv_groups,
        head_dim=model.head_dim,
        rope=rope_of(config),
        qk_norm=model.qk_norm,
        bias=model.bias,
        sequence_parallel=splits_sequence(config, mesh),
        extras=extras,
    )


def mlp_factory(config: TrainConfig, mesh: Mesh) -> Callable[[], nn.Module]:
    """Builds an MLP: the built-in one or ``model.mlp``."""
    model = config.model
    return partial(
        layer_factory("model.mlp", model.mlp, ParallelMLP),
        model.hidden,
        model.ffn,
        mesh,
        activation=model.activation.value,
        bias=model.bias,
        sequence_parallel=splits_sequence(config, mesh),
        extras={"init": (Normal(model.init_std), None), "out_init": (residual_init(config), None)},
    )


def block_factory(config: TrainConfig, mesh: Mesh) -> Callable[..., nn.Module]:
    """Builds the block of global number ``layer``: the built-in one or ``model.block``."""
    return partial(
        layer_factory("model.block", config.model.block, Block),
        config.model.hidden,
        mesh,
        attention=attention_factory(config, mesh),
        mlp=mlp_factory(config, mesh),
        norm=norm_factory(config, mesh),
        dropout=config.model.dropout,
        sequence_parallel=splits_sequence(config, mesh),
    )
