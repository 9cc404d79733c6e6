"""Hugging Face folders: read ``config.json`` and tensors by name, slice by slice; and write a folder.

The weights are in ``model.safetensors``, or in several files with ``model.safetensors.index.json``. Opening a folder
reads headers only and checks that it is complete: every file that the index names exists and has the length that its
header implies, and every tensor is in the file that the index names. Pickled weights are not supported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megastack.checkpoint.folder import IMPORTED, RUN_CONFIG
from megastack.checkpoint.integrity import list_names
from megastack.checkpoint.manifest import MANIFEST
from megastack.checkpoint.publish import write_text
from megastack.checkpoint.tensor_files import LazyTensor, group_by_size, write_tensors
from megastack.errors import CheckpointError, ConfigError, counted
from megastack.interop.json_file import read_json
from megastack.interop.weight_map import HubTensor, Weight, hub_tensors_of
from megastack.placement.boxes import Box

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", GENERATION, "chat_template.jinja"),
)
"""Files that are copied with the weights."""
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(bias|masked_bias)$")
"""Tensors of old folders that are computed rather than learned."""
FLOATS = ("F64", "F32", "F16", "BF16")


class HubFolder:
    """A complete folder of weights.

    Args:
        path: the folder.

    Raises:
        ConfigError: the folder or its ``config.json`` does not exist.
        CheckpointError: the folder has no weights, or files are missing, truncated or do not match the index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConfigError(f"{self.path}: no such folder; use a Hugging Face folder with config.json and weights")
        if not (self.path / CONFIG).is_file() and (own := _own_folder(self.path)):
            raise ConfigError(f"{self.path}: {own}")
        self.config = read_json(self.path / CONFIG)
        self._open: dict[str, Any] = {}
        files = self._files()
        self._at = {_canonical(name, self.config): (file, name) for name, file in files.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all learned tensors; names of GPT-2 include the ``transformer.`` prefix."""
        return tuple(sorted(name for name in self._at if not BUFFERS.search(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as stored."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the safetensors name of a tensor's dtype."""
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """Read a whole tensor as stored.

        Raises:
            CheckpointError: the folder has no such tensor.
        """
        file, key = self._place(name)
        return self._open[file].get_tensor(key)

    def read(self, weight: Weight, box: Box) -> Tensor:
        """Read a box of one of the decoder's weights, using only the required rows of the stored tensors."""
        if weight.stacked is None:
            return self._piece(weight, 0, box)
        at = weight.stacked
        inner = Box(_without(box.offset, at), _without(box.size, at))
        numbers = range(box.offset[at], box.offset[at] + box.size[at])
        return torch.stack([self._piece(weight, number, inner) for number in numbers], dim=at)

    @cached_property
    def tokenizer_size(self) -> int:
        """Number of ids in ``tokenizer.json``; 0 without the file."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            return 0
        values = read_json(path)
        model, added = values.get("model") or {}, values.get("added_tokens") or []
        vocabulary = (model.get("vocab") if isinstance(model, dict) else None) or {}
        if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
            raise ConfigError(f"{path}: model.vocab must be an object or a list, added_tokens a list")
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        ids += [each.get("id") if isinstance(each, dict) else None for each in added]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise ConfigError(f"{path}: every token in model.vocab and added_tokens must have an integer id")
        return max(ids, default=-1) + 1

    def tokenizer_files(self) -> list[Path]:
        """Return the tokenizer's files that exist."""
        return [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def require(self, weights: Mapping[str, Weight], *, vocab: int, tied: bool) -> dict[str, HubTensor]:
        """Check that the folder contains exactly the tensors of these weights, and return them by name.

        Raises:
            CheckpointError: a tensor is missing, unexpected, quantised or has a different shape; the message names
                every such tensor.
        """
        tensors, names = hub_tensors_of(weights), set(self.names)
        extra = names - set(tensors)
        errors = self._vocabulary_errors(weights, vocab)
        if tied and "lm_head.weight" in extra:
            extra.remove("lm_head.weight")
            errors += self._tie_errors(weights)
        errors += [f"missing: {list_names(sorted(missing))}"] if (missing := set(tensors) - names) else []
        errors += [f"not known to this architecture: {list_names(sorted(extra))}"] if extra else []
        errors += [error for name in sorted(set(tensors) & names) for error in self._tensor_errors(tensors[name])]
        if errors:
            raise CheckpointError("\n".join(f"{self.path}: {error}" for error in errors))
        return tensors

    def _vocabulary_errors(self, weights: Mapping[str, Weight], vocab: int) -> list[str]:
        name = weights["embedding.weight"].pieces[0].source
        rows = self.shape(name)[0] if name in self._at else vocab
        errors = [] if rows == vocab else [f"{name} has {counted(rows, 'row')}, vocab_size={vocab}; they must be equal"]
        if self.tokenizer_size > vocab:
            errors.append(
                f"tokenizer.json has {counted(self.tokenizer_size, 'id')}, vocab_size={vocab}; it must hold all of them"
            )
        return errors

    def _tie_errors(self, weights: Mapping[str, Weight]) -> list[str]:
        embedding = weights["embedding.weight"].pieces[0].source
        if embedding not in self._at or torch.equal(self.tensor("lm_head.weight"), self.tensor(embedding)):
            return []
        return [f"lm_head.weight differs from {embedding}, but tie_word_embeddings=true; set it to false"]

    def _tensor_errors(self, tensor: HubTensor) -> list[str]:
        found, dtype = self.shape(tensor.name), self.dtype(tensor.name)
        errors = [] if found == tensor.shape else [f"{tensor.name} is {found}, must be {tensor.shape}"]
        return errors + ([] if dtype in FLOATS else [f"{tensor.name} is {dtype}; quantised weights cannot be read"])

    def _piece(self, weight: Weight, number: int, box: Box) -> Tensor:
        """Read a box of one piece: read whole rows of its first dim, and slice the rest of the box from them."""
        piece, shape = weight.pieces[number], weight.piece_shape
        outer = shape[:-1] if weight.matrix else shape
        inner = prod(outer[1:])
        first, count = box.offset[0], box.size[0]
        rows = slice(piece.start + first * inner, piece.start + (first + count) * inner)
        stored = self._slice(piece.source)
        if weight.matrix:
            columns = slice(box.offset[-1], box.offset[-1] + box.size[-1])
            values = stored[columns, rows].T if piece.transposed else stored[rows, columns]
            rest = Box((0, *box.offset[1:-1], 0), (count, *box.size[1:-1], box.size[-1]))
            return values.reshape(count, *outer[1:], box.size[-1])[rest.slices]
        rest = Box((0, *box.offset[1:]), box.size)
        return stored[rows].reshape(count, *outer[1:])[rest.slices]

    def _place(self, name: str) -> tuple[str, str]:
        if name not in self._at:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return self._at[name]

    def _slice(self, name: str) -> Any:
        file, key = self._place(name)
        return self._open[file].get_slice(key)

    def _files(self) -> dict[str, str]:
        """Return the file of each tensor, by its stored name."""
        if (self.path / INDEX).is_file():
            return self._indexed()
        if (self.path / SINGLE).is_file():
            return dict.fromkeys(self._keys(SINGLE), SINGLE)
        pickled = [path.name for path in self.path.glob("*.bin")]
        advice = f"; {list_names(sorted(pickled))} is pickled, save it as safetensors" if pickled else ""
        raise CheckpointError(f"{self.path}: no weights; use a folder with {SINGLE} or {INDEX}{advice}")

    def _indexed(self) -> dict[str, str]:
        files = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{self.path / INDEX}: must have a weight_map from tensors to files")
        errors, held = [], {}
        for file in sorted(set(files.values())):
            if Path(file).name != file or not (self.path / file).is_file():
                errors.append(f"{self.path / INDEX}: names {file}, which is missing from the folder")
                continue
            try:
                held[file] = self._keys(file)
            except CheckpointError as error:
                errors.append(str(error))
        lost = [name for name, file in files.items() if file in held and name not in held[file]]
        errors += [f"{self.path / INDEX}: {list_names(sorted(lost))} not in the file that it names"] if lost else []
        if errors:
            raise CheckpointError("\n".join(errors))
        return files

    def _keys(self, file: str) -> set[str]:
        """Open a file, which checks its length against its header, and return the names of its tensors."""
        try:
            self._open[file] = safe_open(str(self.path / file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file}: truncated or not a safetensors file ({error})") from error
        return set(self._open[file].keys())


def write_hub_folder(
    folder: Path, tensors: Sequence[LazyTensor], config: Mapping[str, Any], shard_bytes: int
) -> list[str]:
    """Write ``config.json`` and the weights, as several files with an index if one file would exceed ``shard_bytes``.

    One tensor is in memory at a time.

    Returns:
        The names of the weight files.
    """
    groups = list(group_by_size(tensors, shard_bytes))
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    names = [SINGLE] if len(groups) == 1 else names
    for name, group in zip(names, groups, strict=True):
        write_tensors(folder / name, group)
    if len(groups) > 1:
        files = {tensor.key: name for name, group in zip(names, groups, strict=True) for tensor in group}
        index = {"metadata": {"total_size": sum(x.nbytes for x in tensors)}, "weight_map": dict(sorted(files.items()))}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    write_text(folder / CONFIG, json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    return names


def _own_folder(path: Path) -> str | None:
    """Return an error for a folder that megastack wrote, which does not need to be imported."""
    if (path / MANIFEST).is_file() or (path / RUN_CONFIG).is_file():
        return "is a checkpoint or a run of megastack; use it without an import, or megastack export"
    if (path / IMPORTED / MANIFEST).is_file():
        return "is already imported; use it with checkpoint.load_weights"
    return None


def _canonical(name: str, config: Mapping[str, Any]) -> str:
    """Return the full name of a tensor: early GPT-2 folders omit the prefix."""
    bare = config.get("model_type") == "gpt2" and not name.startswith(("transformer.", "lm_head."))
    return f"transformer.{name}" if bare else name


def _without(values: tuple[int, ...], at: int) -> tuple[int, ...]:
    return values[:at] + values[at + 1 :]
