"""Read a checkpoint without the layout that wrote it: one process, no process group, whole tensors by name."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastack.checkpoint.cover import whole
from megastack.checkpoint.items import DTYPES
from megastack.checkpoint.manifest import (
    TRAINER,
    Manifest,
    TensorRecord,
    file_error,
    read_manifest,
    read_trainer,
)
from megastack.checkpoint.parts import Part, read_parts
from megastack.checkpoint.publish import listed
from megastack.checkpoint.usable import checkpoint_error
from megastack.errors import CheckpointError


class CheckpointReader:
    """A checkpoint folder as a mapping from names to global tensors.

    A file is checked against the manifest the first time that something is read from it.

    Raises:
        CheckpointError: the folder holds no complete checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._manifest = read_manifest(self.path)
        self._checked: set[str] = set()

    @property
    def manifest(self) -> Manifest:
        """The files and tensors, as recorded."""
        return self._manifest

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted."""
        return tuple(sorted(self._manifest.tensors))

    @cached_property
    def trainer(self) -> dict[str, Any]:
        """The trainer's state: step, consumed samples, seed, whatever the training loop recorded."""
        self._check(TRAINER)
        return read_trainer(self.path)

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a tensor."""
        return self._record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return DTYPES[self._record(name).dtype]

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU.

        Raises:
            CheckpointError: there is no such name, or a file that holds a part of it is damaged.
        """
        tensor = self._record(name)
        result = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        for record in tensor.boxes:
            self._check(record.file)
            part = Part(record, tensor.dtype, whole(record.box.size), result[record.box.slices])
            read_parts(self.path / record.file, [part])
        return result

    def verify(self) -> None:
        """Check every file's size and content.

        Raises:
            CheckpointError: naming each damaged file.
        """
        if error := checkpoint_error(self.path):
            raise CheckpointError(error)

    def _record(self, name: str) -> TensorRecord:
        if name not in self._manifest.tensors:
            raise CheckpointError(f"{self.path}: holds no {name!r}; it has {listed(self.names)}")
        return self._manifest.tensors[name]

    def _check(self, name: str) -> None:
        if name in self._checked:
            return
        if error := file_error(self.path, self._manifest.files[name]):
            raise CheckpointError(error)
        self._checked.add(name)
