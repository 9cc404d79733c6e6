"""Layers named in the configuration: ``model.mlp={_target_: my.file.MyMLP, width: 3}``.

A named class is called exactly as its parent would have called the built-in one, with the other keys of the mapping as
further keyword arguments. So a subclass of the built-in layer needs no constructor. There are two kinds of arguments:
those of the built-in layer's documented signature are always passed; *extras* (initial values, rarely used options) are
passed only to a callable that accepts them. An extra that is set and not accepted is an error, never dropped."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megastack.errors import ConfigError, LayerError, MegastackError, counted
from megastack.targets import import_path

ADVISORY = ("init", "out_init")
"""Extras that a layer need not accept; it then chooses its own initial values."""


def layer_factory(key: str, spec: Any, default: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A callable that builds the layer named by ``spec``, or ``default`` if ``spec`` is None.

    It takes the documented arguments, and ``extras`` as ``{name: (value, neutral value)}``.

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
            raise ConfigError(f"{key}._target_={_name(target)}: refuses its arguments: {error}") from error
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
                f"model.{name}={value}: {key}._target_={_name(target)} does not take it; "
                f"use {neutral}, or add `{name}` or `**kwargs` to its arguments"
            )
    return taken


def _parameters(target: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """The parameters of a callable; empty where it has no signature, as some built-in ones."""
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
