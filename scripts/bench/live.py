"""Peak bytes of live tensors, in the same way for any code: every storage that an operation creates or uses.

A dispatch mode sees each operation after tensor subclasses have unwrapped themselves, records the storages of its
tensors, and is notified when they are freed. A storage that is emptied and filled again, as FSDP2 does with unsharded
parameters, counts with its size at the time. Parameters, optimizer state, buckets, activations and temporaries are all
counted if they were created or used within the mode.
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

_UNWRAPPED_LATER = (DTensor, AsyncCollectiveTensor)


class LiveBytes(TorchDispatchMode):
    """A mode that tracks the size of all live storages in ``live``, and its maximum in ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._finalizers: dict[int, Any] = {}
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
        """Reset the peak to the present size."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, _UNWRAPPED_LATER) for kind in types):
            return NotImplemented  # the subclass unwraps itself first
        options: Mapping[str, Any] = kwargs or {}
        out = func(*args, **options)
        for leaf in tree_leaves((args, options, out)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and not leaf.is_meta:
                self._track(leaf)
        return out

    def _track(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._finalizers:
            self._finalizers[key] = weakref.finalize(storage, self._freed, key)
            self._set(key, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._finalizers:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._finalizers[key]
