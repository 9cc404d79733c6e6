"""The bytes of a device that has no data: what its storages would hold, now and at most."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor


class LiveBytes:
    """Counts the bytes of storages on one device from their first use until they are freed.

    These are the bytes that tensors hold, without what an allocator adds. Storages may be resized (FSDP2 frees gathered
    parameters so), so a new peak is counted exactly.

    Attributes:
        peak: the most bytes at once since the last :meth:`reset_peak`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}
        self._live = 0
        self.peak = 0

    @property
    def live(self) -> int:
        """The bytes held now."""
        for key, (storage, counted) in list(self._storages.items()):
            found = storage()
            held = 0 if found is None else found.nbytes()
            if held != counted:
                self._live += held - counted
                self._storages[key] = storage, held
        return self._live

    def reset_peak(self) -> None:
        """Start a new peak."""
        self.peak = self.live

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that were just computed."""
        for x in tensors:
            if x.device.type == self._device.type:
                self._add(x.untyped_storage())
        if self._live > self.peak:
            self.peak = max(self.peak, self.live)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, held = id(storage), storage.nbytes()
        _, counted = self._storages.get(key, (None, 0))
        if counted == held and key in self._storages:
            return
        self._storages[key] = ref(storage, lambda _: self._free(key)), held
        self._live += held - counted

    def _free(self, key: int) -> None:
        _, counted = self._storages.pop(key, (None, 0))
        self._live -= counted
