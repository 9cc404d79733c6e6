"""The values that an optimizer updates: the local shard of a bucket's parameters, or an fp32 copy of it.

A bf16 weight of 1.0 is never changed by steps of 1e-3, which are below half its spacing. Parameters below fp32
therefore have fp32 main parameters. The optimizer updates these, and rounds them into the parameters after each update.
Parameters in fp32 or fp64 are their own main parameters and nothing is copied.

Main parameters may be offloaded to host memory, and with them moments and the update. Gradients are copied to the host
before the update and parameters back to the device after it. The gradients of all shards start to move when a step
begins. The host then waits for one shard at a time, updates it, and starts its copy back while the gradients of the
next ones arrive (Ren et al. 2021, ZeRO-Offload).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megastack.gradients.interface import LocalShard
from megastack.placement.module import BoxView
from megastack.torch_private import foreach_copy_


def set_dtypes_(module: nn.Module, compute: torch.dtype, keep_fp32: Sequence[str]) -> None:
    """Set the dtype of each parameter: ``compute``, but at least fp32 if a pattern matches its name.

    Call it while the parameters are on the meta device and have no values that rounding could change.
    """
    patterns = [re.compile(pattern) for pattern in keep_fp32]
    for name, parameter in module.named_parameters():
        kept = any(pattern.search(name) for pattern in patterns)
        parameter.data = parameter.data.to(torch.promote_types(compute, torch.float32) if kept else compute)


class MainParameters:
    """The main parameters of one local shard.

    Attributes:
        shard: the local shard.
        values: the flat values that are updated: the shard's own parameters, or a copy.
        is_wider: whether modules use the parameters in a lower precision, so that ``values`` are more precise.
        is_copy: whether ``values`` is a copy.
    """

    def __init__(self, shard: LocalShard) -> None:
        self.shard = shard
        local = shard.local_parameters
        dtype = torch.promote_types(local.dtype, torch.float32)
        self.is_wider = dtype != local.dtype or shard.is_rounded
        self.values = local.to(dtype)
        self.is_copy = self.values is not local

    def start_gradients(self) -> None:
        """Start to move the gradients to the device of the values."""

    @property
    def gradients(self) -> Tensor:
        """The gradients of the shard, on the device of the values and in their dtype."""
        return self.shard.local_gradients.to(self.values.dtype)

    def to_model(self) -> Tensor:
        """The values as they are copied into the parameters of the model, in any dtype."""
        return self.values

    def parts(self, flat: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """The boxes of each parameter, by global name, in a tensor of the values' layout."""
        return self.shard.parts(flat)

    def copy_from_model(self, names: Collection[str] | None = None) -> None:
        """Copy the parameters of the model (only ``names``, if given) into the values, after weights were loaded."""
        if not self.is_copy:
            return
        if names is None:
            self.values.copy_(self.shard.local_parameters)
            return
        model = dict(self.parts(self.shard.local_parameters))
        for name, parts in self.parts(self.values):
            if name in names:
                for (_, main), (_, used) in zip(parts, model[name], strict=True):
                    main.copy_(used)


def copy_to_model(main: Sequence[MainParameters]) -> None:
    """Round the values of these shards into the parameters of the model, with one operation."""
    copied = [each for each in main if each.is_copy]
    foreach_copy_([each.shard.local_parameters for each in copied], [each.to_model() for each in copied])


class Arrival(Protocol):
    """A copy in progress."""

    def synchronize(self) -> None:
        """Block the host until the copy is complete."""


class HostMemory(Protocol):
    """Host memory for offloaded shards, and the copies into it."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat tensor."""

    def start_copy(self, target: Tensor, source: Tensor) -> Arrival:
        """Start to copy a tensor of the device into host memory, after the operations that the device has queued."""


class PinnedMemory:
    """Pinned host memory of a GPU, into which a stream of its own copies while other streams compute."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat tensor; torch rounds its size up to a power of two."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def start_copy(self, target: Tensor, source: Tensor) -> Arrival:
        """Start to copy on the stream, and return the event of its end."""
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()


class OffloadedParameters(MainParameters):
    """The main parameters of one local shard in host memory.

    The copies back to the device run on its current stream, so whatever it does next uses the new parameters. A step
    that follows waits for that stream before its gradients arrive, so staging buffers are free when they are reused.
    """

    def __init__(self, shard: LocalShard, memory: HostMemory) -> None:
        super().__init__(shard)
        self._memory, dtype = memory, shard.local_parameters.dtype
        size = self.values.numel()
        self.values = memory.empty(size, self.values.dtype).copy_(self.values)
        self.is_copy = True
        self._rounded = self.values if dtype == self.values.dtype else memory.empty(size, dtype)
        self._gradients = memory.empty(size, self.values.dtype)
        self._arrival: Arrival | None = None

    def start_gradients(self) -> None:
        """Start to copy the gradients to the host."""
        self._arrival = self._memory.start_copy(self._gradients, self.shard.local_gradients)

    @property
    def gradients(self) -> Tensor:
        """The gradients in host memory, once they have arrived."""
        assert self._arrival is not None, "start_gradients() comes first"
        self._arrival.synchronize()
        return self._gradients

    def to_model(self) -> Tensor:
        """The values in the dtype of the model's parameters, rounded on the host to halve what is copied."""
        return self._rounded if self._rounded is self.values else self._rounded.copy_(self.values)
