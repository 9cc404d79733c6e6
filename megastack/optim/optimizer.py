"""The optimizer of this rank's local shards.

It updates flat shards with torch's fused kernels, with one call per :class:`ParameterGroup` and dtype. The learning
rate is an argument of each step, from :class:`megastack.optim.lr.LearningRate`; it is not state. Moments and main
parameters are read and loaded by global parameter name, as boxes, so a checkpoint is independent of buckets and shards.
On a rank without a trained parameter the optimizer only counts updates.

Adam's bias correction needs the number of updates of a parameter's moments. A parameter that was frozen or was added
later has fewer updates than the run: its *start* is the number of updates of the run when its training began. A shard
is updated in segments of parameters with the same start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megastack.gradients.interface import Gradients, LocalShard
from megastack.gradients.norm import divide_
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.optim.main_parameters import (
    HostMemory,
    MainParameters,
    OffloadedParameters,
    PinnedMemory,
    copy_to_model,
)
from megastack.optim.update_rules import STEP, OptimizerOptions, UpdateRule, rule_of
from megastack.placement.module import BoxView


def build_optimizer(buckets: Gradients, options: OptimizerOptions | None = None) -> Optimizer:
    """The optimizer of these buckets; their groups decide which parameters decay and scale the learning rate.

    Raises:
        ConfigError: there is no optimizer with this name.
    """
    options = options or OptimizerOptions()
    device = buckets.mesh.device
    memory = PinnedMemory(device) if options.offload and device.type != "cpu" else None
    return Optimizer(buckets, rule_of(options), options.weight_decay, offload_to=memory)


class Optimizer:
    """Updates this rank's parameters from their gradients. Built by :func:`build_optimizer`.

    Args:
        buckets: the gradients.
        rule: the update rule.
        weight_decay: the decay of shards without a group.
        offload_to: the memory for main parameters and moments; ``None`` for the device of the parameters.

    Attributes:
        steps: the number of updates, a scalar tensor; skipped steps do not count.
        starts: by global name, the start of each parameter that was not trained from the first update on; may include
            parameters of other stages.
    """

    def __init__(
        self, buckets: Gradients, rule: UpdateRule, weight_decay: float, *, offload_to: HostMemory | None = None
    ) -> None:
        self._buckets = buckets
        self._rule = rule
        self._main = [
            MainParameters(shard) if offload_to is None else OffloadedParameters(shard, offload_to)
            for shard in buckets.buckets
        ]
        self._states = [rule.state(main.values) for main in self._main]
        groups = [_group_of(shard, weight_decay) for shard in buckets.buckets]
        self._batches = _batches(groups, self._main, one_by_one=offload_to is not None)
        self.steps = torch.zeros((), dtype=torch.int64, device=buckets.mesh.device)
        self.load_steps(0)

    @torch.no_grad()
    def step(self, lr: float, *, found_inf: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Update once with learning rate ``lr``. Under ZeRO-1 the gathers of the parameters still run when it returns.

        Args:
            lr: the rate of this step, before the groups' scales.
            found_inf: a scalar tensor; if it is 1, parameters, moments and counters stay unchanged. The kernels decide
                without a read on the host (with offloading it is copied with the gradients). It must be identical on
                all ranks.
            grad_scale: a scalar tensor by which the gradients are divided first, as for
                :func:`megastack.gradients.norm.clip_divisor`.
        """
        self._buckets.wait_parameters()
        for main in self._main:
            main.start_gradients()
        skip = None if found_inf is None else found_inf.to(torch.float32)
        self.steps += 1 if skip is None else (1 - skip).to(torch.int64)
        for batch in self._batches:
            self._update(batch, lr, skip, grad_scale)
            copy_to_model([self._main[number] for number in batch.numbers])
        self._buckets.gather_parameters()

    def _update(self, batch: _Batch, lr: float, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        values = self._main[batch.numbers[0]].values
        segments = [(number, segment) for number in batch.numbers for segment in self._segments[number]]
        gradients = {number: self._main[number].gradients for number in batch.numbers}
        if grad_scale is not None and values.dtype == torch.float64:  # the kernels divide by an fp32 scalar
            divide_(list(gradients.values()), grad_scale.to(values.device))
            grad_scale = None
        self._rule.update(
            [self._main[number].values[segment.part] for number, segment in segments],
            [gradients[number][segment.part] for number, segment in segments],
            [segment.state for _, segment in segments],
            lr=lr * batch.group.lr_scale,
            weight_decay=batch.group.weight_decay,
            found_inf=None if found_inf is None else found_inf.to(values.device),
            grad_scale=None if grad_scale is None else grad_scale.to(values.device, torch.float32),
        )

    def moments(self) -> dict[str, dict[str, tuple[BoxView, ...]]]:
        """Each kind of moment (``exp_avg``, …) by global parameter name: the boxes of the local parameter held here.

        They are views: writing into one loads it.
        """
        found: dict[str, dict[str, tuple[BoxView, ...]]] = {}
        for main, state in zip(self._main, self._states, strict=True):
            for kind, flat in state.items():
                if kind != STEP:
                    found.setdefault(kind, {}).update(main.parts(flat))
        return found

    def main_parameters(self) -> dict[str, tuple[BoxView, ...]]:
        """The fp32 main parameters of parameters in a lower precision, by global name and box: views, like moments."""
        wider = [main for main in self._main if main.is_wider]
        return {name: parts for main in wider for name, parts in main.parts(main.values)}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of moment."""
        return self._rule.kinds

    @torch.no_grad()
    def load_steps(self, steps: int, starts: Mapping[str, int] | None = None) -> None:
        """Set the number of updates, after moments were loaded.

        Args:
            steps: the updates of the run.
            starts: by global name, the start of each parameter that was not trained from the first update on. Moments
                of parameters that start now are cleared.
        """
        self.steps.fill_(steps)
        self.starts = dict(starts or {})
        self._segments = [
            _segments(main, state, steps, self.starts) for main, state in zip(self._main, self._states, strict=True)
        ]
        for named in self.moments().values():
            for name in named.keys() & {name for name, start in self.starts.items() if start == steps}:
                for _, part in named[name]:
                    part.zero_()

    def copy_model_to_main(self, names: Collection[str] | None = None) -> None:
        """Copy the model's parameters (only ``names``, if given) into the main parameters after loading weights."""
        self._buckets.copy_model_to_main(names)
        for main in self._main:
            main.copy_from_model(names)

    @torch.no_grad()
    def copy_main_to_model(self) -> None:
        """Round loaded main parameters into the model; main parameters of equal precision are copied from the model."""
        self._buckets.wait_parameters()
        copy_to_model([main for main in self._main if main.is_wider])
        for main in self._main:
            if not main.is_wider:
                main.copy_from_model()
        self._buckets.gather_parameters()


def _group_of(shard: LocalShard, weight_decay: float) -> ParameterGroup:
    if shard.group is not None:
        return shard.group
    return ParameterGroup(weight_decay=weight_decay if shard.decay else 0.0)


@dataclass(frozen=True)
class _Batch:
    """The numbers of shards that one call of the kernel updates: they share a group and a dtype."""

    group: ParameterGroup
    numbers: Sequence[int]


def _batches(groups: Sequence[ParameterGroup], main: Sequence[MainParameters], *, one_by_one: bool) -> list[_Batch]:
    if one_by_one:
        return [_Batch(group, [number]) for number, group in enumerate(groups)]
    found: dict[tuple[ParameterGroup, torch.dtype], list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault((group, main[number].values.dtype), []).append(number)
    return [_Batch(group, numbers) for (group, _), numbers in found.items()]


@dataclass(frozen=True)
class _Segment:
    """A range of a shard whose parameters have the same start, with views of its moments and its own update count."""

    part: slice
    state: dict[str, Tensor]


def _segments(
    main: MainParameters, state: Mapping[str, Tensor], steps: int, starts: Mapping[str, int]
) -> list[_Segment]:
    """The segments of a shard, each with the number of updates that it has seen."""
    runs = _runs(main, starts)
    ends = [first for first, _ in runs[1:]] + [main.values.numel()]
    segments = []
    for (first, start), end in zip(runs, ends, strict=True):
        part = slice(first, end)
        own = {kind: flat[part] for kind, flat in state.items() if kind != STEP}
        if STEP in state:
            own[STEP] = state[STEP].clone().fill_(steps - start)
        segments.append(_Segment(part, own))
    return segments


def _runs(main: MainParameters, starts: Mapping[str, int]) -> list[tuple[int, int]]:
    """Where each segment begins, and its start; padding belongs to the segment before it."""
    base = main.values.storage_offset()
    found = sorted(
        (int(part.storage_offset() - base), starts.get(name, 0))
        for name, parts in main.parts(main.values)
        for _, part in parts
        if part.numel()
    )
    runs: list[tuple[int, int]] = []
    for first, start in found:
        if not runs or runs[-1][1] != start:
            runs.append((first if runs else 0, start))
    return runs or [(0, 0)]
