"""ZeRO-1: data-parallel ranks share the optimizer's work and state, each a slice of every bucket.

Gradients are summed by a reduce-scatter, which leaves each rank the sum of its slice; it updates that slice alone, so
masters and moments exist nowhere else; an all-gather puts the parameters together again (Rajbhandari et al. 2020, stage
1). Reductions and updates are the same code as without ZeRO, on a slice (:mod:`megastack.gradients.bucket`). What is
left is here: the all-gathers under the next forward.

They start right after the update, in the order in which a forward uses the parameters. Whoever reads a parameter waits
first. A stage's forward waits for all that the stage may use directly; a **unit**, a module that is only ever used by
calling it (a block), waits for its own parameters when it is called. Without units a stage waits for all it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from megastack.comm.collectives import Pending
from megastack.gradients.bucket import Bucket


class ParameterGathers:
    """The all-gathers of a rank's parameters, and hooks that wait for them before the parameters are used.

    Args:
        buckets: all buckets of the rank; those that are not shared are left alone.
        modules: this rank's stages in order.
        units: sub-modules of theirs whose parameters are used by calling them and in no other way, in order of use.
    """

    def __init__(self, buckets: Sequence[Bucket], modules: Sequence[nn.Module], units: Sequence[nn.Module]) -> None:
        self._buckets = buckets
        self._pending: dict[int, Pending] = {}
        self._order: list[int] = []
        if not any(bucket.is_shared for bucket in buckets):
            return
        number_of = {p: at for at, bucket in enumerate(buckets) for entry in bucket.entries for p in entry.parameters}
        in_units = {parameter for unit in units for parameter in unit.parameters()}
        direct = [[p for p in module.parameters() if p not in in_units] for module in modules]
        own = [*direct, *([*unit.parameters()] for unit in units)]
        needs = [list(dict.fromkeys(number_of[p] for p in held if p in number_of)) for held in own]
        self._order = list(dict.fromkeys(number for numbers in needs for number in numbers))
        for module, numbers in zip([*modules, *units], needs, strict=True):
            module.register_forward_pre_hook(partial(self._before_use, numbers))

    def start(self) -> None:
        """Begin all gathers; the update of every slice is done."""
        assert not self._pending, "parameters are gathered once an update"
        for number in self._order:
            if self._buckets[number].is_shared:
                self._pending[number] = self._buckets[number].start_gather()

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Wait until the parameters of these buckets (of all) are whole."""
        for number in list(self._pending) if numbers is None else numbers:
            pending = self._pending.pop(number, None)
            if pending is not None:
                pending.wait()

    def _before_use(self, numbers: Sequence[int], module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._pending:
            self.wait(numbers)
