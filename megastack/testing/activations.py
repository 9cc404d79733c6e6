"""List the tensors that a module saves for backward, as autograd reports them.

It works for your own layers too; see ``docs/activations.md``. A storage is listed once, however many views or
operations save it. Parameters, the tensors that the module received, and the tensors that it created are distinguished.
A recomputed part saves only its inputs, so only these are listed.

Example::

    for saved in saved_tensors(block, hidden_BSD, context, given=[hidden_BSD]):
        print(saved.where, saved.shape, saved.dtype, saved.bytes, saved.kind)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

StorageOrigin = Literal["made", "given", "parameter"]
PACKAGE = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Saved:
    """One storage that is saved for backward.

    Attributes:
        where: the function, file and line that first saved it.
        shape: the shape of the tensor that was saved first; the storage may be larger.
        dtype: the dtype of that tensor.
        bytes: the size of the storage.
        kind: ``made`` by the module, ``given`` to it, or a ``parameter``.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    kind: StorageOrigin

    @property
    def elements(self) -> int:
        """The number of elements of the whole storage."""
        return self.bytes // self.dtype.itemsize


def saved_tensors(module: nn.Module, *args: Any, given: Iterable[Tensor] = (), **kwargs: Any) -> list[Saved]:
    """Call ``module(*args, **kwargs)`` and list what it saves for backward, in order; ``given`` are its inputs."""
    kinds: dict[int, StorageOrigin] = {_storage(parameter): "parameter" for parameter in module.parameters()}
    kinds |= {_storage(x): "given" for x in given}
    found: dict[int, Saved] = {}
    alive: list[object] = []  # keeps storages alive, so that no address is reused

    def pack(x: Tensor) -> Tensor:
        key = _storage(x)
        if key not in found:
            size, kind = x.untyped_storage().nbytes(), kinds.get(key, "made")
            found[key] = Saved(_caller(), tuple(x.shape), x.dtype, size, kind)
        alive.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        alive.append(module(*args, **kwargs))
    return list(found.values())


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _caller() -> str:
    """The innermost line of the package that runs the saving operation, or else the line of its caller."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
