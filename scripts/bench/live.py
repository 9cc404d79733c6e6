"""Peak bytes of live tensors, counted alike for any code: every storage that an operation makes or touches.

A mode sees each operation after tensor subclasses have taken themselves apart, notes the storages it meets and hears
of their end. Storages that are emptied and filled again, as FSDP2's whole parameters are, count with the size that they
have at the time. So parameters, optimizer state, buckets, activations and temporaries all count, whoever made them, as
long as the mode was on when they came into being or were used.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

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
        self._sizes: dict[int, int] = {}
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> LiveBytes:
        resize, note = torch.UntypedStorage.resize_, self._resized

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            note(storage)
            return storage

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()

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
            self._seen[key] = weakref.finalize(storage, self._gone, key)
            self._set(key, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._seen[key]
