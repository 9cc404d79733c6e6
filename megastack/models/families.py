"""Factories for the layers of a decoder: Llama- and Qwen-like, GPT-2-like, and users' own.

``model.family`` names a convention; the layers follow from the other keys alone (norm, bias, activation, positions,
tied, …), so any mixture works. Configuration ends here: layers and blocks get plain arguments and a mesh, and classes
named by ``_target_`` get the same arguments as the classes they replace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from torch import nn

from megastack.config.schema import ModelOptions
from megastack.layers.attention import ParallelAttention
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import LayerNorm, RMSNorm
from megastack.layers.rope import Rope
from megastack.layers.spec import LayerSpec
from megastack.mesh.mesh import Mesh
from megastack.models.block import Block
from megastack.models.specs import DecoderSpec
from megastack.models.targets import layer_factory
from megastack.placement.module import ParallelModule

NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


def rope_of(model: ModelOptions, spec: DecoderSpec) -> Rope | None:
    """The rotary frequencies of the model, None where positions are learned."""
    if not spec.block.attention.rotary:
        return None
    options = model.rope
    return Rope(
        spec.block.attention.width,
        theta=options.theta,
        scaling=options.scaling.value,
        factor=options.factor,
        low_freq_factor=options.low_freq_factor,
        high_freq_factor=options.high_freq_factor,
        original_max_positions=options.original_max_positions,
    )


def norm_factory(spec: DecoderSpec, mesh: Mesh) -> Callable[[], ParallelModule]:
    """Builds a norm over the hidden states."""
    return partial(NORMS[spec.norm.norm].from_spec, spec.norm, mesh)


def attention_factory(model: ModelOptions, spec: DecoderSpec, mesh: Mesh) -> Callable[[], nn.Module]:
    """Builds an attention layer: the built-in one or ``model.attention``."""
    documented = ("kv_groups", "head_dim", "qk_norm", "bias", "sequence_parallel")
    return partial(
        layer_factory("model.attention", model.attention, ParallelAttention),
        model.hidden,
        model.heads,
        mesh,
        rope=rope_of(model, spec),
        **_arguments(spec.block.attention, documented, without=("hidden", "heads", "rotary")),
    )


def mlp_factory(model: ModelOptions, spec: DecoderSpec, mesh: Mesh) -> Callable[[], nn.Module]:
    """Builds an MLP: the built-in one or ``model.mlp``."""
    documented = ("activation", "bias", "sequence_parallel")
    return partial(
        layer_factory("model.mlp", model.mlp, ParallelMLP),
        model.hidden,
        model.ffn,
        mesh,
        **_arguments(spec.block.mlp, documented, without=("hidden", "ffn")),
    )


def _arguments(spec: LayerSpec, documented: Sequence[str], *, without: Sequence[str]) -> dict[str, Any]:
    """The fields of a spec as keyword arguments; those that are not documented as extras with their neutral values."""
    given = {name: getattr(spec, name) for name in documented}
    others = [each for each in fields(spec) if each.name not in (*documented, *without)]  # type: ignore[arg-type]
    return given | {"extras": {each.name: (getattr(spec, each.name), each.default) for each in others}}


def block_factory(model: ModelOptions, spec: DecoderSpec, mesh: Mesh) -> Callable[..., nn.Module]:
    """Builds the block of global number ``layer``: the built-in one or ``model.block``."""
    return partial(
        layer_factory("model.block", model.block, Block),
        model.hidden,
        mesh,
        attention=attention_factory(model, spec, mesh),
        mlp=mlp_factory(model, spec, mesh),
        norm=norm_factory(spec, mesh),
        dropout=model.dropout,
        sequence_parallel=spec.norm.sequence_parallel,
    )
