"""Boxes of the weights in a megastack checkpoint, one process and no process group; and filling a model from boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megastack.checkpoint.cover import overlap, within
from megastack.checkpoint.items import DTYPE_NAMES, DTYPES, StateItem
from megastack.checkpoint.parts import Part, read_parts
from megastack.checkpoint.reader import CheckpointReader
from megastack.errors import CheckpointError
from megastack.interop.names import Source, Weight
from megastack.placement.boxes import Box

PREFIX = "model/"


class StoredWeights:
    """The weights of a checkpoint, whose files were checked.

    Args:
        path: the checkpoint folder.

    Raises:
        CheckpointError: it is no complete checkpoint, or a file is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = CheckpointReader(path)
        self._reader.verify()
        self.trainer = self._reader.trainer

    @property
    def names(self) -> tuple[str, ...]:
        """The global names of the weights."""
        return tuple(name.removeprefix(PREFIX) for name in self._reader.names if name.startswith(PREFIX))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a weight."""
        return self._reader.dtype(PREFIX + name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a weight."""
        return self._reader.shape(PREFIX + name)

    def require(self, weights: dict[str, Weight]) -> None:
        """Check that the checkpoint holds these weights and no others.

        Raises:
            CheckpointError: every weight that is missing, unexpected or of another shape.
        """
        names = set(self.names)
        errors = [f"missing: {name}" for name in sorted(set(weights) - names)]
        errors += [f"not in the model: {name}" for name in sorted(names - set(weights))]
        errors += [
            f"{name} is {self.shape(name)}, the model's is {weights[name].shape}"
            for name in sorted(names & set(weights))
            if self.shape(name) != weights[name].shape
        ]
        if errors:
            lines = "\n".join(f"{self.path}: {error}" for error in errors)
            raise CheckpointError(f"{lines}\ngive the configuration of this checkpoint, as model=NAME and key=value")

    def read(self, weight: Weight, box: Box) -> Tensor:
        """A box of a weight; only the stored boxes that share something with it are read."""
        record = self._reader.manifest.tensors[PREFIX + weight.name]
        result = torch.empty(box.size, dtype=DTYPES[record.dtype])
        for stored in record.boxes:
            if shared := overlap(stored.box, box):
                target = result[within(shared, box).slices]
                part = Part(stored, record.dtype, within(shared, stored.box), target)
                read_parts(self.path / stored.file, [part])
        return result

    def source(self, source: Source) -> Tensor:
        """A stored tensor of a Hugging Face folder, put together from the pieces of the weights."""
        parts = [self._rows(weight, number) for weight, number in source.parts]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows.T.contiguous() if source.transposed else rows

    def source_dtype(self, source: Source) -> str:
        """The safetensors name of its dtype."""
        found = {self.dtype(weight.name) for weight, _ in source.parts}
        assert len(found) == 1, f"{source.name} would mix dtypes"
        return DTYPE_NAMES[found.pop()]

    def _rows(self, weight: Weight, number: int) -> Tensor:
        """One piece of a weight as (output features, input features), or as a vector."""
        offset, size = [0] * len(weight.shape), list(weight.shape)
        if weight.stacked is not None:
            offset[weight.stacked], size[weight.stacked] = number, 1
        values = self.read(weight, Box(tuple(offset), tuple(size)))
        return values.reshape(-1) if weight.columns is None else values.reshape(-1, weight.columns)


def fill_(items: Iterable[StateItem], weights: dict[str, Weight], read: Callable[[Weight, Box], Tensor]) -> None:
    """Fill this rank's boxes of the weights, whatever the layout; communicates nothing.

    Args:
        items: the weights of a model, from :func:`megastack.checkpoint.collect.model_items`.
        weights: the model's weights by global name.
        read: reads a box, ``HubFolder.read`` or ``StoredWeights.read``; the dtype is converted where it differs.
    """
    for item in items:
        for box, tensor in item.boxes:
            if prod(box.size):
                tensor.copy_(read(weights[item.name.removeprefix(PREFIX)], box))
