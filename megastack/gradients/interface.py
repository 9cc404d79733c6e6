"""What the rest of a step sees of gradients, whoever reduces them.

Two things reduce gradients: :class:`~megastack.gradients.buckets.GradientBuckets` (flat buckets, stages 0 and 1 of
ZeRO) and :class:`~megastack.gradients.fully_shard.FullyShardedGradients` (torch's FSDP2, stages 2 and 3). The norm, the
optimizer, the loss scale and the trainer know neither. To them gradients are a sequence of **slices**: flat tensors
that this rank updates, each with what lies in it, as boxes of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.sharding import Sharding
from megastack.mesh.mesh import Mesh
from megastack.placement.boxes import Box

BoxView = tuple[Box, Tensor]
"""A box of the local parameter and the view of a slice that holds its elements."""


class Slice(Protocol):
    """Parameters, or parts of them, that this rank updates together."""

    @property
    def local_parameters(self) -> Tensor:
        """What this rank updates, flat."""

    @property
    def local_gradients(self) -> Tensor:
        """Its gradients, laid out alike; of the global batch once a step is finished."""

    @property
    def is_owner(self) -> bool:
        """Whether this rank's copy of the slice counts in the norm."""

    @property
    def group(self) -> ParameterGroup | None:
        """The optimizer group, ``None`` if none was given."""

    @property
    def decay(self) -> bool:
        """Whether the placements let weight decay apply (``group`` decides where it is given)."""

    @property
    def is_rounded(self) -> bool:
        """Whether modules compute with a rounding of ``local_parameters``, which is the master then."""

    def parts(self, own: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """What a tensor of the slice's layout holds of each parameter, by global name; nothing of some."""


class Gradients(Protocol):
    """The gradients of this rank's stages. A step goes ``zero_``, backwards, ``finish``, clip, update."""

    mesh: Mesh
    sharding: Sharding

    @property
    def buckets(self) -> Sequence[Slice]:
        """What this rank updates."""

    def mark_last_backward(self, stage: int, awaited: Collection[Tensor] | None = None) -> None:
        """Say that the next backward of this stage is its last of the step.

        Args:
            stage: the place of the module.
            awaited: the parameters whose gradients are still to come; ``None`` where they are not known.
        """

    def finish(self) -> None:
        """Complete every sum of the step."""

    def zero_(self) -> None:
        """Clear all gradients for the next step."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter's gradient on this rank by global name, after ``finish``; may communicate."""

    def weights(self) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """What this rank holds of each parameter, frozen ones included, by global name and as modules compute with it.

        Views; where a slice is rounded, copies, which :meth:`copy_model_to_main` takes over after they were written.
        """

    def copy_model_to_main(self, names: Collection[str] | None = None) -> None:
        """Take masters (those of ``names``) from the copies that :meth:`weights` gave last."""

    def gather_parameters(self) -> None:
        """Begin to make parameters whole after an update."""

    def wait_parameters(self) -> None:
        """Wait until the parameters may be read or written by other means than a module's forward."""
