"""The gradients of the weights and biases of a product, computed when they are accumulated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megastack.comm.collectives import Pending, start_all_gather
from megastack.comm.group import AxisGroup
from megastack.layers.autocast import autocast_off
from megastack.layers.kernels import add_product_

SEQUENCE_DIM = -2


def rows_of(x: Tensor) -> Tensor:
    """``(…, features)`` as ``(tokens, features)``; a single row if there is no other dim."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def matrix_of(weight: Tensor) -> Tensor:
    """A weight ``(*out, in)``, or its gradient, as ``(outputs, in)``."""
    return weight if weight.dim() == 2 else weight.flatten(0, -2)


class ProductInput:
    """The input of weight-gradient products, gathered along the sequence if a group is given.

    Only this rank's slice is kept until the gather.
    """

    def __init__(self, x: Tensor | None, group: AxisGroup | None = None) -> None:
        self._x, self._group = x, group
        self._whole: Pending | None = None

    def begin(self) -> None:
        """Start the gather; further calls do nothing."""
        if self._whole is None and self._group is not None and self._x is not None:
            self._whole = start_all_gather(self._x, self._group, SEQUENCE_DIM)

    def rows(self) -> Tensor:
        """``(tokens, in)``."""
        if self._group is not None:
            self.begin()
        x = self._x if self._whole is None else self._whole.wait()
        assert x is not None, "no weight needs a gradient"
        return rows_of(x)


@dataclass(eq=False, slots=True)
class WeightProduct:
    """The gradient of a weight, ``grad.T @ input``, from the output gradient ``(tokens, outputs)``."""

    grad_TO: Tensor
    source: ProductInput
    shape: torch.Size

    def begin(self) -> None:
        """Start the communication that the product needs."""
        self.source.begin()

    def gradient(self) -> Tensor:
        """``(*out, in)``."""
        with autocast_off(self.grad_TO):
            return (self.grad_TO.T @ self.source.rows()).view(self.shape)

    def add_to(self, gradient: Tensor) -> None:
        """Accumulate without a temporary tensor for the product."""
        add_product_(matrix_of(gradient), self.grad_TO.T, self.source.rows())


@dataclass(eq=False, slots=True)
class BiasSum:
    """The gradient of a bias, the sum of output gradients ``(tokens, outputs)``, in at least fp32."""

    grad_TO: Tensor
    shape: torch.Size

    def begin(self) -> None:
        """Does nothing: no data is needed from other ranks."""

    def gradient(self) -> Tensor:
        """``(*out)``."""
        total = self.grad_TO.sum(0, dtype=torch.promote_types(self.grad_TO.dtype, torch.float32))
        return total.view(self.shape)

    def add_to(self, gradient: Tensor) -> None:
        """Add the sum."""
        gradient.add_(self.gradient())
