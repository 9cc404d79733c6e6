"""Detects whether a call of a module runs the package's own function or a user's override.

Two shortcuts are correct only for the package's own functions. Attention computes several projections of one input in
one product, from the projections' parameters, instead of calling each module. Generation calls layers with only the new
tokens and reads earlier ones from a cache. Both check this module first, and otherwise call the module in full.

The package's functions are marked with :func:`built_in`. The check inspects the function that would run. A method of a
subclass or a mixin, an attribute of the instance, a function that replaces or wraps the class's own, and a module of
another class in place of a built-in one are all overrides. Hooks are checked separately.

Generation may use a cache of earlier tokens (:func:`cache_obstacle`) if the package's own functions run, or if a class
sets ``uses_cache = True``. The declaration covers the methods of that class and of the classes after it in the method
resolution order; a subclass or mixin before it that overrides a method needs its own declaration. It covers neither
hooks nor submodules, which are checked separately. torch's own modules, such as an ``nn.Linear``, are treated as part
of the class that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from megastack.torch_private import MODULE_CALL, has_forward_hooks, is_compiled

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MARK = "_megastack_built_in"


def built_in(function: _Function) -> _Function:
    """Mark a method of the package.

    A marked method may be replaced by an equivalent computation. With a cache of earlier tokens it computes the same
    for new tokens as for the whole row. ``functools.wraps`` copies the mark to a wrapper, where it is ignored.
    """
    setattr(function, _MARK, function.__code__)
    return function


def is_built_in(function: Any) -> bool:
    """Whether a function is marked, other than by ``functools.wraps``."""
    mark = getattr(function, _MARK, None)
    return mark is not None and mark is getattr(function, "__code__", None)


def runs_built_in(module: nn.Module, *methods: str) -> bool:
    """Whether a call of the module runs the package's own methods, apart from hooks."""
    return is_called_plainly(module) and all(method_is_built_in(module, name) for name in methods)


def method_is_built_in(module: nn.Module, name: str) -> bool:
    """Whether this method of the module is currently the package's own."""
    return name not in vars(module) and is_built_in(getattr(type(module), name, None))


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of the module runs its ``forward`` through torch's own ``__call__``."""
    kind, own = type(module), vars(module)
    for name, function in MODULE_CALL.items():
        if name in own or getattr(kind, name) is not function:
            return False
    return not is_compiled(module)


def through_forward_hooks(module: nn.Module, x: Tensor, output: Tensor) -> Any:
    """The result of ``module(x)`` with its hooks, given that its ``forward`` computes ``output`` from ``x``.

    If a hook replaces the input, ``forward`` runs on the new input.
    """
    forward = module.forward

    def known(given: Tensor) -> Any:
        return output if given is x else forward(given)

    module.forward = known
    try:
        return module(x)
    finally:
        del module.forward


METHODS = (
    *("forward", "attend", "activate", "_positioned", "_attend_with_dropout", "_drop"),
    *("infer", "_run", "_context", "_embed", "_logits"),
)
"""The methods of this package that receive hidden states; a module's own methods among them are checked."""
_CONTAINERS = (nn.ModuleDict, nn.ModuleList)


def cache_obstacle(stage: nn.Module) -> str | None:
    """The first reason why these modules need all tokens at every call, as a sentence; None if there is none."""
    return next(_obstacles("", stage, declared=False), None)


def _obstacles(name: str, module: nn.Module, *, declared: bool) -> Iterator[str]:
    """The reasons of a module and its submodules; ``declared`` is whether the parent's class sets ``uses_cache``."""
    reason = _own_obstacle(module, declared=declared)
    if reason is not None:
        yield f"{name or 'the stage'} ({type(module).__qualname__}) {reason}"
    covers = declared if _is_torch_class(module) else _declaration(module)[1] is True
    for child_name, child in module.named_children():
        yield from _obstacles(f"{name}.{child_name}" if name else child_name, child, declared=covers)


def _own_obstacle(module: nn.Module, *, declared: bool) -> str | None:
    if type(module) in _CONTAINERS:
        return None
    if has_forward_hooks(module):
        return "has forward hooks"
    place, declares = _declaration(module)
    if declares is False:
        return "sets uses_cache = False"
    if _is_torch_class(module):
        own = not declared or "forward" in vars(module) or not is_called_plainly(module)
        return "is a torch module in a layer that does not set uses_cache = True" if own else None
    if declares is None and not is_called_plainly(module):
        return "overrides torch's __call__"
    for method in filter(partial(hasattr, module), METHODS):
        covered = declares is True and place <= _defined_at(module, method)
        if not covered and not method_is_built_in(module, method):
            return f"overrides `{method}` and does not set uses_cache = True"
    return None


def _declaration(module: nn.Module) -> tuple[int, bool | None]:
    """The index in the resolution order at which ``uses_cache`` is set, and its value; -1 is the instance itself."""
    if "uses_cache" in vars(module):
        return -1, bool(vars(module)["uses_cache"])
    place = _first_class(module, "uses_cache")
    kinds = type(module).__mro__
    return place, bool(vars(kinds[place])["uses_cache"]) if place < len(kinds) else None


def _defined_at(module: nn.Module, method: str) -> int:
    """The index in the resolution order at which the method is defined."""
    return -1 if method in vars(module) else _first_class(module, method)


def _first_class(module: nn.Module, name: str) -> int:
    kinds = type(module).__mro__
    return next((place for place, kind in enumerate(kinds) if name in vars(kind)), len(kinds))


def _is_torch_class(module: nn.Module) -> bool:
    """Whether the class is one of torch's, whose ``forward`` may be replaced on the instance."""
    kinds, place = type(module).__mro__, _first_class(module, "forward")
    return kinds[place].__module__.split(".")[0] == "torch"
