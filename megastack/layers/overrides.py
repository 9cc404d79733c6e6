"""Does a call of this module run the package's own function?

Two places do less than call a module in full. Attention computes several projections of one input in one product, with
the communication of one, from the projections' parameters. Generation calls layers with the new tokens alone and takes
earlier ones from a cache. Both are right for the package's own functions and for no others, so both ask here first, and
otherwise call the module, or call it with all tokens.

The package's functions are marked with :func:`built_in`. What counts is the function that would really run: a method of
a subclass or a mixin, an attribute of the instance, a function that replaced the class's own or wraps it, and a module
of another class in the place of a built-in one are all someone else's. Hooks are looked at separately.

Generation may use a cache of earlier tokens (:func:`cache_obstacle`) where the package's own functions run, and where a
class says so by ``uses_cache = True``. The declaration covers the methods of that class and of the classes behind it in
the method resolution order: a subclass or a mixin in front of it that brings a method of its own makes its own
declaration. It covers neither hooks nor submodules, which are checked one by one; torch's own modules, such as an
``nn.Linear``, belong to the class that holds them.
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

    The mark says that others may compute what it computes without calling it, and that it gives each new token the
    same with the cache of earlier tokens as in the whole row. ``functools.wraps`` copies the mark to a wrapper, where
    it does not count.
    """
    setattr(function, _MARK, function.__code__)
    return function


def is_built_in(function: Any) -> bool:
    """Whether a function carries a mark of its own."""
    mark = getattr(function, _MARK, None)
    return mark is not None and mark is getattr(function, "__code__", None)


def runs_built_in(module: nn.Module, *methods: str) -> bool:
    """Whether a call of the module runs the package's own methods, hooks apart."""
    return is_called_plainly(module) and all(method_is_built_in(module, name) for name in methods)


def method_is_built_in(module: nn.Module, name: str) -> bool:
    """Whether this method of the module, as it would be found now, is the package's own."""
    method = getattr(module, name, None)
    return getattr(method, "__self__", None) is module and is_built_in(getattr(method, "__func__", None))


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of the module goes to its ``forward`` in torch's way."""
    kind = type(module)
    return not is_compiled(module) and all(
        getattr(kind, name) is function and name not in vars(module) for name, function in MODULE_CALL.items()
    )


def through_forward_hooks(module: nn.Module, x: Tensor, output: Tensor) -> Any:
    """What ``module(x)`` returns where its ``forward`` would compute ``output`` from ``x``.

    If a hook gives ``forward`` another input, it computes the output from that.
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
