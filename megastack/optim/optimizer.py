"""The optimizer of this rank's buckets: options in, one object with ``step`` out.

It updates whole flat buckets with torch's fused kernels, one parameter group for each :class:`OptimGroup`. The learning
rate comes with each step, from :class:`megastack.optim.lr.LearningRate`; nothing of it is state. Moments are read and
loaded by global parameter name, so they know nothing of buckets. A rank without a trained parameter has an optimizer
that does nothing but count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megastack.errors import ConfigError
from megastack.gradients.buckets import Bucket, GradientBuckets
from megastack.optim.adamw import adamw
from megastack.optim.groups import OptimGroup
from megastack.optim.precision import Master
from megastack.optim.sgd import sgd


@dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer, and the settings that all groups share.

    Attributes:
        name: ``adamw`` or ``sgd``.
        betas: AdamW's decay rates of the moments.
        eps: AdamW's addition to the root of the second moment.
        momentum: SGD's momentum.
        weight_decay: for buckets made without groups, where the placement lets it apply.
    """

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0


def build_optimizer(buckets: GradientBuckets, options: OptimizerOptions | None = None) -> Optimizer:
    """The optimizer of these buckets; their groups say which parameters decay and scale the learning rate.

    Raises:
        ConfigError: no optimizer of that name.
    """
    options = options or OptimizerOptions()
    if options.name not in ("adamw", "sgd"):
        raise ConfigError(f"optim.name={options.name}: no such optimizer; use adamw or sgd")
    masters = [Master(bucket) for bucket in buckets.buckets]
    groups = _parameter_groups(masters, options.weight_decay)
    return Optimizer(masters, _torch_optimizer(groups, masters, options), buckets.mesh.device)


class Optimizer:
    """Updates this rank's parameters from the gradients in their buckets. Made by :func:`build_optimizer`.

    Attributes:
        steps: the updates done, a scalar tensor; skipped steps do not count.
    """

    def __init__(
        self, masters: Sequence[Master], optimizer: torch.optim.Optimizer | None, device: torch.device
    ) -> None:
        self._masters = tuple(masters)
        self._torch = optimizer
        self.steps = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self, lr: float, *, found_inf: Tensor | None = None) -> None:
        """One update with learning rate ``lr``.

        Args:
            lr: the rate of this step, before the groups' scales.
            found_inf: a scalar tensor; where it is 1, parameters, moments and counters stay as they are, decided by
                the kernels without a read on the host. It must be alike on all ranks.
        """
        skip = None if found_inf is None else found_inf.to(torch.float32)
        self.steps += 1 if skip is None else (1 - skip).to(torch.int64)
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = lr * group["lr_scale"]
        for master in self._masters:
            master.take_gradient()
        self._torch.found_inf = skip  # type: ignore[attr-defined]
        self._torch.step()
        for master in self._masters:
            master.publish()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Each kind of moment (``exp_avg``, …) by global parameter name: views, shaped as the local parameter.

        Writing into a view loads it.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for master in self._masters:
            for kind, flat in self._state(master).items():
                if kind != "step":
                    found.setdefault(kind, {}).update(master.bucket.views(flat))
        return found

    def masters(self) -> dict[str, Tensor]:
        """The fp32 masters by global name, of the parameters that have one: views, for reading and loading."""
        copies = [master for master in self._masters if master.is_copy]
        return {name: view for master in copies for name, view in master.bucket.views(master.parameter.detach())}

    @torch.no_grad()
    def load_steps(self, steps: int) -> None:
        """Set the count of updates, after moments were loaded."""
        self.steps.fill_(steps)
        for master in self._masters:
            if "step" in self._state(master):
                self._state(master)["step"].fill_(steps)

    def refresh_masters(self) -> None:
        """Take masters from the model's parameters, after weights alone were loaded into them."""
        for master in self._masters:
            master.refresh()

    def publish_masters(self) -> None:
        """Round loaded masters into the model's parameters."""
        for master in self._masters:
            master.publish()

    def _state(self, master: Master) -> dict[str, Tensor]:
        assert self._torch is not None
        state: dict[str, Tensor] = self._torch.state[master.parameter]
        return state


def _parameter_groups(masters: Sequence[Master], weight_decay: float) -> list[dict[str, Any]]:
    members: dict[OptimGroup, list[Master]] = {}
    for master in masters:
        members.setdefault(_group_of(master.bucket, weight_decay), []).append(master)
    return [
        {
            "params": [master.parameter for master in group_masters],
            "lr_scale": group.lr_scale,
            "weight_decay": group.weight_decay,
        }
        for group, group_masters in members.items()
    ]


def _group_of(bucket: Bucket, weight_decay: float) -> OptimGroup:
    if bucket.group is not None:
        return bucket.group
    return OptimGroup(weight_decay=weight_decay if bucket.decay else 0.0)


def _torch_optimizer(
    groups: Sequence[Mapping[str, Any]], masters: Sequence[Master], options: OptimizerOptions
) -> torch.optim.Optimizer | None:
    if not masters:
        return None
    if options.name == "sgd":
        return sgd(groups, masters, momentum=options.momentum)
    return adamw(groups, masters, betas=options.betas, eps=options.eps)
