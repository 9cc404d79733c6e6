"""Does a call of this module run the package's own function?

Two places do less than call a module in full. Attention computes several projections of one input in one product, with
the communication of one, from the projections' parameters. Generation calls layers with the new tokens alone and takes
earlier ones from a cache. Both are right for the package's own functions and for no others, so both ask here first, and
otherwise call the module, or call it with all tokens.

The package's functions are marked with :func:`built_in`. What counts is the function that would really run: a method of
a subclass or a mixin, an attribute of the instance, a function that replaced the class's own or wraps it, and a module
of another class in the place of a built-in one are all someone else's. Hooks are looked at separately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from megastack.torch_private import MODULE_CALL, is_compiled

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
