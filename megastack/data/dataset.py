"""A training and a validation set, built from plain arguments and checked before anything is trained on them.

It imports no torch operation and needs no process group, so the launcher can build it before it starts ranks, and every
rank that builds it gets the same arrays and meets the same errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megastack.data.blend import PERIOD, BlendOrder, ConcatSamples, History, check_weights, continued, shares
from megastack.data.order import Cursor, Order, SampleOrder
from megastack.data.packing import PackedSamples, Samples, SingleSamples, Stream
from megastack.data.sources import read_documents
from megastack.data.spans import Span, SpanStream, split_file
from megastack.data.split import check_fraction
from megastack.data.stream import TokenStream, tokenize
from megastack.data.token_files import TokenFile, open_token_files
from megastack.data.tokenizers import Tokenizer, check_vocab, load_tokenizer
from megastack.errors import DataError, counted


@dataclass(frozen=True)
class Split:
    """One side of a source: its tokens, and the samples cut from them."""

    stream: Stream
    samples: PackedSamples | SingleSamples


@dataclass(frozen=True)
class Source:
    """One source of documents or token files, split, and how much of the training comes from it."""

    train: Split
    validation: Split
    name: str = ""
    weight: float = 1.0

    @property
    def digest(self) -> str:
        """Equal for equal tokens, boundaries and split."""
        both = self.train.stream.digest() + self.validation.stream.digest()
        return hashlib.blake2b(both.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class ConcatDataset:
    """One side of several sources together."""

    samples: Samples


Streams = dict[tuple[str, ...], tuple[Stream, Stream]]
"""Training and validation tokens by kind and paths of their source."""


@dataclass(frozen=True)
class DatasetSpec:
    """A source as a user names it: its kind, its paths, its weight in a blend."""

    source: str = "builtin"
    paths: Sequence[str | Path] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Dataset:
    """What a run trains on and is validated on; a validation split has no samples when its fraction is 0.

    Attributes:
        sources: the sources; several make a blend.
        vocab: ids are below it: the tokenizer's size, or the model's vocabulary where there are token files.
        blended: whether the sources are drawn by weight, be it only one.
        later: what a run goes on with, stage by stage; see :mod:`megastack.data.phases`.
    """

    sources: tuple[Source, ...]
    vocab: int
    packed: bool
    document_mask: bool
    validation_fraction: float
    blended: bool = False
    tokenizer: Tokenizer | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    later: tuple[DataPhase, ...] = ()

    @property
    def train(self) -> Split | ConcatDataset:
        return self._side([source.train for source in self.sources])

    @property
    def validation(self) -> Split | ConcatDataset:
        return self._side([source.validation for source in self.sources])

    def _side(self, splits: Sequence[Split]) -> Split | ConcatDataset:
        return ConcatDataset(ConcatSamples([split.samples for split in splits])) if self.blended else splits[0]

    @property
    def fingerprint(self) -> str:
        """What must not change between a run and its resume; the sources of a blend are compared one by one."""
        cut = [self.sources[0].train.samples.sequence_length, self.packed, self.document_mask]
        source = self.sources[0]
        digests = [source.train.stream.digest(), source.validation.stream.digest()]
        parts = [*cut, self.validation_fraction, "blend"] if self.blended else [*digests, *cut]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    @property
    def stages(self) -> tuple[DataPhase, ...]:
        """All stages of the run, this one first."""
        return (DataPhase(0, self), *self.later)

    @property
    def files(self) -> list[TokenFile]:
        """The token files of all stages, each once."""
        sources = [source for stage in self.stages for source in stage.data.sources]
        streams = [split.stream for source in sources for split in (source.train, source.validation)]
        found = [file for stream in streams if isinstance(stream, SpanStream) for file in stream.files]
        return list({id(file): file for file in found}.values())

    def history(self, before: History = (), entry: int = 0) -> History:
        """The stretches of weights of a run that goes on at `entry`; empty without a blend."""
        return continued(before, entry, self.weights) if self.blended else ()

    def order(
        self, seed: int, history: History = (), *, begin: int = 0, taken: Mapping[str, Cursor] | None = None
    ) -> Order:
        """The endless order of the training samples.

        Args:
            seed: the run's.
            history: of a blend, its weights so far.
            begin: the entry of the run's stream at which these samples have their turn.
            taken: how far sources were drawn before that, by digest.
        """
        if not self.blended:
            before = next(iter(taken.values())) if taken else Cursor(seed)
            return SampleOrder(len(self.train.samples), before.seed, before.draws - begin)
        counts = dict(zip(self.weights, (len(source.train.samples) for source in self.sources), strict=True))
        return BlendOrder(counts, history, seed, taken)

    def describe(self) -> str:
        """Documents, tokens and samples of both splits of every source, of later stages of what is trained on."""
        lines = [line for source, title in self._titled for line in _described(source, title)]
        for stage in self.later:
            for source, title in stage.data._titled:
                trained, _ = _described(source, title)
                lines.append(f"after step {stage.from_step}: {trained}")
        return "\n".join(lines)

    @property
    def _titled(self) -> list[tuple[Source, str]]:
        """The sources, each with its name and how much is drawn of it."""
        if not self.blended:
            return [(source, "") for source in self.sources]
        drawn = shares([source.weight for source in self.sources]) / PERIOD
        titles = [
            f"{source.name} ({part:.2%} of the samples) " for source, part in zip(self.sources, drawn, strict=True)
        ]
        return list(zip(self.sources, titles, strict=True))


@dataclass(frozen=True)
class DataPhase:
    """A later stage of a run: what it trains on from a step on."""

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
    read: Streams | None = None,
    scored: bool = True,
) -> Dataset:
    """Read, split, tokenize and cut; the arguments are the `data.*` keys of the same names and two sizes.

    `read` keeps the tokens of what was read, for other datasets with the same tokenizer and fraction. A validation
    split that is not `scored` may have no samples.

    Raises :class:`DataError` for whatever is wrong with a source (see :func:`megastack.data.sources.read_documents` and
    :func:`megastack.data.token_files.open_token_files`), for a tokenizer that cannot be loaded or does not fit `vocab`,
    for a split with less than one sample, and for a training split without any label.
    """
    check_fraction(validation_fraction)
    wanted = list(blend) or [DatasetSpec(source, paths)]
    loaded = None
    if any(each.source != "bin" for each in wanted):
        loaded = load_tokenizer(tokenizer, allow_special_tokens=allow_special_tokens)
        if vocab is not None:
            check_vocab(vocab, loaded)
    sources, read = [], {} if read is None else read
    for each in wanted:
        key = (each.source, *map(str, each.paths))
        if key not in read:
            read[key] = _streams(each, loaded, validation_fraction)
        streams = read[key]
        train, held = (Split(stream, _samples(stream, sequence_length, pack, document_mask)) for stream in streams)
        named = Source(train, held, name=",".join(map(str, each.paths)) or each.source, weight=each.weight)
        if each.weight:
            _check_sizes(named.train, named.validation, validation_fraction if scored else 0)
        sources.append(named)
    _require_labels([each.train for each in sources if each.weight])
    whole = loaded.size if loaded is not None and all(each.source != "bin" for each in wanted) else vocab
    weights = _weights(sources) if blend else {}
    whole = whole or 1 << 31
    return Dataset(tuple(sources), whole, pack, document_mask, validation_fraction, bool(blend), loaded, weights)


def _streams(wanted: DatasetSpec, tokenizer: Tokenizer | None, fraction: float) -> tuple[Stream, Stream]:
    if wanted.source != "bin":
        assert tokenizer is not None
        return tokenize(read_documents(wanted.source, wanted.paths), tokenizer, fraction)
    sides: tuple[list[Span], list[Span]] = ([], [])
    for file in open_token_files(wanted.paths):
        for side, spans in zip(sides, split_file(file, fraction), strict=True):
            side += spans
    return SpanStream(sides[0]), SpanStream(sides[1])


def _weights(sources: Sequence[Source]) -> dict[str, float]:
    check_weights([source.weight for source in sources], [len(source.train.samples) for source in sources])
    weights: dict[str, float] = {}
    for source in sources:
        if source.digest in weights:
            raise DataError(f"data.blend: {source.name} holds what another source holds; name each source once")
        weights[source.digest] = source.weight
    return weights


def _samples(stream: Stream, length: int, pack: bool, document_mask: bool) -> PackedSamples | SingleSamples:
    if pack:
        return PackedSamples(stream, length, document_mask=document_mask)
    if not isinstance(stream, TokenStream):
        raise DataError("data.pack=false: token files are packed, without a list of their documents; use true")
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
    """A step without a label is left out, but a run whose every step is would train nothing."""
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
