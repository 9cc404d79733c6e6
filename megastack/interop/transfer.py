"""Import and export of models: check the source, write tensor by tensor, and compare logits.

An import creates a folder with

- ``weights/``, a checkpoint for ``checkpoint.load_weights`` on any layout,
- ``model/NAME.yaml``, so that ``--config-dir FOLDER model=NAME`` selects the model,
- ``huggingface/``, the original ``config.json`` and tokenizer files.

An export creates a Hugging Face folder. All inputs are checked before the first byte is written. One tensor is in
memory at a time. The folder is renamed into place after the logit comparison, and removed if the comparison fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from megastack.checkpoint.folder import IMPORTED
from megastack.checkpoint.publish import write_text
from megastack.checkpoint.state import DTYPE_NAMES, WEIGHT_PREFIX
from megastack.checkpoint.tensor_files import LazyTensor
from megastack.checkpoint.writer import write_checkpoint
from megastack.config.rules import violations
from megastack.config.schema import BatchOptions, ModelOptions, RunOptions, TrainConfig
from megastack.errors import CheckpointError, ConfigError, Violation
from megastack.interop.hub_config import HubModel, read_hub_config
from megastack.interop.hub_export import (
    byte_ids,
    choose_architecture,
    generation_config,
    hub_config,
    model_values,
    token_ids,
)
from megastack.interop.hub_folder import CONFIG, GENERATION, TOKENIZER_FILES, HubFolder, write_hub_folder
from megastack.interop.json_file import read_json
from megastack.interop.proof import Proof, ProofError, choose, prove
from megastack.interop.stored_weights import StoredWeights
from megastack.interop.weight_map import Weight, hub_tensors_of, weights_of
from megastack.models.profile import total_parameters
from megastack.placement.boxes import Box

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS, MODEL, HUB = IMPORTED, "model", "huggingface"


@dataclass(frozen=True)
class Transfer:
    """Result of an import or an export.

    Attributes:
        folder: the folder that was created.
        name: name of the model's YAML; the Hugging Face class after an export.
        parameters: number of parameters.
        files: the weight files.
        unread: keys of ``config.json`` that were not read and might matter.
        proof: the comparison of logits; None if it was disabled.
        notes: other information for the user.
    """

    folder: Path
    name: str
    parameters: int
    files: tuple[str, ...]
    unread: tuple[str, ...] = ()
    proof: Proof | None = None
    notes: tuple[str, ...] = ()


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    dtype: str = "keep",
    sequence_length: int | None = None,
    proof: str = "auto",
) -> Transfer:
    """Create a checkpoint and a model YAML from a Hugging Face folder.

    Args:
        source: the Hugging Face folder.
        out: the folder to create.
        name: name of the YAML; None derives it from the name of ``source``.
        dtype: ``keep``, or the dtype to convert the weights to.
        sequence_length: the longest sequence to train on; None for the longest that the model allows.
        proof: ``auto``, ``transformers``, ``reference`` or ``none``.

    Raises:
        ConfigError: the decoder does not support the model.
        CheckpointError: the weights are incomplete, damaged or do not match the model.
        ProofError: the logits differ.
    """
    against = choose(proof)
    folder = HubFolder(source)
    model = read_hub_config(folder.config, sequence_length=sequence_length)
    config = _config_of(model.options, min(model.context, sequence_length or model.context))
    if errors := _model_errors(config):
        raise ConfigError.of(errors)
    weights = weights_of(config, model.architecture)
    folder.require(weights, vocab=model.options.vocab, tied=model.options.tied)
    tensors = [_imported_tensor(folder, weight, dtype) for weight in weights.values()]
    name = name or _yaml_name(folder.path)
    trainer = {"step": 0, "imported": {"architecture": model.architecture.class_name, "rotary": "half-split"}}
    with _new_folder(Path(out)) as target:
        write_checkpoint(target / WEIGHTS, tensors, trainer)
        _copy_files({file.name: file for file in (folder.path / CONFIG, *folder.tokenizer_files())}, target / HUB)
        (target / MODEL).mkdir()
        (target / MODEL / f"{name}.yaml").write_text(_model_yaml(folder, model, config), encoding="utf-8")
        files = tuple(sorted(path.name for path in (target / WEIGHTS).glob("*.safetensors")))
        found = _proof(config, weights, target / WEIGHTS, folder, against)
    return Transfer(Path(out), name, total_parameters(config), files, model.unread, found, _window_notes(model))


def export_model(
    source: str | Path,
    out: str | Path,
    config: TrainConfig,
    *,
    architecture: str | None = None,
    like: str | Path | None = None,
    dtype: str = "keep",
    shard_bytes: int = 5 * 10**9,
    proof: str = "auto",
) -> Transfer:
    """Create a Hugging Face folder from a checkpoint of any layout.

    Args:
        source: the checkpoint folder.
        out: the folder to create.
        config: the configuration of the checkpoint's run, whose model, sequence length and tokenizer are read.
        architecture: the class to write; None for the class that the model's features imply.
        like: a folder to copy tokenizer files and token ids from; None uses the run's tokenizer. Ids that its
            ``config.json`` lacks come from the tokenizer's files.
        dtype: ``keep``, or the dtype to convert the weights to.
        shard_bytes: the largest weight file.
        proof: ``auto``, ``transformers``, ``reference`` or ``none``.

    Raises:
        ConfigError: no class can express the model; the message lists the reasons.
        CheckpointError: the checkpoint is damaged or does not match the model.
        ProofError: the logits differ.
    """
    against = choose(proof)
    target_class = choose_architecture(config.model, architecture)
    weights = weights_of(config, target_class)
    stored = StoredWeights(source)
    stored.require(weights)
    tensors = _exported_tensors(stored, weights, dtype)
    found = _tokenizer(Path(source), config, like)
    values = hub_config(config, target_class, _dtype_name(tensors), found.original, found.ids)
    with _new_folder(Path(out)) as target:
        files = write_hub_folder(target, tensors, values, shard_bytes)
        _copy_files(found.files, target)
        if GENERATION not in found.files and (generation := generation_config(found.ids)):
            write_text(target / GENERATION, json.dumps(generation, indent=2, sort_keys=True) + "\n")
        written = HubFolder(target)
        written.require(weights, vocab=config.model.vocab, tied=config.model.tied)
        compared = _proof(config, weights, Path(source), written, against)
    return Transfer(
        Path(out), target_class.class_name, total_parameters(config), tuple(files), (), compared, found.notes
    )


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Create a hidden folder that is renamed to ``path`` at the end, or removed if the body raises.

    Raises:
        ConfigError: ``path`` exists and is not empty, or cannot be written.
    """
    target = path.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--out {path}: is taken; use a folder that does not exist or is empty")
    hidden = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        hidden.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error})") from error
    try:
        yield hidden
        if target.exists():
            target.rmdir()
        os.rename(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _proof(
    config: TrainConfig, weights: dict[str, Weight], checkpoint: Path, folder: HubFolder, against: str
) -> Proof | None:
    if against == "none":
        return None
    found = prove(config, weights, StoredWeights(checkpoint), folder, against)
    if not found.holds:
        raise ProofError(found)
    return found


def _config_of(model: ModelOptions, length: int) -> TrainConfig:
    """Return the configuration of a minimal run of this model, for building and describing it."""
    return TrainConfig(run=RunOptions(steps=1), batch=BatchOptions(global_size=1, sequence_length=length), model=model)


def _model_errors(config: TrainConfig) -> list[Violation]:
    """Return the errors of the model's options; the fit of its vocabulary to the data is checked only for a run."""
    return [error for error in violations(config) if error.key.startswith("model.") and error.key != "model.vocab"]


def _imported_tensor(folder: HubFolder, weight: Weight, dtype: str) -> LazyTensor:
    """Return a weight of the checkpoint, which is read from the folder when it is written."""
    found = {folder.dtype(piece.source) for piece in weight.pieces}
    if dtype == "keep" and len(found) > 1:
        sources = ", ".join(piece.source for piece in weight.pieces)
        raise CheckpointError(f"{folder.path}: {sources} have dtypes {', '.join(sorted(found))}; use --dtype fp32")
    kept = found.pop()
    box = Box((0,) * len(weight.shape), weight.shape)
    name = kept if dtype == "keep" else DTYPE_NAMES[TORCH_DTYPES[dtype]]
    return LazyTensor(
        WEIGHT_PREFIX + weight.name, name, weight.shape, lambda: _converted(folder.read(weight, box), dtype)
    )


def _exported_tensors(stored: StoredWeights, weights: dict[str, Weight], dtype: str) -> list[LazyTensor]:
    """Return the tensors of the folder, each assembled from the checkpoint when it is written."""
    return [
        LazyTensor(
            tensor.name,
            stored.hub_dtype(tensor) if dtype == "keep" else DTYPE_NAMES[TORCH_DTYPES[dtype]],
            tensor.shape,
            lambda tensor=tensor: _converted(stored.hub_tensor(tensor), dtype),  # type: ignore[misc]
        )
        for tensor in hub_tensors_of(weights).values()
    ]


def _converted(tensor: Tensor, dtype: str) -> Tensor:
    return tensor if dtype == "keep" else tensor.to(TORCH_DTYPES[dtype])


def _dtype_name(tensors: Sequence[LazyTensor]) -> str:
    """Return the dtype of the majority of the bytes, as spelled in ``config.json``."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.nbytes
    most = max(totals, key=lambda name: totals[name])
    return next(str(dtype) for dtype, name in DTYPE_NAMES.items() if name == most).removeprefix("torch.")


@dataclass(frozen=True)
class _ExportedTokenizer:
    """Files and token ids that are exported with the weights.

    Attributes:
        files: the files by their name in the exported folder.
        original: the ``config.json`` next to them.
        ids: token ids by key.
        notes: information for the user.
    """

    files: dict[str, Path]
    original: dict[str, Any] | None
    ids: dict[str, Any]
    notes: tuple[str, ...] = ()


def _tokenizer(checkpoint: Path, config: TrainConfig, like: str | Path | None) -> _ExportedTokenizer:
    """Find tokenizer files and ids in ``like``, in the imported folder, or from the run's tokenizer."""
    imported, named = checkpoint.absolute().parent / HUB, config.data.tokenizer
    if like is not None and not Path(like).is_dir():
        raise ConfigError(f"--like {like}: no such folder")
    folder = Path(like) if like is not None else imported if imported.is_dir() else None
    own = Path(named) if folder is None and named != "byte" else None
    if own is not None and own.is_file():
        folder = own.parent
    if folder is None:
        return _without_files(config)
    files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    if own is not None:
        files["tokenizer.json"] = own
    original = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    return _ExportedTokenizer(files, original, token_ids(files, original, vocab=config.model.vocab))


def _without_files(config: TrainConfig) -> _ExportedTokenizer:
    if config.data.tokenizer != "byte":
        note = f"data.tokenizer={config.data.tokenizer} does not exist: no tokenizer files, no token ids; use --like"
        return _ExportedTokenizer({}, None, token_ids({}), (note,))
    if config.data.source == "bin":
        return _ExportedTokenizer({}, None, token_ids({}), ("no tokenizer files and no token ids: use --like",))
    return _ExportedTokenizer({}, None, byte_ids(config.model.vocab))


def _copy_files(files: Mapping[str, Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, file in files.items():
        shutil.copyfile(file, folder / name)


def _window_notes(model: HubModel) -> tuple[str, ...]:
    if model.window is None:
        return ()
    return (f"the class attends to {model.window} tokens: only sequences up to that length give the same results",)


def _yaml_name(folder: Path) -> str:
    return re.sub(r"\W+", "_", folder.resolve().name.lower()).strip("_") or "imported"


def _model_yaml(folder: HubFolder, model: HubModel, config: TrainConfig) -> str:
    name, size = folder.path.resolve().name, total_parameters(config)
    head = f"# {model.architecture.class_name} from {name}, {size:,} parameters.\n"
    head += "".join(f"# {note[0].upper()}{note[1:]}.\n" for note in _window_notes(model))
    return head + OmegaConf.to_yaml(OmegaConf.create(model_values(config.model)))
