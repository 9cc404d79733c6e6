"""Bytes and tokenizer files: ids, ends of documents, and the vocabulary that they need."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.data.tokenizers import ByteTokenizer, check_vocab, least_vocab, load_tokenizer
from megastack.errors import DataError


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=50))
def test_bytes_go_there_and_back_and_never_hit_the_end(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([text.encode()])
    assert tokenizer.end not in ids
    assert tokenizer.decode([*ids, 0xFF]) == text


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"[UNK]": 0, "to": 1, "be": 2, "</s>": 7, "<stop>": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 7)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_adds_nothing_of_its_own(tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    assert [list(ids) for ids in tokenizer.encode([b"to be", b"be or"])] == [[1, 2], [2, 0]]
    assert tokenizer.decode([1, 2]) == "to be"


def test_size_is_the_largest_id_plus_one_even_with_gaps(tokenizer_file: Path) -> None:
    assert load_tokenizer(tokenizer_file).size == 8
    assert least_vocab(tokenizer_file) == 8


def test_the_end_of_a_document_is_configured_or_well_known(tokenizer_file: Path) -> None:
    assert load_tokenizer(tokenizer_file).end == 7
    config = tokenizer_file.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": "<stop>"}))
    assert load_tokenizer(tokenizer_file).end == 5
    config.write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert load_tokenizer(tokenizer_file).end == 5
    config.write_text(json.dumps({"eos_token": "<other>"}))
    with pytest.raises(DataError, match=r"'<other>' beside it is not in its vocabulary"):
        load_tokenizer(tokenizer_file)
    config.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not JSON"):
        load_tokenizer(tokenizer_file)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    assert least_vocab() == 256
    check_vocab(256, ByteTokenizer())
    with pytest.raises(DataError, match=r"model.vocab=255.*data.tokenizer=byte; use 256 or more"):
        check_vocab(255, ByteTokenizer())


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer.json: no such file; use byte"):
        load_tokenizer(path)
    path.write_text('{"model": 5}')
    with pytest.raises(DataError, match=r"not a tokenizer.json"):
        load_tokenizer(path)


def test_without_the_tokenizers_package_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **options)

    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'megastack\[tokenizers\]'"):
        load_tokenizer(path)
