"""The optimizer of this rank's local shards.

It updates flat shards with torch's fused kernels, with one call per :class:`ParameterGroup`. The learning rate is an
argument of each step, from :class:`megastack.optim.lr.LearningRate`; it is not state. Moments and main parameters are
read and loaded by global parameter name, as boxes, so a checkpoint is independent of buckets and shards. On a rank
without a trained parameter the optimizer only counts updates.

Adam's bias correction needs the number of updates of a parameter's moments. A parameter that was frozen or was added
later has fewer updates than the run: its *start* is the number of updates of the run when its training began. A shard
is updated in segments of parameters with the same start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megastack.gradients.interface import Gradients, LocalShard
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.optim.main_parameters import MainParameters
from megastack.optim.update_rules import STEP, OptimizerOptions, UpdateRule, rule_of
from megastack.placement.module import BoxView


def build_optimizer(buckets: Gradients, options: OptimizerOptions | None = None) -> Optimizer:
    """The optimizer of these buckets; their groups decide which parameters decay and scale the learning rate.

    Raises:
        ConfigError: there is no optimizer with this name.
    """
    options = options or OptimizerOptions()
    return Optimizer(buckets, rule_of(options), options.weight_decay, offload=options.offload)


class Optimizer:
    """Updates this rank's parameters from their gradients. Built by :func:`build_optimizer`.

    Attributes:
        steps: the number of updates, a scalar tensor; skipped steps do not count.
        starts: by global name, the start of each parameter that was not trained from the first update on; may include
            parameters of other stages.
    """

    def __init__(self, buckets: Gradients, rule: UpdateRule, weight_decay: float, *, offload: bool = False) -> None:
        self._buckets = buckets
        self._rule = rule
        self._main = [MainParameters(shard, offload=offload) for shard in buckets.buckets]
        self._states = [rule.state(main.values) for main in self._main]
        self._groups: dict[ParameterGroup, list[int]] = {}
        for number, shard in enumerate(buckets.buckets):
            self._groups.setdefault(_group_of(shard, weight_decay), []).append(number)
        self.steps = torch.zeros((), dtype=torch.int64, device=buckets.mesh.device)
        self.load_steps(0)

    @torch.no_grad()
    def step(self, lr: float, *, found_inf: Tensor | None = None) -> None:
        """Update once with learning rate ``lr``. Under ZeRO-1 the gathers of the parameters still run when it returns.

        Args:
            lr: the rate of this step, before the groups' scales.
            found_inf: a scalar tensor; if it is 1, parameters, moments and counters stay unchanged. The kernels decide
                without a read on the host (with ``offload`` it is copied with the gradients). It must be identical on
                all ranks.
        """
        self._buckets.wait_parameters()
        skip = None if found_inf is None else found_inf.to(torch.float32)
        self.steps += 1 if skip is None else (1 - skip).to(torch.int64)
        for group, numbers in self._groups.items():
            device = self._main[numbers[0]].values.device
            segments = [(number, segment) for number in numbers for segment in self._segments[number]]
            gradients = {number: self._main[number].gradients for number in numbers}
            self._rule.update(
                [self._main[number].values[segment.part] for number, segment in segments],
                [gradients[number][segment.part] for number, segment in segments],
                [segment.state for _, segment in segments],
                lr=lr * group.lr_scale,
                weight_decay=group.weight_decay,
                found_inf=None if skip is None else skip.to(device),
            )
        for main in self._main:
            main.copy_to_model()
        self._buckets.gather_parameters()

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
        for main in self._main:
            if main.is_wider:
                main.copy_to_model()
            else:
                main.copy_from_model()
        self._buckets.gather_parameters()


def _group_of(shard: LocalShard, weight_decay: float) -> ParameterGroup:
    if shard.group is not None:
        return shard.group
    return ParameterGroup(weight_decay=weight_decay if shard.decay else 0.0)


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
