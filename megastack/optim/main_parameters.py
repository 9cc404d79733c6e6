"""The values that an optimizer really updates: the own slice of a bucket's parameters, or a master copy of it.

A bf16 weight of 1.0 never moves by steps of 1e-3, which are below half its spacing. So parameters below fp32 have a
master copy in fp32 that takes the updates, and are rounded from it after each. Where parameters are fp32 or fp64 they
are their own masters and nothing is copied.

Under ``offload`` masters, and with them the moments and the update, live in the host's memory: gradients come over
before the update, parameters go back after it. On the CPU that is where they are anyway, and nothing changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from megastack.gradients.interface import BoxView, Slice


def set_dtypes_(module: nn.Module, compute: torch.dtype, keep_fp32: Sequence[str]) -> None:
    """Give each parameter its dtype: ``compute``, but at least fp32 where a pattern is found in its name.

    To be called while the parameters are on the meta device and have no values that it could round.
    """
    patterns = [re.compile(pattern) for pattern in keep_fp32]
    for name, parameter in module.named_parameters():
        kept = any(pattern.search(name) for pattern in patterns)
        parameter.data = parameter.data.to(torch.promote_types(compute, torch.float32) if kept else compute)


class MainParameters:
    """The values of this rank's slice of one bucket, as an optimizer sees them.

    Attributes:
        bucket: the bucket.
        values: what is updated, flat; the slice of the bucket's own parameters unless it is a copy.
        is_wider: whether the parameters are of a lower precision, so that ``values`` hold more than they do.
    """

    def __init__(self, bucket: Slice, *, offload: bool = False) -> None:
        self.bucket = bucket
        own = bucket.local_parameters
        dtype = torch.promote_types(own.dtype, torch.float32)
        self.is_wider = dtype != own.dtype or bucket.is_rounded
        self.values = own.to(device="cpu" if offload else own.device, dtype=dtype)
        self._is_copy = self.values is not own

    @property
    def gradients(self) -> Tensor:
        """The gradients of the slice, where the values are and in their dtype."""
        return self.bucket.local_gradients.to(self.values)

    def parts(self, flat: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """What a tensor of the values' layout holds of each parameter, by global name."""
        return self.bucket.parts(flat)

    def publish(self) -> None:
        """Round the master into the slice of the model's parameters."""
        if self._is_copy:
            self.bucket.local_parameters.copy_(self.values)

    def refresh(self, names: Collection[str] | None = None) -> None:
        """Take over the model's parameters (those of ``names``), after weights were loaded into them."""
        if not self._is_copy:
            return
        if names is None:
            self.values.copy_(self.bucket.local_parameters)
            return
        used = dict(self.parts(self.bucket.local_parameters))
        for name, parts in self.parts(self.values):
            if name in names:
                for (_, own), (_, model) in zip(parts, used[name], strict=True):
                    own.copy_(model)
