"""The interface between gradients and the rest of a training step, independent of the ZeRO level.

Two classes implement it: :class:`~megastack.gradients.buckets.GradientBuckets` (flat buckets, ZeRO levels 0 and 1) and
:class:`~megastack.gradients.fully_shard.FullyShardedGradients` (torch's FSDP2, levels 2 and 3). The norm, the
optimizer, the loss scale and the trainer see gradients as a sequence of **local shards**: flat tensors that this rank
updates, each of which knows the boxes of the parameters in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import Reduction
from megastack.mesh.mesh import Mesh
from megastack.placement.module import BoxView


class LocalShard(Protocol):
    """Parameters, or parts of them, that this rank updates together."""

    @property
    def reduction(self) -> Reduction:
        """How their gradients are reduced."""

    @property
    def local_parameters(self) -> Tensor:
        """The parameters that this rank updates, flat."""

    @property
    def local_gradients(self) -> Tensor:
        """Their gradients at the same offsets; gradients of the global batch once a step is finished."""

    @property
    def group(self) -> ParameterGroup | None:
        """The optimizer group; ``None`` if none was given."""

    @property
    def decay(self) -> bool:
        """Whether the placements allow weight decay (``group`` takes precedence)."""

    @property
    def is_rounded(self) -> bool:
        """Whether ``local_parameters`` are main parameters, which modules use in a lower precision."""

    def parts(self, local: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """The boxes of each parameter, by global name, in a flat tensor of the shard's layout; may be empty."""


class Gradients(Protocol):
    """The gradients of this rank's stages. A step runs ``zero_``, backwards, ``finish``, clip, update.

    Attributes:
        mesh: the mesh.
        differ_over_data: whether ranks that differ only in dp and cp hold shards of different elements. Identical on
            all ranks.
    """

    mesh: Mesh
    differ_over_data: bool

    @property
    def buckets(self) -> Sequence[LocalShard]:
        """The shards that this rank updates."""

    def mark_last_backward(self, stage: int, pending: Collection[Tensor] | None = None) -> None:
        """Mark the next backward of a stage as its last of the step.

        Args:
            stage: the index of the module.
            pending: the parameters whose gradients are not complete yet; ``None`` if this is unknown.
        """

    def finish(self) -> None:
        """Complete all reductions of the step."""

    def zero_(self) -> None:
        """Clear all gradients for the next step."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradient of each trained parameter on this rank by global name, after ``finish``; may communicate."""

    def weights(self) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """This rank's boxes of each parameter, frozen ones included, by global name and as modules compute with it.

        They are views; for a rounded shard they are copies, which :meth:`copy_model_to_main` reads after values were
        loaded.
        """

    def copy_model_to_main(self, names: Collection[str] | None = None) -> None:
        """Copy the last result of :meth:`weights` into the main parameters (only ``names``, if given)."""

    def gather_parameters(self) -> None:
        """Start to gather the parameters after an update."""

    def wait_parameters(self) -> None:
        """Wait until parameters may be read or written outside of a module's forward."""
