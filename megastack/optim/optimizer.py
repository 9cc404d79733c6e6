"""The optimizer of this rank's buckets: options in, one object with ``step`` out.

It updates flat buckets, or this rank's slices of them, with torch's fused kernels, one call for each
:class:`ParameterGroup`; a slice with parameters that joined the run later goes as several tensors
(:mod:`megastack.optim.segments`). The learning rate comes with each step, from
:class:`megastack.optim.lr.LearningRate`; nothing of it is state. Moments and masters are read and loaded by global
parameter name, as boxes, so what is saved knows nothing of buckets or slices. A rank without a trained parameter has an
optimizer that does nothing but count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megastack.errors import ConfigError
from megastack.gradients.interface import BoxView, Gradients, Slice
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.optim.adamw import AdamW
from megastack.optim.main_parameters import MainParameters
from megastack.optim.segments import STEP, segments_of
from megastack.optim.sgd import SGD


@dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer, and the settings that all groups share.

    Attributes:
        name: ``adamw`` or ``sgd``.
        betas: AdamW's decay rates of the moments.
        eps: AdamW's addition to the root of the second moment.
        momentum: SGD's momentum.
        weight_decay: for buckets made without groups, where the placement lets it apply.
        offload: keep masters and moments in the host's memory and update there.
    """

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    offload: bool = False


def build_optimizer(buckets: Gradients, options: OptimizerOptions | None = None) -> Optimizer:
    """The optimizer of these buckets; their groups say which parameters decay and scale the learning rate.

    Raises:
        ConfigError: no optimizer of that name.
    """
    options = options or OptimizerOptions()
    return Optimizer(buckets, rule_of(options), options.weight_decay, offload=options.offload)


def rule_of(options: OptimizerOptions) -> AdamW | SGD:
    """The rule by which these options update.

    Raises:
        ConfigError: no optimizer of that name.
    """
    if options.name not in ("adamw", "sgd"):
        raise ConfigError(f"optim.name={options.name}: no such optimizer; use adamw or sgd")
    return SGD(options.momentum) if options.name == "sgd" else AdamW(options.betas, options.eps)


class Optimizer:
    """Updates this rank's parameters from the gradients in their buckets. Made by :func:`build_optimizer`.

    Attributes:
        steps: the updates done, a scalar tensor; skipped steps do not count.
        starts: by global name, the updates that were done before the parameter was trained, where there were any; those
            of other stages may be among them.
    """

    def __init__(self, buckets: Gradients, rule: AdamW | SGD, weight_decay: float, *, offload: bool = False) -> None:
        self._buckets = buckets
        self._rule = rule
        self._masters = [MainParameters(bucket, offload=offload) for bucket in buckets.buckets]
        self._states = [rule.state(master) for master in self._masters]
        self._groups: dict[ParameterGroup, list[int]] = {}
        for number, bucket in enumerate(buckets.buckets):
            self._groups.setdefault(_group_of(bucket, weight_decay), []).append(number)
        self.steps = torch.zeros((), dtype=torch.int64, device=buckets.mesh.device)
        self.load_steps(0)

    @torch.no_grad()
    def step(self, lr: float, *, found_inf: Tensor | None = None) -> None:
        """One update with learning rate ``lr``; under ZeRO-1 it leaves the gathers of the parameters under way.

        Args:
            lr: the rate of this step, before the groups' scales.
            found_inf: a scalar tensor; where it is 1, parameters, moments and counters stay as they are, decided by
                the kernels without a read on the host (with ``offload`` it comes over with the gradients). It must be
                alike on all ranks.
        """
        self._buckets.wait_parameters()
        skip = None if found_inf is None else found_inf.to(torch.float32)
        self.steps += 1 if skip is None else (1 - skip).to(torch.int64)
        for group, numbers in self._groups.items():
            here = self._masters[numbers[0]].values.device
            segments = [(number, segment) for number in numbers for segment in self._segments[number]]
            gradients = {number: self._masters[number].gradients for number in numbers}
            self._rule.update(
                [self._masters[number].values[segment.part] for number, segment in segments],
                [gradients[number][segment.part] for number, segment in segments],
                [segment.state for _, segment in segments],
                lr=lr * group.lr_scale,
                weight_decay=group.weight_decay,
                found_inf=None if skip is None else skip.to(here),
            )
        for master in self._masters:
            master.publish()
        self._buckets.gather_parameters()

    def moments(self) -> dict[str, dict[str, tuple[BoxView, ...]]]:
        """Each kind of moment (``exp_avg``, …) by global parameter name: the boxes of the local parameter held here.

        They are views: writing into one loads it.
        """
        found: dict[str, dict[str, tuple[BoxView, ...]]] = {}
        for master, state in zip(self._masters, self._states, strict=True):
            for kind, flat in state.items():
                if kind != STEP:
                    found.setdefault(kind, {}).update(master.parts(flat))
        return found

    def main_parameters(self) -> dict[str, tuple[BoxView, ...]]:
        """The fp32 masters of parameters in a lower precision, by global name and box: views, as of the moments."""
        wider = [master for master in self._masters if master.is_wider]
        return {name: parts for master in wider for name, parts in master.parts(master.values)}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of moment."""
        return self._rule.kinds

    @torch.no_grad()
    def load_steps(self, steps: int, starts: Mapping[str, int] | None = None) -> None:
        """Set the count of updates, after moments were loaded.

        Args:
            steps: the updates of the run.
            starts: by global name, the updates before a parameter was trained, where there were any. Moments of those
                that start now are cleared.
        """
        self.steps.fill_(steps)
        self.starts = dict(starts or {})
        self._segments = [
            segments_of(master, state, steps, self.starts)
            for master, state in zip(self._masters, self._states, strict=True)
        ]
        for named in self.moments().values():
            for name in named.keys() & {name for name, start in self.starts.items() if start == steps}:
                for _, part in named[name]:
                    part.zero_()

    def copy_model_to_main(self, names: Collection[str] | None = None) -> None:
        """Take masters (those of ``names``) from the model's parameters, after weights alone were loaded into them."""
        self._buckets.copy_model_to_main(names)
        for master in self._masters:
            master.refresh(names)

    @torch.no_grad()
    def copy_main_to_model(self) -> None:
        """Round loaded masters into the model's parameters; mere copies are taken from the parameters instead."""
        self._buckets.wait_parameters()
        for master in self._masters:
            if master.is_wider:
                master.publish()
            else:
                master.refresh()
        self._buckets.gather_parameters()


def _group_of(bucket: Slice, weight_decay: float) -> ParameterGroup:
    if bucket.group is not None:
        return bucket.group
    return ParameterGroup(weight_decay=weight_decay if bucket.decay else 0.0)
