"""Implementation of ``megastack evaluate``: perplexity of a file or of the validation split of the checkpoint's run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.assemble.data import configured_tokenizer
from megastack.assemble.stages import load_stages
from megastack.cli.unused import unused_note
from megastack.cli.weights import find_weights
from megastack.config.choices import DataSource
from megastack.config.phases import phase_configs
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.data.indexed import idx_path
from megastack.data.packing import Samples, SingleSamples
from megastack.data.sources import read_documents
from megastack.data.stream import TokenStream, stream_of
from megastack.data.token_files import check_ids, open_token_files
from megastack.data.tokenizers import check_vocab
from megastack.data.validation import ValidationBatches, evenly_spread
from megastack.errors import ConfigError, DataError, Violation, counted
from megastack.inference.evaluate import Score, evaluate
from megastack.launch.run import on_ranks
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.stages import configured_schedule
from megastack.observe.console import Console
from megastack.preflight.data import check_data

TOKEN_FILES = (".bin", ".idx", ".npy")
_CHECKED_AT_ONCE = 1 << 20  # tokens


@dataclass(frozen=True)
class _Texts:
    """The texts to score."""

    name: str
    samples: Samples
    limit: int | None = None


def evaluate_checkpoint(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Score the text and return the record of the command.

    Raises:
        ConfigError: checkpoint, configuration or data are invalid; nothing was computed.
    """
    if options.file:
        kind = _kind(Path(options.file))
        ids = kind is DataSource.bin
        data = {"source": kind, "paths": [options.file], "blend": [], "phases": [], "pack": True}
        use = find_weights(options, data=data, tokenizer=not ids)
        needs = ("model.vocab", "batch.sequence_length", *(() if ids else ("data.tokenizer",)))
        texts = use.errors.check(lambda: _file(use.config, Path(options.file)), *needs)
    else:
        use = find_weights(options, split=True)
        first = use.errors.check(lambda: phase_configs(use.config)[0].config, "data.phases") or use.config
        dataset = None if use.lacks_data else check_data(first, use.errors)
        texts = use.errors.check(lambda: _own_split(use.config, dataset)) if dataset is not None else None
    use.require_valid()
    assert texts is not None
    console.line(f"evaluate  {use}, {texts.name}")
    if note := unused_note("evaluate --file" if options.file else "evaluate", options.overrides):
        console.line(f"note      {note}")
    score = on_ranks("evaluate", use.config, _score, use.checkpoint, texts)
    console.line(
        f"score     {score.nats:.6f} nats a token, perplexity {score.perplexity:,.4f}, {counted(score.tokens, 'token')}"
    )
    metrics = {"nats": score.nats, "perplexity": score.perplexity, "tokens": score.tokens}
    return {"checkpoint": str(use.checkpoint), "data": texts.name} | metrics


def _score(config: TrainConfig, mesh: Mesh, checkpoint: Path, texts: _Texts) -> Score:
    """Compute the score of all texts; called on every rank."""
    schedule = configured_schedule(config, mesh.shape)
    stages = load_stages(config, mesh, schedule, checkpoint)
    batches = ValidationBatches(
        texts.samples,
        microbatches=schedule.microbatches,
        micro_size=config.batch.micro_size,
        dp_rank=mesh[Axis.DP].rank,
        dp_size=mesh[Axis.DP].size,
        vocab=config.model.vocab,
        limit=texts.limit,
    )
    return evaluate([stage.eval() for stage in stages], schedule, mesh, batches, batches.valid_tokens)


def _own_split(config: TrainConfig, dataset: Dataset) -> _Texts:
    """Return the validation split of the run itself."""
    validation = dataset.validation
    if not len(validation.samples):
        fraction = config.data.validation_fraction
        rule = "the run has no validation split"
        raise ConfigError.of([Violation("data.validation_fraction", fraction, rule, ("--file",))])
    limit = config.run.validate_samples
    if not validation.samples.valid_tokens(evenly_spread(len(validation.samples), limit)).sum():
        raise DataError("the validation split of the run has no token to predict; use --file")
    return _Texts("the validation split of its run", validation.samples, limit)


def _file(config: TrainConfig, path: Path) -> _Texts:
    """Return the documents of a file in windows of the sequence length; all but a document's first token are scored."""
    if not path.exists() and not idx_path(path).is_file():
        raise DataError(f"--file {path}: does not exist; use a text, a .jsonl or a token file (.npy, .bin)")
    stream = _stream(config, path)
    if not len(stream.tokens) > stream.documents:
        raise DataError(f"--file {path}: has no token to predict; use a text of at least two tokens")
    return _Texts(str(path), SingleSamples(stream, config.batch.sequence_length))


def _kind(path: Path) -> DataSource:
    """Determine how to read a file: as ids, as one document per line, or as one text."""
    if path.suffix in TOKEN_FILES or idx_path(path).is_file():
        return DataSource.bin
    return DataSource.jsonl if path.suffix == ".jsonl" else DataSource.text


def _stream(config: TrainConfig, path: Path) -> TokenStream:
    kind = _kind(path)
    if kind is DataSource.bin:
        return _token_stream(path, config.model.vocab)
    tokenizer = configured_tokenizer(config)
    check_vocab(config.model.vocab, tokenizer)
    if kind is DataSource.jsonl:
        return stream_of(tokenizer.encode(list(read_documents("jsonl", [path]))), tokenizer.size)
    return stream_of(tokenizer.encode([b"".join(read_documents("text", [path]))]), tokenizer.size)


def _token_stream(path: Path, vocab: int) -> TokenStream:
    """Return the documents of a token file; the ids stay in the file and are checked once."""
    try:
        (file,) = open_token_files([path])
        for begin in range(0, file.tokens, _CHECKED_AT_ONCE):
            check_ids(file, vocab, begin, min(file.tokens, begin + _CHECKED_AT_ONCE))
    except DataError as error:
        raise DataError(f"--file {path}: {error}") from error
    return TokenStream(file.read(0, file.tokens), file.starts(0, file.tokens))
