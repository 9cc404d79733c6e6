"""The buffers of a module that is recomputed: its second run sees what its first run saw, and leaves no trace.

A layer may update a buffer in its forward (a running mean). Run again for the backward, it would update it twice, and
compute with values that its first run, or other microbatches since, have changed. So the first run notes the values of
every buffer, and the second runs on copies of these, which are dropped afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from megastack.torch_private import buffers_of, version_of

_COPIES = "_recompute_copies"
"""The attribute of a module that holds the last copy of each of its buffers, with the buffer and version it is of."""


class KeptBuffers:
    """The values of a module's buffers when it is made.

    A copy serves all runs between two changes of a buffer, so an unchanged buffer is copied once. Changes are seen
    by torch's version counter, which a write through ``.data`` leaves alone.

    Args:
        function: a method of the module as ``functools.partial`` binds it; any other function has no buffers here.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        owner = function.args[0] if isinstance(function, partial) and function.args else None
        modules = owner.modules() if isinstance(owner, nn.Module) else ()
        self._kept = [
            (module, name, _copy_of(module, name, buffer))
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Let the module have copies of the values as they were, and afterwards its own buffers again."""
        now = [(module, name, buffers_of(module)[name]) for module, name, _ in self._kept]
        for module, name, copy in self._kept:
            buffers_of(module)[name] = copy.clone()
        try:
            yield
        finally:
            for module, name, buffer in now:
                buffers_of(module)[name] = buffer


def _copy_of(module: nn.Module, name: str, buffer: Tensor) -> Tensor:
    """The last copy of a buffer if that has not changed since, else a new one."""
    copies: dict[str, tuple[ref[Tensor], int, Tensor]] = module.__dict__.setdefault(_COPIES, {})
    last = copies.get(name)
    if last is None or last[0]() is not buffer or last[1] != version_of(buffer):
        last = copies[name] = ref(buffer), version_of(buffer), buffer.detach().clone()
    return last[2]
