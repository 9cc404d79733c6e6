"""The training and validation set, built from plain arguments and checked before training.

Building a dataset runs no torch operation and needs no process group. The launcher can therefore build it before it
starts ranks, and every rank that builds it gets the same arrays or the same errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megastack.data.blend import BlendOrder, ConcatSamples, shares
from megastack.data.blend_weights import PERIOD, History, check_weights, extend_history
from megastack.data.order import Cursor, Order, SampleOrder
from megastack.data.packing import PackedSamples, Samples, SingleSamples
from megastack.data.sources import read_documents
from megastack.data.stream import FileStream, Stream, TokenRange, TokenStream, check_fraction, split_file, tokenize
from megastack.data.token_files import TokenFile, open_token_files
from megastack.data.tokenizers import Tokenizer, check_vocab, load_tokenizer
from megastack.errors import DataError, counted


@dataclass(frozen=True)
class Split:
    """One split of a source: its tokens, and the samples cut from them."""

    stream: Stream
    samples: PackedSamples | SingleSamples


@dataclass(frozen=True)
class Source:
    """One source of documents or token files, split, with its weight in a blend."""

    train: Split
    validation: Split
    name: str = ""
    weight: float = 1.0

    @property
    def digest(self) -> str:
        """A hash of tokens, document boundaries and split."""
        both = self.train.stream.digest() + self.validation.stream.digest()
        return hashlib.blake2b(both.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class ConcatDataset:
    """One split of several sources together."""

    samples: Samples


Streams = dict[tuple[str, ...], tuple[Stream, Stream]]
"""Training and validation streams by kind and paths of their source."""


@dataclass(frozen=True)
class DatasetSpec:
    """A source as the configuration names it: its kind, its paths, its weight in a blend."""

    source: str = "builtin"
    paths: Sequence[str | Path] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Dataset:
    """The training and validation data of a run; the validation split has no samples if its fraction is 0.

    Attributes:
        sources: the sources; several make a blend.
        vocab: the ids are below it: the tokenizer's size, or the model's vocabulary for token files.
        blended: whether sources are drawn by weight, even if there is only one.
        later_phases: the data phases after the first; see :mod:`megastack.data.phases`.
    """

    sources: tuple[Source, ...]
    vocab: int
    packed: bool
    document_mask: bool
    validation_fraction: float
    blended: bool = False
    tokenizer: Tokenizer | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    later_phases: tuple[DataPhase, ...] = ()

    @property
    def train(self) -> Split | ConcatDataset:
        return self._joined([source.train for source in self.sources])

    @property
    def validation(self) -> Split | ConcatDataset:
        return self._joined([source.validation for source in self.sources])

    def _joined(self, splits: Sequence[Split]) -> Split | ConcatDataset:
        return ConcatDataset(ConcatSamples([split.samples for split in splits])) if self.blended else splits[0]

    @property
    def fingerprint(self) -> str:
        """A hash of everything that a resume must keep; the sources of a blend are compared one by one instead."""
        cut = [self.sources[0].train.samples.sequence_length, self.packed, self.document_mask]
        source = self.sources[0]
        digests = [source.train.stream.digest(), source.validation.stream.digest()]
        parts = [*cut, self.validation_fraction, "blend"] if self.blended else [*digests, *cut]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    @property
    def phases(self) -> tuple[DataPhase, ...]:
        """All data phases of the run, this dataset first."""
        return (DataPhase(0, self), *self.later_phases)

    @property
    def files(self) -> list[TokenFile]:
        """The token files of all phases, each once."""
        sources = [source for phase in self.phases for source in phase.data.sources]
        streams = [split.stream for source in sources for split in (source.train, source.validation)]
        found = [file for stream in streams if isinstance(stream, FileStream) for file in stream.files]
        return list({id(file): file for file in found}.values())

    def history(self, before: History = (), entry: int = 0) -> History:
        """The blend history of a run that starts or resumes at `entry`; empty without a blend."""
        return extend_history(before, entry, self.weights) if self.blended else ()

    def order(
        self, seed: int, history: History = (), *, begin: int = 0, cursors: Mapping[str, Cursor] | None = None
    ) -> Order:
        """The infinite order of the training samples.

        Args:
            seed: the seed of the run.
            history: the blend history, empty without a blend.
            begin: the entry of the run's stream at which this phase begins.
            cursors: positions of sources that earlier phases drew from, by digest.
        """
        if not self.blended:
            cursor = next(iter(cursors.values())) if cursors else Cursor(seed)
            return SampleOrder(len(self.train.samples), cursor.seed, cursor.draws - begin)
        counts = dict(zip(self.weights, (len(source.train.samples) for source in self.sources), strict=True))
        return BlendOrder(counts, history, seed, cursors)

    def describe(self) -> str:
        """Documents, tokens and samples of both splits of every source; later phases list the training split only."""
        lines = [line for source, title in self._titled_sources for line in _described(source, title)]
        for phase in self.later_phases:
            for source, title in phase.data._titled_sources:
                train, _ = _described(source, title)
                lines.append(f"after step {phase.from_step}: {train}")
        return "\n".join(lines)

    @property
    def _titled_sources(self) -> list[tuple[Source, str]]:
        """Each source with a title: its name and its share of the samples; empty without a blend."""
        if not self.blended:
            return [(source, "") for source in self.sources]
        drawn = shares([source.weight for source in self.sources]) / PERIOD
        titles = [
            f"{source.name} ({part:.2%} of the samples) " for source, part in zip(self.sources, drawn, strict=True)
        ]
        return list(zip(self.sources, titles, strict=True))


@dataclass(frozen=True)
class DataPhase:
    """The data on which a run trains from step `from_step` on."""

    from_step: int
    data: Dataset


def _described(source: Source, title: str) -> list[str]:
    lines = []
    for name, split in (("train", source.train), ("validation", source.validation)):
        samples = split.samples
        lines.append(
            f"{title}{name}: {counted(split.stream.documents, 'document')}, {counted(len(split.stream), 'token')}, "
            f"{counted(len(samples), 'sample')} of {samples.sequence_length} "
            f"({counted(samples.unused, 'token')} at the end unused)"
        )
    return lines


def build_dataset(
    *,
    source: str = "builtin",
    paths: Sequence[str | Path] = (),
    blend: Sequence[DatasetSpec] = (),
    tokenizer: str | Path = "byte",
    allow_special_tokens: bool = False,
    validation_fraction: float = 0.05,
    pack: bool = True,
    document_mask: bool = True,
    sequence_length: int,
    vocab: int | None = None,
    streams: Streams | None = None,
    require_validation: bool = True,
) -> Dataset:
    """Read, split, tokenize and cut the data. The arguments are the `data.*` keys of the same names, and:

    Args:
        sequence_length: tokens of a sample (`batch.sequence_length`).
        vocab: ids must be below it (`model.vocab`).
        streams: a cache of the streams that were read, shared by datasets with the same tokenizer and fraction.
        require_validation: whether a validation split without samples is an error, if the fraction is not 0.

    Raises:
        DataError: a source is unusable (see :func:`megastack.data.sources.read_documents` and
            :func:`megastack.data.token_files.open_token_files`), the tokenizer cannot be loaded or does not fit
            `vocab`, a split has less than one sample, or the training split has no labels.
    """
    check_fraction(validation_fraction)
    specs = list(blend) or [DatasetSpec(source, paths)]
    loaded = None
    if any(spec.source != "bin" for spec in specs):
        loaded = load_tokenizer(tokenizer, allow_special_tokens=allow_special_tokens)
        if vocab is not None:
            check_vocab(vocab, loaded)
    sources, streams = [], {} if streams is None else streams
    for spec in specs:
        key = (spec.source, *map(str, spec.paths))
        if key not in streams:
            streams[key] = _streams(spec, loaded, validation_fraction)
        train, held = (Split(stream, _samples(stream, sequence_length, pack, document_mask)) for stream in streams[key])
        if spec.weight:
            _check_sizes(train, held, validation_fraction if require_validation else 0)
        name = ",".join(map(str, spec.paths)) or spec.source
        sources.append(Source(train, held, name=name, weight=spec.weight))
    _require_labels([each.train for each in sources if each.weight])
    size = loaded.size if loaded is not None and all(spec.source != "bin" for spec in specs) else vocab
    weights = _weights(sources) if blend else {}
    size = size or 1 << 31
    return Dataset(tuple(sources), size, pack, document_mask, validation_fraction, bool(blend), loaded, weights)


def _streams(spec: DatasetSpec, tokenizer: Tokenizer | None, fraction: float) -> tuple[Stream, Stream]:
    if spec.source != "bin":
        assert tokenizer is not None
        return tokenize(read_documents(spec.source, spec.paths), tokenizer, fraction)
    train: list[TokenRange] = []
    held: list[TokenRange] = []
    for file in open_token_files(spec.paths):
        for ranges, found in zip((train, held), split_file(file, fraction), strict=True):
            ranges += found
    return FileStream(train), FileStream(held)


def _weights(sources: Sequence[Source]) -> dict[str, float]:
    check_weights([source.weight for source in sources], [len(source.train.samples) for source in sources])
    weights: dict[str, float] = {}
    for source in sources:
        if source.digest in weights:
            raise DataError(f"data.blend: {source.name} has the same content as another source; name each source once")
        weights[source.digest] = source.weight
    return weights


def _samples(stream: Stream, length: int, pack: bool, document_mask: bool) -> PackedSamples | SingleSamples:
    if pack:
        return PackedSamples(stream, length, document_mask=document_mask)
    if not isinstance(stream, TokenStream):
        raise DataError("data.pack=false: token files have no list of documents and are always packed; use true")
    return SingleSamples(stream, length)


def _check_sizes(train: Split, validation: Split, fraction: float) -> None:
    errors = []
    if not len(train.samples):
        errors.append(_too_short("training", train, "more text in data.paths"))
    if fraction and not len(validation.samples):
        remedy = f"more text, a data.validation_fraction above {fraction} (or 0 for a run without validation)"
        errors.append(_too_short("validation", validation, remedy))
    if errors:
        raise DataError("\n".join(errors))


def _require_labels(splits: Sequence[Split]) -> None:
    """Steps without a label are skipped, but a training split without any label would train nothing."""
    masked = all(isinstance(split.samples, PackedSamples) and split.samples.masked for split in splits)
    if masked and all(split.stream.documents >= len(split.stream) for split in splits):
        rule = "the training split has no label to predict: its documents have one token each"
        raise DataError(f"{rule}; use longer documents, or data.document_mask=false")


def _too_short(name: str, split: Split, remedy: str) -> str:
    tokens, size = len(split.stream), split.samples.sequence_length
    if tokens >= 2 and isinstance(split.samples, PackedSamples):
        remedy += f", or batch.sequence_length={tokens - 1} or less"
    needed = size + 1 if isinstance(split.samples, PackedSamples) else 2
    return (
        f"batch.sequence_length={size}: the {name} split has {counted(tokens, 'token')} in "
        f"{counted(split.stream.documents, 'document')}, too few for one sample of {needed}; use {remedy}"
    )
