"""Factories for the layers of a decoder: built-in layers, or user-defined ones named by ``_target_``.

``model.family`` names a convention; the layers follow from the other keys alone (norm, bias, activation, positions,
tied, …), so any combination works. Layers and blocks do not see the configuration: they receive plain arguments and a
mesh.

``model.mlp={_target_: my.file.MyMLP, width: 3}`` names a class. It is called exactly as its parent would have called
the built-in one, with the other keys of the mapping as additional keyword arguments. A subclass of the built-in layer
therefore needs no constructor. There are two kinds of arguments. Arguments in the built-in layer's documented signature
are always passed; *extras* (initial values, rarely used options) are passed only to a callable that accepts them. An
extra that is set but not accepted raises an error and is never dropped.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from megastack.config.schema import ModelOptions
from megastack.errors import ConfigError, LayerError, MegastackError, counted
from megastack.layers.attention import ParallelAttention
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import LayerNorm, RMSNorm
from megastack.layers.rope import Rope
from megastack.layers.spec import LayerSpec
from megastack.mesh.mesh import Mesh
from megastack.models.block import Block
from megastack.models.specs import DecoderSpec
from megastack.placement.module import ParallelModule
from megastack.targets import import_path

NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
ADVISORY = ("init", "out_init")
"""Extras that a layer need not accept; it then chooses its own initial values."""


def rope_of(model: ModelOptions, spec: DecoderSpec) -> Rope | None:
    """The rotary frequencies of the model; None for learned positions."""
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
    """A factory that builds a norm over the hidden states."""
    return partial(NORMS[spec.norm.norm].from_spec, spec.norm, mesh)


def attention_factory(model: ModelOptions, spec: DecoderSpec, mesh: Mesh) -> Callable[[], nn.Module]:
    """A factory that builds an attention layer: the built-in one or ``model.attention``."""
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
    """A factory that builds an MLP: the built-in one or ``model.mlp``."""
    documented = ("activation", "bias", "sequence_parallel")
    return partial(
        layer_factory("model.mlp", model.mlp, ParallelMLP),
        model.hidden,
        model.ffn,
        mesh,
        **_arguments(spec.block.mlp, documented, without=("hidden", "ffn")),
    )


def _arguments(spec: LayerSpec, documented: Sequence[str], *, without: Sequence[str]) -> dict[str, Any]:
    """The fields of a spec as keyword arguments; undocumented fields become extras with their neutral values."""
    given = {name: getattr(spec, name) for name in documented}
    others = [each for each in fields(spec) if each.name not in (*documented, *without)]  # type: ignore[arg-type]
    return given | {"extras": {each.name: (getattr(spec, each.name), each.default) for each in others}}


def block_factory(model: ModelOptions, spec: DecoderSpec, mesh: Mesh) -> Callable[..., nn.Module]:
    """A factory that builds the block of global number ``layer``: the built-in one or ``model.block``."""
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


def layer_factory(key: str, spec: Any, default: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A callable that builds the layer named by ``spec``, or ``default`` if ``spec`` is None.

    The callable accepts the documented arguments, and ``extras`` as ``{name: (value, neutral value)}``.

    Raises:
        ConfigError: there is no ``_target_``, it cannot be imported, the call does not match its signature or raises
            (``LayerError``), or the result is not a module.
    """
    target = default if spec is None else import_target(key, spec)
    own = {} if spec is None else {name: value for name, value in spec.items() if name != "_target_"}

    def build(*args: Any, extras: Mapping[str, tuple[Any, Any]] | None = None, **kwargs: Any) -> nn.Module:
        given = kwargs | _accepted(key, target, extras or {}) | own
        try:
            module = target(*args, **given)
        except TypeError as error:
            names = ", ".join([counted(len(args), "positional argument"), *given])
            raise ConfigError(
                f"{key}._target_={_name(target)}: cannot be called as its parent calls it, with {names}: {error}"
            ) from error
        except MegastackError:
            raise
        except ValueError as error:
            raise ConfigError(f"{key}._target_={_name(target)}: rejects its arguments: {error}") from error
        except (Exception, SystemExit) as error:
            raise LayerError(
                f"{key}._target_={_name(target)}: cannot be built, {type(error).__name__}: {error} "
                f"({_place(error, target)})"
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"{key}._target_={_name(target)}: made a {type(module).__name__}; use a torch module")
        return module

    return build


def import_target(key: str, spec: Any) -> Callable[..., Any]:
    """The class or function that ``spec["_target_"]`` names by its dotted path."""
    path = spec.get("_target_") if isinstance(spec, Mapping) else None
    if not isinstance(path, str) or "." not in path.strip("."):
        raise ConfigError(f"{key}={spec}: must name a layer; use {key}={{_target_: my_file.MyLayer}}")
    return import_path(f"{key}._target_", path)


def _accepted(key: str, target: Callable[..., Any], extras: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    parameters = _parameters(target)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    taken = {name: value for name, (value, _) in extras.items() if takes_all or name in names}
    for name, (value, neutral) in extras.items():
        if name not in taken and name not in ADVISORY and value != neutral:
            raise ConfigError(
                f"model.{name}={value}: {key}._target_={_name(target)} does not accept it; "
                f"use {neutral}, or add `{name}` or `**kwargs` to its arguments"
            )
    return taken


def _parameters(target: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """The parameters of a callable; empty if it has no signature, as for some Python built-ins."""
    try:
        return tuple(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return ()


def _place(error: BaseException, target: Callable[..., Any]) -> str:
    """The line that raised an error: the deepest one in the target's own file, else the deepest one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(sys.modules.get(getattr(target, "__module__", "")), "__file__", None)
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def _name(target: Callable[..., Any]) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
