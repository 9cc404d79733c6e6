"""Data from keys to samples, and the errors reported before training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastack.data.dataset import build_dataset
from megastack.data.packing import SingleSamples
from megastack.data.validation import bigram_loss
from megastack.errors import DataError


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", [f"this is document number {number}" for number in range(200)])


def from_file(corpus: Path, **options: Any) -> Any:
    return build_dataset(**{"source": "jsonl", "paths": [corpus], "sequence_length": 16, "vocab": 256, **options})


def test_the_builtin_corpus_makes_training_and_validation_samples() -> None:
    data = build_dataset(sequence_length=128, vocab=256)
    assert len(data.train.samples) > 2000
    assert len(data.validation.samples) > 50
    held = len(data.validation.stream.tokens) / (len(data.train.stream.tokens) + len(data.validation.stream.tokens))
    assert 0.02 < held < 0.09
    baseline = bigram_loss(data.train.samples, data.validation.samples, data.tokenizer.size)
    assert baseline is not None and 2.0 < baseline < 3.2


def test_no_document_is_lost_between_the_splits(corpus: Path) -> None:
    data = from_file(corpus, validation_fraction=0.3)
    streams = (data.train.stream, data.validation.stream)
    texts = {text for stream in streams for text in bytes(stream.tokens).split(b"\xff")} - {b""}
    assert texts == {f"this is document number {number}".encode() for number in range(200)}
    assert data.train.stream.documents + data.validation.stream.documents == 200
    assert min(stream.documents for stream in streams) > 30


def test_the_keys_determine_the_rows(corpus: Path) -> None:
    assert isinstance(from_file(corpus, pack=False).train.samples, SingleSamples)
    masked = from_file(corpus).train.samples.rows(np.arange(2))
    plain = from_file(corpus, document_mask=False).train.samples.rows(np.arange(2))
    assert masked.documents_BS is not None and plain.documents_BS is None


def test_a_fraction_of_zero_means_no_validation(corpus: Path) -> None:
    data = from_file(corpus, validation_fraction=0)
    assert len(data.validation.samples) == 0
    assert data.train.stream.documents == 200
    assert bigram_loss(data.train.samples, data.validation.samples, 256) is None


def test_the_fingerprint_changes_with_whatever_changes_a_sample(corpus: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"sequence_length": 15},
        {"pack": False},
        {"document_mask": False},
        {"validation_fraction": 0.3},
        {
            "paths": [write(corpus.with_name("other.jsonl"), ["something else entirely"] * 200)],
            "validation_fraction": 0,
        },
    ]
    prints = [from_file(corpus, **change).fingerprint for change in [{}, *changes]]
    assert len(set(prints)) == len(prints)
    assert from_file(corpus).fingerprint == prints[0]


def test_the_description_gives_the_numbers(corpus: Path) -> None:
    data = from_file(corpus)
    train, validation = data.describe().split("\n")
    assert f"train: {data.train.stream.documents} documents" in train
    assert f"{len(data.train.samples):,} samples of 16 ({data.train.samples.unused} tokens" in train
    assert validation.startswith("validation: ")


def rejected(corpus: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        from_file(corpus, **options)
    return str(caught.value)


def test_too_little_text_is_reported_for_both_splits_at_once(corpus: Path) -> None:
    message = rejected(corpus, sequence_length=100_000)
    training, validation = message.split("\n")
    tokens = len(from_file(corpus).train.stream.tokens)
    assert f"batch.sequence_length=100000: the training split has {tokens:,} tokens in" in training
    assert "one sample of 100001" in training and f"batch.sequence_length={tokens - 1} or less" in training
    assert "the validation split has" in validation and "data.validation_fraction above 0.05" in validation


def test_the_suggestion_of_the_error_works(corpus: Path) -> None:
    tokens = len(from_file(corpus, validation_fraction=0).train.stream.tokens)
    rejected(corpus, validation_fraction=0, sequence_length=tokens)
    assert len(from_file(corpus, validation_fraction=0, sequence_length=tokens - 1).train.samples) == 1


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    message = rejected(write(tmp_path / "one.jsonl", ["a single document, " * 50]))
    assert "has 0 tokens in 0 documents" in message and "\n" not in message
    message = rejected(write(tmp_path / "one.jsonl", ["a single document, " * 50]), pack=False)
    assert "too few for one sample of 2" in message


def test_a_vocabulary_that_is_too_small_is_rejected_first(corpus: Path) -> None:
    assert "model.vocab=37: must hold the 256 ids of data.tokenizer=byte" in rejected(corpus, vocab=37)


def test_a_fraction_out_of_range_is_rejected(corpus: Path) -> None:
    assert "data.validation_fraction=1.5" in rejected(corpus, validation_fraction=1.5)


def test_a_training_split_of_one_token_documents_is_rejected_unless_masks_are_off(tmp_path: Path) -> None:
    np.save(tmp_path / "ones.npy", np.ones((400, 1), dtype=np.int64))
    options = {"source": "bin", "paths": [tmp_path / "ones.npy"], "vocab": 8, "sequence_length": 4}
    with pytest.raises(DataError, match=r"no label to predict: its documents have one token each; use longer"):
        build_dataset(**options)
    assert len(build_dataset(**options, document_mask=False).train.samples) > 50
