"""A training and a validation set, built from plain arguments and checked before anything is trained on them.

It imports no torch operation and needs no process group, so the launcher can build it before it starts ranks, and every
rank that builds it gets the same arrays and meets the same errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megastack.data.packing import PackedSamples, SingleSamples
from megastack.data.sources import read_documents
from megastack.data.split import check_fraction
from megastack.data.stream import TokenStream, tokenize
from megastack.data.tokenizers import Tokenizer, check_vocab, load_tokenizer
from megastack.errors import DataError


@dataclass(frozen=True)
class Split:
    """One side of the data: its tokens, and the samples cut from them."""

    stream: TokenStream
    samples: PackedSamples | SingleSamples


@dataclass(frozen=True)
class Dataset:
    """What a run trains on and is validated on; `validation` has no samples when its fraction is 0."""

    tokenizer: Tokenizer
    train: Split
    validation: Split
    packed: bool
    document_mask: bool

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal numbers: what must not change between a run and its resume."""
        size = self.train.samples.sequence_length
        parts = [self.train.stream.digest(), self.validation.stream.digest(), size, self.packed, self.document_mask]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def describe(self) -> str:
        """Documents, tokens and samples of both splits, for people."""
        lines = []
        for name, split in (("train", self.train), ("validation", self.validation)):
            samples = split.samples
            lines.append(
                f"{name}: {split.stream.documents:,} documents, {len(split.stream.tokens):,} tokens, "
                f"{len(samples):,} samples of {samples.sequence_length} ({samples.unused} tokens at the end unused)"
            )
        return "\n".join(lines)


def build_dataset(
    *,
    source: str = "builtin",
    paths: Sequence[str | Path] = (),
    tokenizer: str | Path = "byte",
    validation_fraction: float = 0.05,
    pack: bool = True,
    document_mask: bool = True,
    sequence_length: int,
    vocab: int | None = None,
) -> Dataset:
    """Read, split, tokenize and cut; the arguments are the `data.*` keys of the same names and two sizes.

    Raises :class:`DataError` for whatever is wrong with a source (see :func:`megastack.data.sources.read_documents`),
    for a tokenizer that cannot be loaded or does not fit `vocab`, and for a split with less than one sample.
    """
    check_fraction(validation_fraction)
    loaded = load_tokenizer(tokenizer)
    if vocab is not None:
        check_vocab(vocab, loaded)
    streams = tokenize(read_documents(source, paths), loaded, validation_fraction)
    train, validation = (Split(stream, _samples(stream, sequence_length, pack, document_mask)) for stream in streams)
    _check_sizes(train, validation, validation_fraction)
    return Dataset(loaded, train, validation, pack, document_mask)


def _samples(stream: TokenStream, length: int, pack: bool, document_mask: bool) -> PackedSamples | SingleSamples:
    return PackedSamples(stream, length, document_mask=document_mask) if pack else SingleSamples(stream, length)


def _check_sizes(train: Split, validation: Split, fraction: float) -> None:
    faults = []
    if not len(train.samples):
        faults.append(_too_short("training", train, "more text in data.paths"))
    if fraction and not len(validation.samples):
        remedy = f"more text, a data.validation_fraction above {fraction} (or 0 for a run without validation)"
        faults.append(_too_short("validation", validation, remedy))
    if faults:
        raise DataError("\n".join(faults))


def _too_short(name: str, split: Split, remedy: str) -> str:
    tokens, size = len(split.stream.tokens), split.samples.sequence_length
    if tokens >= 2 and isinstance(split.samples, PackedSamples):
        remedy += f", or batch.sequence_length={tokens - 1} or less"
    needed = size + 1 if isinstance(split.samples, PackedSamples) else 2
    return (
        f"batch.sequence_length={size}: the {name} split has {tokens} tokens in {split.stream.documents} documents, "
        f"too few for one sample of {needed}; use {remedy}"
    )
