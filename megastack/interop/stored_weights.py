"""Read boxes of weights from a megastack checkpoint in one process, and fill a model's weights with boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megastack.checkpoint.folder import damage_explained
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.state import DTYPE_NAMES, DTYPES, WEIGHT_PREFIX, StateItem
from megastack.checkpoint.tensor_files import BoxRead, read_boxes
from megastack.errors import CheckpointError
from megastack.interop.weight_map import HubTensor, Weight
from megastack.placement.boxes import Box, intersect, relative_to


class StoredWeights:
    """The weights of a checkpoint; its files are checked on construction.

    Args:
        path: the checkpoint folder.

    Raises:
        CheckpointError: the folder is not a complete checkpoint, or a file is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = CheckpointReader(path)
        with damage_explained(self.path):
            self._reader.verify()
        self.trainer = self._reader.trainer

    @property
    def names(self) -> tuple[str, ...]:
        """The global names of the weights."""
        return tuple(name.removeprefix(WEIGHT_PREFIX) for name in self._reader.names if name.startswith(WEIGHT_PREFIX))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a weight."""
        return self._reader.dtype(WEIGHT_PREFIX + name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a weight."""
        return self._reader.shape(WEIGHT_PREFIX + name)

    def require(self, weights: dict[str, Weight]) -> None:
        """Check that the checkpoint holds exactly these weights.

        Raises:
            CheckpointError: a weight is missing, unexpected or has a different shape; the message names every such
                weight.
        """
        names = set(self.names)
        errors = [f"missing: {name}" for name in sorted(set(weights) - names)]
        errors += [f"not in the model: {name}" for name in sorted(names - set(weights))]
        errors += [
            f"{name} is {self.shape(name)}, must be {weights[name].shape} in this model"
            for name in sorted(names & set(weights))
            if self.shape(name) != weights[name].shape
        ]
        if errors:
            lines = "\n".join(f"{self.path}: {error}" for error in errors)
            raise CheckpointError(f"{lines}\nuse the configuration of this checkpoint, as model=NAME and key=value")

    def read(self, weight: Weight, box: Box) -> Tensor:
        """Read a box of a weight from the stored boxes that intersect it."""
        record = self._reader.manifest.tensors[WEIGHT_PREFIX + weight.name]
        result = torch.empty(box.size, dtype=DTYPES[record.dtype])
        for stored in record.boxes:
            if shared := intersect(stored.box, box):
                target = result[relative_to(shared, box).slices]
                read = BoxRead(stored, record.dtype, relative_to(shared, stored.box), target)
                read_boxes(self.path / stored.file, [read])
        return result

    def hub_tensor(self, tensor: HubTensor) -> Tensor:
        """Assemble a tensor of a Hugging Face folder from the pieces of the weights."""
        pieces = [self._rows(weight, number) for weight, number in tensor.pieces]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return rows.T.contiguous() if tensor.transposed else rows

    def hub_dtype(self, tensor: HubTensor) -> str:
        """Return the safetensors name of the tensor's dtype."""
        found = {self.dtype(weight.name) for weight, _ in tensor.pieces}
        assert len(found) == 1, f"{tensor.name} would mix dtypes"
        return DTYPE_NAMES[found.pop()]

    def _rows(self, weight: Weight, number: int) -> Tensor:
        """Return one piece of a weight as (output features, input features), or as a vector."""
        offset, size = [0] * len(weight.shape), list(weight.shape)
        if weight.stacked is not None:
            offset[weight.stacked], size[weight.stacked] = number, 1
        values = self.read(weight, Box(tuple(offset), tuple(size)))
        return values.reshape(-1) if weight.columns is None else values.reshape(-1, weight.columns)


def fill_(items: Iterable[StateItem], weights: dict[str, Weight], read: Callable[[Weight, Box], Tensor]) -> None:
    """Fill this rank's boxes of the weights on any layout, without communication.

    Args:
        items: the weights of a model, from :func:`megastack.checkpoint.state.model_items`.
        weights: the model's weights by global name.
        read: reads a box: ``HubFolder.read`` or ``StoredWeights.read``; dtypes are converted.
    """
    for item in items:
        for box, tensor in item.boxes:
            if prod(box.size):
                tensor.copy_(read(weights[item.name.removeprefix(WEIGHT_PREFIX)], box))
