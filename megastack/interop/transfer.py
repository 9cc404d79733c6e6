"""Import and export as functions: read what is there, refuse what does not fit, write tensor by tensor, prove.

An import makes a folder with

- ``weights/``, a checkpoint for ``checkpoint.load_weights`` on any layout,
- ``model/NAME.yaml``, so that ``--config-dir FOLDER model=NAME`` is the model,
- ``huggingface/``, the original ``config.json`` and tokenizer files.

An export makes a Hugging Face folder. Everything is checked before the first byte is written, the proof is done before
the folder gets its name, and a folder whose proof fails is not kept.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from megastack.checkpoint.find import IMPORTED
from megastack.checkpoint.items import DTYPE_NAMES
from megastack.checkpoint.publish import write_text
from megastack.checkpoint.tensorfile import Block
from megastack.config.rules import violations
from megastack.config.schema import BatchOptions, ModelOptions, RunOptions, TrainConfig
from megastack.errors import CheckpointError, ConfigError, Violation
from megastack.interop.folder import CONFIG, GENERATION, TOKENIZER_FILES, HubFolder
from megastack.interop.hub_config import HubModel, read_hub_config
from megastack.interop.hub_export import choose_architecture, hub_config, model_values
from megastack.interop.json_file import read_json
from megastack.interop.names import Weight, sources_of, weights_of
from megastack.interop.proof import Proof, ProofError, choose, prove
from megastack.interop.stored import PREFIX, StoredWeights
from megastack.interop.token_ids import byte_ids, generation_config, token_ids
from megastack.interop.writing import new_folder, write_checkpoint, write_hub_folder
from megastack.models.profile import total_parameters
from megastack.placement.boxes import Box

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS, MODEL, HUB = IMPORTED, "model", "huggingface"


@dataclass(frozen=True)
class Transfer:
    """What an import or an export did.

    Attributes:
        folder: what it made.
        name: name of the model's YAML; the Hugging Face class after an export.
        parameters: how many parameters went over.
        files: the weight files.
        unread: keys of ``config.json`` that were not looked at and might matter.
        proof: the comparison at the end, None where it was not wanted.
        notes: what else the user should know.
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
    """Make a checkpoint and a model YAML from a Hugging Face folder.

    Args:
        source: the folder.
        out: the folder to make.
        name: name of the YAML; None makes one from the name of ``source``.
        dtype: ``keep``, or what to convert the weights to.
        sequence_length: the longest sequence it will be trained on; None is the longest the model allows.
        proof: ``auto``, ``transformers``, ``reference`` or ``none``.

    Raises:
        ConfigError: the model is not one that the decoder can be.
        CheckpointError: the weights are incomplete, damaged or not those of the model.
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
    blocks = [_import_block(folder, weight, dtype) for weight in weights.values()]
    name = name or _yaml_name(folder.path)
    trainer = {"step": 0, "imported": {"architecture": model.architecture.class_name, "rotary": "half-split"}}
    with new_folder(Path(out)) as target:
        write_checkpoint(target / WEIGHTS, blocks, trainer)
        _carry({file.name: file for file in (folder.path / CONFIG, *folder.tokenizer_files())}, target / HUB)
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
    """Make a Hugging Face folder from a checkpoint of any layout.

    Args:
        source: the checkpoint folder.
        out: the folder to make.
        config: the run that the checkpoint belongs to; its model, sequence length and tokenizer are read.
        architecture: the class to write; None takes the one that the model's features ask for.
        like: a folder whose tokenizer files and token ids are carried along; None is the tokenizer's own. What no
            ``config.json`` says of token ids, the tokenizer's files do.
        dtype: ``keep``, or what to convert the weights to.
        shard_bytes: the largest weight file.
        proof: ``auto``, ``transformers``, ``reference`` or ``none``.

    Raises:
        ConfigError: no class can express the model, with the reasons.
        CheckpointError: the checkpoint is damaged or not of this model.
        ProofError: the logits differ.
    """
    against = choose(proof)
    target_class = choose_architecture(config.model, architecture)
    weights = weights_of(config, target_class)
    stored = StoredWeights(source)
    stored.require(weights)
    blocks = _export_blocks(stored, weights, dtype)
    found = _tokenizer(Path(source), config, like)
    values = hub_config(config, target_class, _dtype_word(blocks), found.original, found.ids)
    with new_folder(Path(out)) as target:
        files = write_hub_folder(target, blocks, values, shard_bytes)
        _carry(found.files, target)
        if GENERATION not in found.files and (generation := generation_config(found.ids)):
            write_text(target / GENERATION, json.dumps(generation, indent=2, sort_keys=True) + "\n")
        written = HubFolder(target)
        written.require(weights, vocab=config.model.vocab, tied=config.model.tied)
        compared = _proof(config, weights, Path(source), written, against)
    return Transfer(
        Path(out), target_class.class_name, total_parameters(config), tuple(files), (), compared, found.notes
    )


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
    """A run of this model, as far as building and describing it need one."""
    return TrainConfig(run=RunOptions(steps=1), batch=BatchOptions(global_size=1, sequence_length=length), model=model)


def _model_errors(config: TrainConfig) -> list[Violation]:
    """What the rules have against the model itself; that its vocabulary fits the data is asked of a run."""
    return [error for error in violations(config) if error.key.startswith("model.") and error.key != "model.vocab"]


def _import_block(folder: HubFolder, weight: Weight, dtype: str) -> Block:
    """A weight to be written whole, read when its turn comes."""
    found = {folder.dtype(piece.source) for piece in weight.pieces}
    if dtype == "keep" and len(found) > 1:
        sources = ", ".join(piece.source for piece in weight.pieces)
        raise CheckpointError(f"{folder.path}: {sources} have dtypes {', '.join(sorted(found))}; use --dtype fp32")
    kept = found.pop()
    box = Box((0,) * len(weight.shape), weight.shape)
    name = kept if dtype == "keep" else DTYPE_NAMES[TORCH_DTYPES[dtype]]
    return Block(PREFIX + weight.name, name, weight.shape, lambda: _converted(folder.read(weight, box), dtype))


def _export_blocks(stored: StoredWeights, weights: dict[str, Weight], dtype: str) -> list[Block]:
    """The stored tensors to be written, each put together when its turn comes."""
    return [
        Block(
            source.name,
            stored.source_dtype(source) if dtype == "keep" else DTYPE_NAMES[TORCH_DTYPES[dtype]],
            source.shape,
            lambda source=source: _converted(stored.source(source), dtype),  # type: ignore[misc]
        )
        for source in sources_of(weights).values()
    ]


def _converted(tensor: Tensor, dtype: str) -> Tensor:
    return tensor if dtype == "keep" else tensor.to(TORCH_DTYPES[dtype])


def _dtype_word(blocks: Sequence[Block]) -> str:
    """The dtype that most bytes have, as ``config.json`` spells it."""
    totals: dict[str, int] = {}
    for block in blocks:
        totals[block.dtype] = totals.get(block.dtype, 0) + block.nbytes
    most = max(totals, key=lambda name: totals[name])
    return next(str(dtype) for dtype, name in DTYPE_NAMES.items() if name == most).removeprefix("torch.")


@dataclass(frozen=True)
class _Tokenizer:
    """What goes along with the weights.

    Attributes:
        files: by the name that they get.
        original: the ``config.json`` beside them.
        ids: token ids by key.
        notes: what the user should know.
    """

    files: dict[str, Path]
    original: dict[str, Any] | None
    ids: dict[str, Any]
    notes: tuple[str, ...] = ()


def _tokenizer(checkpoint: Path, config: TrainConfig, like: str | Path | None) -> _Tokenizer:
    """The tokenizer's files and ids: of the named folder, of the imported one, or of the run's tokenizer."""
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
    return _Tokenizer(files, original, token_ids(files, original, vocab=config.model.vocab))


def _without_files(config: TrainConfig) -> _Tokenizer:
    if config.data.tokenizer != "byte":
        note = f"data.tokenizer={config.data.tokenizer} is not there: no tokenizer files, no token ids; use --like"
        return _Tokenizer({}, None, token_ids({}), (note,))
    if config.data.source == "bin":
        return _Tokenizer({}, None, token_ids({}), ("no tokenizer files and no token ids: use --like",))
    return _Tokenizer({}, None, byte_ids(config.model.vocab))


def _carry(files: Mapping[str, Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, file in files.items():
        shutil.copyfile(file, folder / name)


def _window_notes(model: HubModel) -> tuple[str, ...]:
    if model.window is None:
        return ()
    return (f"the class attends to {model.window} tokens: only sequences up to that length are computed correctly",)


def _yaml_name(folder: Path) -> str:
    return re.sub(r"\W+", "_", folder.resolve().name.lower()).strip("_") or "imported"


def _model_yaml(folder: HubFolder, model: HubModel, config: TrainConfig) -> str:
    name, size = folder.path.resolve().name, total_parameters(config)
    head = f"# {model.architecture.class_name} from {name}, {size:,} parameters.\n"
    head += "".join(f"# {note[0].upper()}{note[1:]}.\n" for note in _window_notes(model))
    return head + OmegaConf.to_yaml(OmegaConf.create(model_values(config.model)))
