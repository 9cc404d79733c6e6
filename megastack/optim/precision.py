"""The values that an optimizer really updates: the parameters, or fp32 masters of parameters in a lower precision.

A bf16 weight of 1.0 never moves by steps of 1e-3, which are below half its spacing. So parameters below fp32 have a
master copy in fp32 that takes the updates, and are rounded from it after each. Where parameters are fp32 or fp64 they
are their own masters and nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megastack.gradients.buckets import Bucket


class Master:
    """The values of one bucket as an optimizer sees them.

    Attributes:
        bucket: the bucket.
        values: what is updated, flat; the bucket's own parameters unless it is a copy.
        is_copy: whether the parameters are of a lower precision and have a master of their own.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        dtype = torch.promote_types(bucket.parameters.dtype, torch.float32)
        self.is_copy = dtype != bucket.parameters.dtype
        self.values = bucket.parameters.to(dtype)

    @property
    def gradients(self) -> Tensor:
        """The bucket's gradients, converted where they travel in another dtype."""
        return self.bucket.gradients.to(self.values.dtype)

    def publish(self) -> None:
        """Round the master into the model's parameters."""
        if self.is_copy:
            self.bucket.parameters.copy_(self.values)

    def refresh(self) -> None:
        """Take over the model's parameters, after weights were loaded into them."""
        if self.is_copy:
            self.values.copy_(self.bucket.parameters)
