"""Why a module's output may differ without any layout: probes of single modules on one rank.

Each probed module is called again with the inputs of its first call. With the state of every random number generator
put back, the output must be the same, or the module keeps state between calls or is not deterministic at all; two runs
tell which. With one generator in another state it must be the same too, or the module draws from that generator, whose
numbers depend on what each process drew before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megastack.testing.module_trace import TensorKey, output_slots, relative_difference, slots

OTHER_SEED = 20_011
GENERATORS: Mapping[str, Callable[[int], Any]] = {
    "torch's generator": torch.manual_seed,
    "Python's random module": random.seed,
    "NumPy's global generator": np.random.seed,
}
"""Generators of the process, and how to seed each."""
Tensors = Mapping[TensorKey, Tensor]


def seed_generators(seed: int) -> None:
    """Give every generator of the process a state of its own: what draws from one must not agree by luck."""
    for seed_one in GENERATORS.values():
        seed_one(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the state of every generator back at the end."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@dataclass(frozen=True)
class Probed:
    """What the calls of one module gave.

    Attributes:
        inputs: of the first call.
        outputs: of the first call.
        repeats: whether a second call gave the same.
        draws: the generators that it draws from.
    """

    inputs: Tensors
    outputs: Tensors
    repeats: bool
    draws: tuple[str, ...] = ()


class Prober:
    """Hooks that call modules again after their first call.

    Args:
        modules: modules by name.
        tolerance: the relative difference that rounding may make.

    Attributes:
        active: whether calls are probed.
        found: by name, in the order in which the calls ended.
    """

    def __init__(self, modules: Mapping[str, nn.Module], tolerance: float) -> None:
        self.active = True
        self.found: dict[str, Probed] = {}
        self._tolerance = tolerance
        self._kept: dict[str, tuple[Any, ...]] = {}
        for name, module in modules.items():
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(partial(self._after, name))

    def _before(self, name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.active and name not in self.found:
            states = torch.get_rng_state(), random.getstate(), np.random.get_state()
            self._kept[name] = (_copied(arguments), _copied(named), states)

    def _after(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not self.active or name not in self._kept or name in self.found:
            return
        given, named, (of_torch, of_python, of_numpy) = self._kept.pop(name)
        outputs = {slot: x.detach().clone() for slot, x in output_slots(output)}

        def again(reseed: Callable[[int], Any] | None = None) -> bool:
            with generators_kept():
                torch.set_rng_state(of_torch)
                random.setstate(of_python)
                np.random.set_state(of_numpy)
                if reseed is not None:
                    reseed(OTHER_SEED)
                return _same(outputs, dict(output_slots(module.forward(*_copied(given), **_copied(named)))), tolerance)

        tolerance, self.active = self._tolerance, False
        try:
            repeats = again()
            draws = tuple(which for which, reseed in GENERATORS.items() if repeats and not again(reseed))
        except Exception:  # whatever the user's code raises at a second call: that tells nothing
            return
        finally:
            self.active = True
        inputs = dict(slots([*enumerate(given), *named.items()]))
        self.found[name] = Probed({slot: x.detach() for slot, x in inputs.items()}, outputs, repeats, draws)


def _copied(value: Any) -> Any:
    """Containers and tensors copied, so that a module may change what it is given; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def _same(a: Tensors, b: Tensors, tolerance: float) -> bool:
    if {slot: x.shape for slot, x in a.items()} != {slot: x.shape for slot, x in b.items()}:
        return False
    return all(relative_difference(x, b[slot], x) <= tolerance for slot, x in a.items() if x.numel())


def reasons(runs: Sequence[Mapping[str, Probed]], tolerance: float) -> dict[str, str]:
    """Of two runs on one rank with the same seeds: the modules that depend on more than their input, and on what."""
    one, other = runs
    found = {}
    for name, probed in one.items():
        again = other.get(name)
        if again is None or not _same(probed.inputs, again.inputs, tolerance):
            continue  # what it was given differs already
        if not _same(probed.outputs, again.outputs, tolerance):
            found[name] = (
                "is not deterministic: two runs on one rank, with the same seeds and the same input, give two outputs"
            )
        elif not probed.repeats:
            found[name] = (
                "keeps state between calls: called again on one rank with the same input, it gives another output, and "
                "how many calls came before depends on the layout"
            )
        elif probed.draws:
            which = " and ".join(probed.draws)
            found[name] = (
                f"draws from {which}: two runs on one rank differ where nothing but its state does; take numbers from "
                "megastack.random, or drop with megastack.layers.dropout, which do not depend on the layout"
            )
    return found
