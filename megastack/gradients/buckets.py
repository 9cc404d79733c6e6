"""Flat gradient buckets: gradients gather in few buffers, whose sums over the mesh overlap with the last backward.

A bucket is two flat buffers: each of its parameters becomes a view of the one, its ``.grad`` a view of the other, so
autograd accumulates microbatches in place and the optimizer updates whole buckets. Gradients are held in
``promote_types(dtype, fp32)``; where that is not the parameter's dtype a hook adds each new gradient to the buffer.

A step goes ``backward…``, :meth:`~GradientBuckets.arm` right before the last backward of a stage, that backward,
:meth:`~GradientBuckets.finish`, clip, update, :meth:`~GradientBuckets.zero_`. A bucket is ready when every gradient in
it was stored after its stage was armed; it starts when it *and all before it* are ready. So all ranks start the same
collectives in the same order, whatever the order of their backwards, and a parameter that was not used only costs
overlap: :meth:`~GradientBuckets.finish` starts what is left.

Only the sum over ``dp·cp`` runs under the backward. The small sums over ``tp`` and over tied stages follow in
:meth:`~GradientBuckets.finish`: started from a hook they could slip between the backward's own collectives on ``tp``
in another order on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megastack.comm.collectives import Pending, start_all_reduce_
from megastack.comm.group import AxisGroup
from megastack.errors import ConfigError
from megastack.gradients.layout import Entry, Kind, Named, Plan, plan_buckets
from megastack.gradients.reduction import Reduction, reduction_of, tied_groups
from megastack.mesh.mesh import Mesh
from megastack.optim.groups import OptimGroup
from megastack.placement.module import placements_of
from megastack.placement.placement import Placement

BUCKET_BYTES = 25 * 2**20
"""The size of gradients at which a bucket is closed, by default."""


class Bucket:
    """The flat buffers of parameters that are reduced and updated alike.

    Attributes:
        parameters: the parameters, flat; the modules' own are views of it.
        gradients: their gradients, flat, with the same offsets.
        entries: name, shape and offset of each.
        reduction: the groups over which the gradients are summed.
        group: the optimizer group, ``None`` if none was given.
        decay: whether the placements let weight decay apply (``group`` decides where it is given).
    """

    def __init__(self, plan: Plan, gradient_dtype: torch.dtype) -> None:
        self.entries: tuple[Entry, ...] = plan.entries
        self.reduction: Reduction = plan.kind.reduction
        self.group: OptimGroup | None = plan.kind.group
        self.decay: bool = plan.kind.decay
        device = plan.entries[0].parameters[0].device
        self.parameters = torch.zeros(plan.numel, dtype=plan.kind.dtype, device=device)
        self.gradients = torch.zeros(plan.numel, dtype=gradient_dtype, device=device)
        for entry in self.entries:
            _adopt(entry, self.parameters)

    @property
    def counted(self) -> bool:
        """Whether this rank's copy counts in the norm."""
        return self.reduction.counted

    @property
    def gradient_bytes(self) -> int:
        """The size of what is reduced."""
        return self.gradients.numel() * self.gradients.element_size()

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's part of a flat buffer of this bucket's layout, by global name."""
        return ((entry.name, entry.view(flat)) for entry in self.entries)


class GradientBuckets:
    """The gradients of this rank's stages.

    All ranks of a pipeline must make theirs at the same time (tied parameters are found by their common name).

    Args:
        modules: this rank's stages in order; each parameter is declared by a ``placements()``.
        mesh: the mesh; gradients are summed over ``dp·cp``, and over ``tp`` and ``pp`` where the placement says so.
        zero: the ZeRO stage; only 0 is available.
        groups: the optimizer group of each global name; ``None`` where nothing but the placement's ``decay`` differs.
        bucket_bytes: the size of gradients at which a bucket is closed.
        tied: the groups that hold a parameter of the same name on other stages; ``None`` finds them.
        gradient_dtype: the dtype in which gradients gather and travel; ``None`` is ``promote_types(dtype, fp32)``.

    Attributes:
        buckets: in the order in which they are reduced.

    Raises:
        ConfigError: ``zero`` is not 0.
        PlacementError: a parameter has no placement, or one that does not fit.
    """

    _finished: bool

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        *,
        zero: int = 0,
        groups: Mapping[str, OptimGroup] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        tied: Mapping[str, AxisGroup] | None = None,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        if zero != 0:
            raise ConfigError(f"parallel.zero.stage={zero}: not available yet; use 0")
        self.mesh = mesh
        named = _trained(modules)
        if tied is None:
            tied = tied_groups([(name, parameter) for name, parameter, _ in named], mesh)
        kind_of = partial(_kind_of, mesh=mesh, tied=tied, groups=groups)
        dtype_of = _gradient_dtypes(gradient_dtype)
        plans = plan_buckets(named, kind_of, gradient_dtype=dtype_of, bucket_bytes=bucket_bytes)
        self.buckets = tuple(Bucket(plan, dtype_of(plan.kind.dtype)) for plan in plans)
        self._stages = _stages_of(modules)
        self._parameters = [
            frozenset(parameter for entry in bucket.entries for parameter in entry.parameters)
            for bucket in self.buckets
        ]
        self._views: dict[nn.Parameter, Tensor] = {}
        self._hook_all()
        self._begin()

    def arm(self, stage: int) -> None:
        """Say that the next backward of ``modules[stage]`` is its last of this step."""
        self._armed.add(stage)

    def finish(self) -> None:
        """Complete every sum of the step: afterwards all gradients are those of the global batch."""
        assert not self._finished, "finish() comes once a step; call zero_() before the next one"
        while len(self._pending) < len(self.buckets):
            self._start_next()
        for pending in self._pending:
            pending.wait()
        self._sum_over(lambda reduction: reduction.tensor, self.buckets)
        by_name = sorted(self.buckets, key=lambda bucket: bucket.entries[0].name)
        self._sum_over(lambda reduction: reduction.tied, by_name)
        self._finished = True

    def zero_(self) -> None:
        """Clear all gradients for the next step."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for parameter in self._views:
            self._attach(parameter)
        self._begin()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter's gradient on this rank by global name, as views; whole after :meth:`finish`."""
        return (pair for bucket in self.buckets for pair in bucket.views(bucket.gradients))

    # Readiness: hooks run where autograd stores a gradient.

    def _begin(self) -> None:
        self._armed: set[int] = set()
        self._waiting = [set(parameters) for parameters in self._parameters]
        self._pending: list[Pending] = []
        self._finished = False

    def _hook_all(self) -> None:
        for number, bucket in enumerate(self.buckets):
            for entry in bucket.entries:
                for parameter in entry.parameters:
                    self._views[parameter] = entry.view(bucket.gradients)
                    self._attach(parameter)
                    parameter.register_post_accumulate_grad_hook(partial(self._stored, number))

    def _attach(self, parameter: nn.Parameter) -> None:
        view = self._views[parameter]
        parameter.grad = view if view.dtype == parameter.dtype else None

    def _stored(self, number: int, parameter: Tensor) -> None:
        """A gradient of bucket ``number`` was stored."""
        assert isinstance(parameter, nn.Parameter)
        assert not self._finished, "a gradient came after finish(); call zero_() before the next step"
        assert number >= len(self._pending), (
            "a gradient came after its bucket was started; arm() the last backward only"
        )
        self._collect(parameter)
        if self._stages[parameter] <= self._armed:
            self._waiting[number].discard(parameter)
            while len(self._pending) < len(self.buckets) and not self._waiting[len(self._pending)]:
                self._start_next()

    def _collect(self, parameter: nn.Parameter) -> None:
        """Add a gradient that autograd put elsewhere (other dtype, or ``.grad`` was cleared) to the buffer."""
        view, gradient = self._views[parameter], parameter.grad
        if gradient is not None and gradient is not view:
            view.add_(gradient)
            self._attach(parameter)

    def _start_next(self) -> None:
        bucket = self.buckets[len(self._pending)]
        self._pending.append(start_all_reduce_(bucket.gradients, bucket.reduction.data))

    def _sum_over(self, group_of: Callable[[Reduction], AxisGroup | None], buckets: Sequence[Bucket]) -> None:
        pending = []
        for bucket in buckets:
            group = group_of(bucket.reduction)
            if group is not None:
                pending.append(start_all_reduce_(bucket.gradients, group))
        for operation in pending:
            operation.wait()


def _trained(modules: Sequence[nn.Module]) -> list[Named]:
    """The trained parameters of all modules in reverse order of use; one that modules share under its first name."""
    found: dict[nn.Parameter, tuple[str, Placement]] = {}
    for module in modules:
        placements = placements_of(module)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found.setdefault(parameter, (name, placements[name]))
    return [(name, parameter, placement) for parameter, (name, placement) in reversed(found.items())]


def _stages_of(modules: Sequence[nn.Module]) -> dict[nn.Parameter, frozenset[int]]:
    """The modules that hold each parameter."""
    stages: dict[nn.Parameter, frozenset[int]] = {}
    for index, module in enumerate(modules):
        for parameter in module.parameters():
            stages[parameter] = stages.get(parameter, frozenset()) | {index}
    return stages


def _kind_of(
    name: str,
    parameter: nn.Parameter,
    placement: Placement,
    *,
    mesh: Mesh,
    tied: Mapping[str, AxisGroup],
    groups: Mapping[str, OptimGroup] | None,
) -> Kind:
    reduction = reduction_of(name, placement, mesh, tied)
    if groups is None:
        return Kind(parameter.dtype, reduction, None, placement.decay)
    return Kind(parameter.dtype, reduction, groups[name], True)


def _gradient_dtypes(wanted: torch.dtype | None) -> Callable[[torch.dtype], torch.dtype]:
    return lambda dtype: torch.promote_types(dtype, torch.float32) if wanted is None else wanted


@torch.no_grad()
def _adopt(entry: Entry, flat: Tensor) -> None:
    """Move the values of a parameter into the flat buffer and make its tensors views of it."""
    view = entry.view(flat)
    view.copy_(entry.parameters[0])
    for parameter in entry.parameters:
        parameter.data = view
