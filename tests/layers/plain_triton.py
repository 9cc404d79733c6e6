"""The part of Triton that the package's kernels use, in torch operations: one program after another, on the CPU.

:func:`installed` puts it in the place of ``triton`` where that is not installed, so that the source of the kernels runs
in every test session: indices, masks and arithmetic, but neither Triton's compiler nor its types.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_program: tuple[int, ...] = ()


class Pointer:
    """Addresses in the storage of a tensor, in elements from its first one."""

    def __init__(self, memory: Tensor, places: Any = 0) -> None:
        self.memory, self.places = memory, places
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def of(cls, x: Tensor) -> Pointer:
        length = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(x.as_strided((length,), (1,)))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.places + offset)


class Kernel:
    """A function that is launched over a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, **constants: Any) -> None:
            global _program
            given = [Pointer.of(x) if isinstance(x, Tensor) else x for x in arguments]
            for _program in itertools.product(*map(range, grid)):
                self.function(*given, **constants)

        return launch


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    places = torch.as_tensor(pointer.places)
    if mask is None:
        return pointer.memory[places]
    mask, places = torch.broadcast_tensors(mask, places)
    return torch.where(mask, pointer.memory[places.where(mask, 0)], other)


def store(pointer: Pointer, values: Tensor, mask: Any = None) -> None:
    inside = torch.as_tensor(True if mask is None else mask)
    values, places, inside = torch.broadcast_tensors(values, torch.as_tensor(pointer.places), inside)
    assert values.dtype == pointer.memory.dtype
    pointer.memory[places[inside].long()] = values[inside]


@contextmanager
def installed() -> Iterator[None]:
    """Make it importable as ``triton`` inside."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(
        jit=Kernel,
        language=language,
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )
    vars(language).update(
        constexpr=lambda value: value,
        program_id=lambda axis: torch.tensor(_program[axis], dtype=torch.int32),
        arange=lambda start, end: torch.arange(start, end, dtype=torch.int32),
        zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        minimum=min,
        load=load,
        store=store,
        **{name: getattr(torch, name) for name in ("int64", "float32", "sum", "sqrt", "sigmoid", "where")},
    )
    modules = {"triton": triton, "triton.language": language}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
