"""Purity checks: whether a module's output depends on more than its input, even on one rank.

Each checked module is called again with the inputs of its first call. If the state of every random number generator is
restored, the output must be the same; otherwise the module keeps state between calls or is not deterministic, and two
runs show which. If the state of one generator is then changed, the output must still be the same; otherwise the module
draws from that generator, whose numbers depend on the earlier draws of each process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megastack.testing.localize import is_packaged
from megastack.testing.module_trace import TensorKey, output_tensors, relative_difference, tensors_in

OTHER_SEED = 20_011
GENERATORS: Mapping[str, Callable[[int], object]] = {
    "torch's generator": torch.manual_seed,
    "Python's random module": random.seed,
    "NumPy's global generator": np.random.seed,
}
"""The generators of the process, and the function that seeds each."""
Tensors = Mapping[TensorKey, Tensor]


def seed_generators(seed: int) -> None:
    """Seed every generator of the process."""
    for seed_one in GENERATORS.values():
        seed_one(seed)


@dataclass(frozen=True)
class GeneratorSnapshot:
    """The state of every generator of the process."""

    torch_state: Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def current(cls) -> GeneratorSnapshot:
        """The current states."""
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Restore the state of every generator."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Context manager that restores the state of every generator on exit."""
    states = GeneratorSnapshot.current()
    try:
        yield
    finally:
        states.restore()


@dataclass(frozen=True)
class ModuleCheck:
    """The result of calling one module again.

    Attributes:
        inputs: the inputs of the first call.
        outputs: the outputs of the first call.
        repeats: whether a second call returned the same.
        draws: the generators that the module draws from.
    """

    inputs: Tensors
    outputs: Tensors
    repeats: bool
    draws: tuple[str, ...] = ()


def modules_to_check(modules: Mapping[str, nn.Module], faulty: Collection[str]) -> dict[str, nn.Module]:
    """The modules whose class is not the package's, and the ``faulty`` ones."""
    return {name: x for name, x in modules.items() if name in faulty or not is_packaged(x)}


class PurityChecker:
    """Hooks that call modules again after their first call.

    Args:
        modules: modules by name.
        tolerance: the relative difference that rounding may cause.

    Attributes:
        active: whether calls are checked.
        checked: the results by name, in the order in which the calls ended.
    """

    def __init__(self, modules: Mapping[str, nn.Module], tolerance: float) -> None:
        self.active = True
        self.checked: dict[str, ModuleCheck] = {}
        self._tolerance = tolerance
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], GeneratorSnapshot]] = {}
        for name, module in modules.items():
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(partial(self._after, name))

    def _before(self, name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.active and name not in self.checked:
            self._calls[name] = (_copied(arguments), _copied(named), GeneratorSnapshot.current())

    def _after(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not self.active or name not in self._calls or name in self.checked:
            return
        arguments, named, states = self._calls.pop(name)
        outputs = {key: x.detach().clone() for key, x in output_tensors(output)}

        def repeats(reseed: Callable[[int], object] | None = None) -> bool:
            with preserved_generators():
                states.restore()
                if reseed is not None:
                    reseed(OTHER_SEED)
                again = module.forward(*_copied(arguments), **_copied(named))
                return _same(outputs, dict(output_tensors(again)), self._tolerance)

        self.active = False
        try:
            unchanged = repeats()
            draws = tuple(which for which, reseed in GENERATORS.items() if unchanged and not repeats(reseed))
        except Exception:  # the user's code may raise anything at a second call, which proves nothing
            return
        finally:
            self.active = True
        inputs = {key: x.detach() for key, x in tensors_in([*enumerate(arguments), *named.items()])}
        self.checked[name] = ModuleCheck(inputs, outputs, unchanged, draws)


def _copied(value: Any) -> Any:
    """A copy of tensors and containers, since a module may change its arguments; other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def _same(a: Tensors, b: Tensors, tolerance: float) -> bool:
    if {key: x.shape for key, x in a.items()} != {key: x.shape for key, x in b.items()}:
        return False
    return all(relative_difference(x, b[key], x) <= tolerance for key, x in a.items() if x.numel())


def impure_modules(runs: Sequence[Mapping[str, ModuleCheck]], tolerance: float) -> dict[str, str]:
    """The modules that depend on more than their input, and on what, from two runs on one rank with the same seeds."""
    one, other = runs
    found = {}
    for name, check in one.items():
        again = other.get(name)
        if again is None or not _same(check.inputs, again.inputs, tolerance):
            continue  # its input differs already
        if not _same(check.outputs, again.outputs, tolerance):
            found[name] = (
                "is not deterministic: two runs on one rank, with the same seeds and input, return different outputs"
            )
        elif not check.repeats:
            found[name] = (
                "keeps state between calls: a second call on one rank with the same input returns another output, and "
                "the number of earlier calls depends on the layout"
            )
        elif check.draws:
            which = " and ".join(check.draws)
            found[name] = (
                f"draws from {which}: on one rank, its output changes with the state of that generator; draw from "
                "megastack.random, or use megastack.layers.dropout, which do not depend on the layout"
            )
    return found
