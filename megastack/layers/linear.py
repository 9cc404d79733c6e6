"""Linear layers split over the tensor-parallel axis: by output features (column) and by input features (row).

A pair of them, column first, forms attention or an MLP with a single reduction. These modules own the parameters; the
products and their communication are in :mod:`megastack.layers.linear_ops`.

A column-parallel weight may have several output dims, one of which is split: a query weight ``(H, K, D)`` on H, a
gate-and-up weight ``(2, F, D)`` on F. The output has the same dims, so no reshape depends on the layout. With
``copies`` the split dim is divided into t / copies parts, each held by ``copies`` adjacent ranks (fewer kv groups than
t).

Shapes: B microbatch, S sequence, t tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeGuard

from torch import Tensor, nn

from megastack.layers.linear_ops import column_product, row_product
from megastack.layers.overrides import (
    built_in,
    runs_built_in,
    through_forward_hooks,
)
from megastack.layers.spec import LinearSpec
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Initialiser, Normal, Placement, Shard
from megastack.torch_private import has_backward_hooks, has_forward_hooks


class _ParallelLinear(ParallelModule):
    """A linear layer with the parameters of its spec."""

    spec: LinearSpec
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, spec: LinearSpec, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.spec = spec
        self.sequence_parallel = spec.sequence_parallel
        self.register_parameter("bias", None)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        """The weight and the bias as the spec declares them."""
        return self.spec.placements(self.mesh.shape.tp)

    @property
    def in_features(self) -> int:
        """The last dim of the input over all ranks."""
        return self.spec.in_features

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The output dims over all ranks."""
        return self.spec.out_shape

    def extra_repr(self) -> str:
        spec = self.spec
        return f"in={spec.in_features}, out={spec.out_shape}, bias={spec.bias}, sp={spec.sequence_parallel}"


class ColumnParallelLinear(_ParallelLinear):
    """``x @ weight.T + bias`` with the output features split over tp.

    Forward sends nothing, or with ``sequence_parallel`` all-gathers the sequence. Backward all-reduces the input
    gradient, or with ``sequence_parallel`` reduce-scatters it and gathers the input again; both overlap with the matrix
    products. Use :func:`column_parallel` if several layers share an input.

    Args:
        in_features: the last dim of the input.
        out_features: the output features, or the shape of several output dims.
        mesh: the ranks to split over.
        bias: add a bias, split like the output, initialised to zero, without weight decay.
        sequence_parallel: the input is split along the sequence over tp.
        shard_dim: which output dim is split.
        copies: the number of adjacent ranks that hold the same slice.
        init: the weight's initial values.

    Raises:
        PlacementError: tp does not divide the split dim.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        mesh: Mesh,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        shard_dim: int = 0,
        copies: int = 1,
        init: Initialiser = Normal(0.02),  # noqa: B008 - frozen
    ) -> None:
        out_shape = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        shard = Shard(shard_dim, copies)
        super().__init__(LinearSpec(in_features, out_shape, shard, bias, sequence_parallel, init), mesh)

    @classmethod
    def from_spec(cls, spec: LinearSpec, mesh: Mesh) -> Self:
        """The layer of a column-parallel spec."""
        return cls(
            spec.in_features,
            spec.out_shape,
            mesh,
            bias=spec.bias,
            sequence_parallel=spec.sequence_parallel,
            shard_dim=spec.shard.dim,
            copies=spec.shard.copies,
            init=spec.init,
        )

    @built_in
    def forward(self, x_BSD: Tensor) -> Tensor:
        """Maps ``(B, S, in)``, or ``(B, S/t, in)`` with ``sequence_parallel``, to ``(B, S, *local out)``."""
        group, sequence_parallel = self.mesh[Axis.TP], self.sequence_parallel
        return column_product(x_BSD, [self.weight], [self.bias], group, sequence_parallel=sequence_parallel)[0]


def column_parallel(x_BSD: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of several layers that share an input, with the communication of one.

    Layers that run the built-in ``forward`` of :class:`ColumnParallelLinear` share one product of their parameters, and
    their forward hooks see its results; they must have the same mesh and ``sequence_parallel``. All others are called
    one after another: overrides of ``forward``, modules of another class, and modules with backward hooks. All ranks of
    a tp group must have the same overrides and backward hooks.
    """
    shared = [layer for layer in layers if _can_share(layer)]
    products = _products(x_BSD, shared) if shared else ()
    if len(products) == len(layers) and not any(map(has_forward_hooks, layers)):
        return products
    remaining = iter(products)
    # In the order of the arguments, as if each layer had been called.
    return tuple(_called(layer, x_BSD, next(remaining) if layer in shared else None) for layer in layers)


def _can_share(layer: nn.Module) -> TypeGuard[ColumnParallelLinear]:
    return isinstance(layer, ColumnParallelLinear) and runs_built_in(layer, "forward") and not has_backward_hooks(layer)


def _called(layer: nn.Module, x_BSD: Tensor, product: Tensor | None) -> Any:
    """The result of calling the layer, whose product may have been computed already."""
    if product is None:
        return layer(x_BSD)
    return through_forward_hooks(layer, x_BSD, product) if has_forward_hooks(layer) else product


def _products(x_BSD: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The outputs of the layers from their parameters."""
    first = layers[0]
    assert len({layer.sequence_parallel for layer in layers}) == 1, "layers disagree about the input"
    weights = [layer.weight for layer in layers]  # once: reading a parametrised weight computes it
    biases, group = [layer.bias for layer in layers], first.mesh[Axis.TP]
    return column_product(x_BSD, weights, biases, group, sequence_parallel=first.sequence_parallel)


class RowParallelLinear(_ParallelLinear):
    """``x @ weight.T + bias`` with the input features split over tp, like the output of a column-parallel layer.

    Forward all-reduces the output, or with ``sequence_parallel`` reduce-scatters it along the sequence. Backward sends
    nothing, or with ``sequence_parallel`` all-gathers the output gradient. The bias is replicated and added after the
    reduction; with ``sequence_parallel`` each rank sees only its rows, so its gradient is partial over tp.

    Args:
        in_features: the input features over all ranks.
        out_features: the output features.
        mesh: the ranks to split over.
        bias: add a bias, initialised to zero, without weight decay.
        sequence_parallel: split the output along the sequence over tp.
        init: the weight's initial values.

    Raises:
        PlacementError: tp does not divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        init: Initialiser = Normal(0.02),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(LinearSpec(in_features, (out_features,), Shard(1), bias, sequence_parallel, init), mesh)

    @classmethod
    def from_spec(cls, spec: LinearSpec, mesh: Mesh) -> Self:
        """The layer of a row-parallel spec."""
        (out_features,) = spec.out_shape
        return cls(
            spec.in_features,
            out_features,
            mesh,
            bias=spec.bias,
            sequence_parallel=spec.sequence_parallel,
            init=spec.init,
        )

    @built_in
    def forward(self, x_BSF: Tensor) -> Tensor:
        """Maps ``(B, S, in/t)`` to ``(B, S, out)``, or to ``(B, S/t, out)`` with ``sequence_parallel``."""
        group = self.mesh[Axis.TP]
        return row_product(x_BSF, self.weight, self.bias, group, sequence_parallel=self.sequence_parallel)
