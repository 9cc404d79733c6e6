"""A Hugging Face folder: its ``config.json``, and its tensors by name, read a slice at a time.

One ``model.safetensors``, or several files with ``model.safetensors.index.json``. Opening a folder reads headers only
and proves that it is whole: every file that the index names is there and as long as its header says, every tensor is in
the file that the index says. Pickled weights are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megastack.checkpoint.manifest import MANIFEST
from megastack.errors import CheckpointError, ConfigError, counted
from megastack.interop.json_file import read_json
from megastack.interop.names import Source, Weight, sources_of
from megastack.placement.boxes import Box

RUN_CONFIG = "config.yaml"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", GENERATION, "chat_template.jinja"),
)
"""What travels beside the weights."""
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(bias|masked_bias)$")
"""Tensors of old folders that are computed, not learned."""
FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 8


class HubFolder:
    """A folder of weights that was found to be whole.

    Args:
        path: the folder.

    Raises:
        ConfigError: no folder, no ``config.json``.
        CheckpointError: no weights, or files that are missing, truncated or not what the index says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConfigError(f"{self.path}: no such folder; give a Hugging Face folder with config.json and weights")
        if not (self.path / CONFIG).is_file() and (own := _own_folder(self.path)):
            raise ConfigError(f"{self.path}: {own}")
        self.config = read_json(self.path / CONFIG)
        self._open: dict[str, Any] = {}
        files = self._files()
        self._at = {_canonical(name, self.config): (file, name) for name, file in files.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all learned tensors, those of GPT-2 with their ``transformer.`` prefix."""
        return tuple(sorted(name for name in self._at if not BUFFERS.search(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as stored."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The safetensors name of a tensor's dtype."""
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """The whole tensor as stored.

        Raises:
            CheckpointError: there is no such tensor.
        """
        file, key = self._place(name)
        return self._open[file].get_tensor(key)

    def read(self, weight: Weight, box: Box) -> Tensor:
        """A box of one of the decoder's weights; only the rows of the stored tensors that it needs are read."""
        if weight.stacked is None:
            return self._piece(weight, 0, box)
        at = weight.stacked
        inner = Box(_without(box.offset, at), _without(box.size, at))
        numbers = range(box.offset[at], box.offset[at] + box.size[at])
        return torch.stack([self._piece(weight, number, inner) for number in numbers], dim=at)

    @cached_property
    def tokenizer_size(self) -> int:
        """Ids of ``tokenizer.json``; 0 where there is no such file."""
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
            raise ConfigError(f"{path}: every token in model.vocab and added_tokens must have a whole number as its id")
        return max(ids, default=-1) + 1

    def tokenizer_files(self) -> list[Path]:
        """The files that travel beside the weights."""
        return [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def require(self, weights: Mapping[str, Weight], *, vocab: int, tied: bool) -> dict[str, Source]:
        """The stored tensors of these weights, which the folder was found to hold, and no others.

        Raises:
            CheckpointError: every tensor that is missing, unexpected, quantised or of another shape.
        """
        sources, names = sources_of(weights), set(self.names)
        extra = names - set(sources)
        errors = self._vocabulary_errors(weights, vocab)
        if tied and "lm_head.weight" in extra:
            extra.remove("lm_head.weight")
            errors += self._tie_errors(weights)
        errors += [f"missing: {_listed(missing)}"] if (missing := set(sources) - names) else []
        errors += [f"not known to this architecture: {_listed(extra)}"] if extra else []
        errors += [error for name in sorted(set(sources) & names) for error in self._tensor_errors(sources[name])]
        if errors:
            raise CheckpointError("\n".join(f"{self.path}: {error}" for error in errors))
        return sources

    def _vocabulary_errors(self, weights: Mapping[str, Weight], vocab: int) -> list[str]:
        name = weights["embedding.weight"].pieces[0].source
        rows = self.shape(name)[0] if name in self._at else vocab
        errors = [] if rows == vocab else [f"{name} has {counted(rows, 'row')}, vocab_size={vocab}; they must be equal"]
        if self.tokenizer_size > vocab:
            errors.append(
                f"tokenizer.json has {counted(self.tokenizer_size, 'id')}, vocab_size={vocab}; it must hold them all"
            )
        return errors

    def _tie_errors(self, weights: Mapping[str, Weight]) -> list[str]:
        embedding = weights["embedding.weight"].pieces[0].source
        if embedding not in self._at or torch.equal(self.tensor("lm_head.weight"), self.tensor(embedding)):
            return []
        return [f"lm_head.weight differs from {embedding}, but tie_word_embeddings=true; set it to false"]

    def _tensor_errors(self, source: Source) -> list[str]:
        found, dtype = self.shape(source.name), self.dtype(source.name)
        errors = [] if found == source.shape else [f"{source.name} is {found}, must be {source.shape}"]
        return errors + ([] if dtype in FLOATS else [f"{source.name} is {dtype}; quantised weights cannot be read"])

    def _piece(self, weight: Weight, number: int, box: Box) -> Tensor:
        """A box of one piece: whole rows of the first dim are read, the rest of the box is cut from them."""
        piece, shape = weight.pieces[number], weight.piece_shape
        outer = shape[:-1] if weight.matrix else shape
        inner = 1
        for extent in outer[1:]:
            inner *= extent
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
            raise CheckpointError(f"{self.path}: holds no {name!r}")
        return self._at[name]

    def _slice(self, name: str) -> Any:
        file, key = self._place(name)
        return self._open[file].get_slice(key)

    def _files(self) -> dict[str, str]:
        """The file of each tensor, as stored names."""
        if (self.path / INDEX).is_file():
            return self._indexed()
        if (self.path / SINGLE).is_file():
            return dict.fromkeys(self._keys(SINGLE), SINGLE)
        pickled = [path.name for path in self.path.glob("*.bin")]
        advice = f"; {_listed(pickled)} is pickled, save it as safetensors" if pickled else ""
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
        errors += [f"{self.path / INDEX}: {_listed(lost)} not in the file it names"] if lost else []
        if errors:
            raise CheckpointError("\n".join(errors))
        return files

    def _keys(self, file: str) -> set[str]:
        """The tensors of a file, which is opened and found to be as long as its header says."""
        try:
            self._open[file] = safe_open(str(self.path / file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file}: truncated or no safetensors file ({error})") from error
        return set(self._open[file].keys())


def _own_folder(path: Path) -> str | None:
    """What to say of a folder that this package wrote, which needs no import."""
    if (path / MANIFEST).is_file() or (path / RUN_CONFIG).is_file():
        return "is a checkpoint or a run of megastack, which needs no import; use it as it is, or megastack export"
    if (path / "weights" / MANIFEST).is_file():
        return "was imported already; use it as it is, with checkpoint.load_weights"
    return None


def _canonical(name: str, config: Mapping[str, Any]) -> str:
    """The full name of a tensor: early GPT-2 folders leave the prefix out."""
    bare = config.get("model_type") == "gpt2" and not name.startswith(("transformer.", "lm_head."))
    return f"transformer.{name}" if bare else name


def _without(values: tuple[int, ...], at: int) -> tuple[int, ...]:
    return values[:at] + values[at + 1 :]


def _listed(names: Any) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
