"""May generation call these modules with the new tokens alone, and take earlier ones from a cache?

It may where the package's own functions run (:mod:`megastack.layers.overrides`), and where a class says so by
``uses_cache = True``. The declaration covers the methods of that class and of the classes behind it in the order in
which Python looks methods up: a subclass or a mixin in front of it that brings a method of its own makes its own. It
does not cover hooks, nor modules inside, which are looked at one by one; torch's own modules, such as an ``nn.Linear``,
belong to the class that holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn

from megastack.layers.overrides import is_called_plainly, method_is_built_in
from megastack.torch_private import has_forward_hooks

METHODS = (
    *("forward", "attend", "activate", "_positioned", "_attend_with_dropout", "_drop"),
    *("infer", "_run", "_context", "_embed", "_logits"),
)
"""What decides about a module that has them: the methods of this package that see hidden states."""
_CONTAINERS = (nn.ModuleDict, nn.ModuleList)


def cache_obstacle(stage: nn.Module) -> str | None:
    """Why these modules need all tokens at every call: the first reason, as a sentence; None if they do not."""
    return next(_obstacles("", stage, declared=False), None)


def _obstacles(name: str, module: nn.Module, *, declared: bool) -> Iterator[str]:
    """The reasons of a module and of those inside; ``declared`` says that the module's parent says it may."""
    reason = _own_obstacle(module, declared=declared)
    if reason is not None:
        yield f"{name or 'the stage'} ({type(module).__qualname__}) {reason}"
    says = declared if _is_torchs(module) else _declaration(module)[1] is True
    for child_name, child in module.named_children():
        yield from _obstacles(f"{name}.{child_name}" if name else child_name, child, declared=says)


def _own_obstacle(module: nn.Module, *, declared: bool) -> str | None:
    if type(module) in _CONTAINERS:
        return None
    if has_forward_hooks(module):
        return "has forward hooks"
    place, says = _declaration(module)
    if says is False:
        return "says uses_cache = False"
    if _is_torchs(module):
        own = not declared or "forward" in vars(module) or not is_called_plainly(module)
        return "is a module of torch in a layer that does not say uses_cache = True" if own else None
    if says is None and not is_called_plainly(module):
        return "is called in a way of its own"
    for method in filter(partial(hasattr, module), METHODS):
        covered = says is True and place <= _defined_at(module, method)
        if not covered and not method_is_built_in(module, method):
            return f"has a `{method}` of its own and does not say uses_cache = True"
    return None


def _declaration(module: nn.Module) -> tuple[int, bool | None]:
    """Where in the order of look-up ``uses_cache`` is said, and what; the instance itself comes before all classes."""
    if "uses_cache" in vars(module):
        return -1, bool(vars(module)["uses_cache"])
    place = _first_class(module, "uses_cache")
    kinds = type(module).__mro__
    return place, bool(vars(kinds[place])["uses_cache"]) if place < len(kinds) else None


def _defined_at(module: nn.Module, method: str) -> int:
    """Where in the order of look-up the method is found."""
    return -1 if method in vars(module) else _first_class(module, method)


def _first_class(module: nn.Module, name: str) -> int:
    kinds = type(module).__mro__
    return next((place for place, kind in enumerate(kinds) if name in vars(kind)), len(kinds))


def _is_torchs(module: nn.Module) -> bool:
    """Whether torch's own ``forward`` would run, or one that was set on a module of torch."""
    kinds, place = type(module).__mro__, _first_class(module, "forward")
    return kinds[place].__module__.split(".")[0] == "torch"
