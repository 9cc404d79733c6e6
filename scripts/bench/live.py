"""Peak bytes of live tensors, counted alike for any code: every storage that an operation makes or touches.

A mode sees each operation after tensor subclasses have taken themselves apart, notes the storages it meets and hears
of their end. So parameters, optimizer state, buckets, activations and temporaries all count, whoever made them, as
long as the mode was on when they came into being or were used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TAKEN_APART = (DTensor, AsyncCollectiveTensor)


class LiveBytes(TorchDispatchMode):
    """Within this mode, ``live`` is the size of all storages alive and ``peak`` its highest value."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: dict[int, Any] = {}

    def restart(self) -> None:
        """Forget the peak: what is live now is the highest so far."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, _TAKEN_APART) for kind in types):
            return NotImplemented  # the subclass goes first; its parts come here
        options: Mapping[str, Any] = kwargs or {}
        out = func(*args, **options)
        for leaf in tree_leaves((args, options, out)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and not leaf.is_meta:
                self._note(leaf)
        return out

    def _note(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            size = storage.nbytes()
            self._seen[key] = weakref.finalize(storage, self._gone, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        del self._seen[key]
