"""The values that an optimizer updates: the local shard of a bucket's parameters, or an fp32 copy of it.

A bf16 weight of 1.0 is never changed by steps of 1e-3, which are below half its spacing. Parameters below fp32
therefore have fp32 main parameters. The optimizer updates these, and rounds them into the parameters after each update.
Parameters in fp32 or fp64 are their own main parameters and nothing is copied.

With ``offload`` main parameters, moments and the update are in host memory: gradients are copied to the host before the
update, and parameters are copied back to the device after it. On the CPU this changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from megastack.gradients.interface import LocalShard
from megastack.placement.module import BoxView


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
    """

    def __init__(self, shard: LocalShard, *, offload: bool = False) -> None:
        self.shard = shard
        local = shard.local_parameters
        dtype = torch.promote_types(local.dtype, torch.float32)
        self.is_wider = dtype != local.dtype or shard.is_rounded
        self.values = local.to(device="cpu" if offload else local.device, dtype=dtype)
        self._is_copy = self.values is not local

    @property
    def gradients(self) -> Tensor:
        """The gradients of the shard, on the device of the values and in their dtype."""
        return self.shard.local_gradients.to(self.values)

    def parts(self, flat: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """The boxes of each parameter, by global name, in a tensor of the values' layout."""
        return self.shard.parts(flat)

    def copy_to_model(self) -> None:
        """Round the values into the parameters of the model."""
        if self._is_copy:
            self.shard.local_parameters.copy_(self.values)

    def copy_from_model(self, names: Collection[str] | None = None) -> None:
        """Copy the parameters of the model (only ``names``, if given) into the values, after weights were loaded."""
        if not self._is_copy:
            return
        if names is None:
            self.values.copy_(self.shard.local_parameters)
            return
        model = dict(self.parts(self.shard.local_parameters))
        for name, parts in self.parts(self.values):
            if name in names:
                for (_, main), (_, used) in zip(parts, model[name], strict=True):
                    main.copy_(used)
