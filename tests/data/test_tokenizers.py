"""Bytes and tokenizer files: ids, end ids, and the vocabulary that they need."""

import builtins
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.corpus.tokenize import make_token_file
from megastack.data.stream import tokenize
from megastack.data.tokenizers import ByteTokenizer, check_vocab, least_vocab, load_tokenizer
from megastack.errors import DataError
from tests.data.token_cases import read_by_hand


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=50))
def test_bytes_round_trip_and_never_contain_the_end_id(text: str) -> None:
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


def test_a_tokenizer_file_adds_no_tokens(tokenizer_file: Path) -> None:
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
    with pytest.raises(DataError, match=r"'<other>' of tokenizer_config.json beside it is not in its vocabulary"):
        load_tokenizer(tokenizer_file)
    config.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not JSON"):
        load_tokenizer(tokenizer_file)


@pytest.mark.parametrize("end", [None, {"content": None}])
def test_an_end_that_is_configured_as_null_is_not_guessed(tokenizer_file: Path, end: Any) -> None:
    config = tokenizer_file.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": end}))
    assert load_tokenizer(tokenizer_file).end is None
    config.write_text(json.dumps({"bos_token": "<s>"}))
    assert load_tokenizer(tokenizer_file).end == 7


@pytest.mark.parametrize("content", [[], {"eos_token": 7}, {"eos_token": ["</s>"]}, {"eos_token": {"text": "</s>"}}])
def test_an_unusable_configuration_beside_it_is_rejected(tokenizer_file: Path, content: Any) -> None:
    tokenizer_file.with_name("tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"data\.tokenizer=.*tokenizer_config\.json"):
        load_tokenizer(tokenizer_file)


STATE = {
    "truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 17},
        "direction": "Left",
        "pad_to_multiple_of": 5,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[UNK]",
    },
}


@pytest.mark.parametrize("state", [["truncation"], ["padding"], ["truncation", "padding"]], ids="+".join)
def test_truncation_and_padding_of_the_file_are_switched_off(tokenizer_file: Path, state: list[str]) -> None:
    content = json.loads(tokenizer_file.read_text())
    tokenizer_file.write_text(json.dumps(content | {name: STATE[name] for name in state}))
    documents = [b"to be " * 500, b"to", b"be"]
    lengths = [len(ids) for ids in load_tokenizer(tokenizer_file).encode(documents)]
    assert lengths == [1000, 1, 1]
    train, _ = tokenize(documents, load_tokenizer(tokenizer_file), 0.0)
    assert train.tokens.tolist() == [1, 2] * 500 + [7, 1, 7, 2, 7]


def test_a_file_with_dropout_gives_the_same_ids_each_time(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] == 0.5
    (ids,) = load_tokenizer(tmp_path / "tokenizer.json").encode([b"ab" * 64])
    assert ids.tolist() == [2] * 64


def _saved(folder: Path, model: str, *, end: str = "special") -> Path:
    """A tokenizer with `</s>` as a special token, an added word, or a token of its model."""
    hf = pytest.importorskip("tokenizers")
    letters = "ab</s>"
    pieces = ["<unk>", *dict.fromkeys(letters), "ab", "</s>"]
    ids = {piece: at for at, piece in enumerate(pieces)}
    made = {
        "words": lambda: hf.models.WordLevel(ids, unk_token="<unk>"),
        "wordpiece": lambda: hf.models.WordPiece(ids, unk_token="<unk>"),
        "unigram": lambda: hf.models.Unigram([(piece, -float(len(piece) < 2)) for piece in pieces], unk_id=0),
        "bpe": lambda: hf.models.BPE(ids, [("a", "b")], unk_token="<unk>"),
        "bpe of whole words": lambda: hf.models.BPE(ids, [("a", "b")], unk_token="<unk>", ignore_merges=True),
    }[model]()
    tokenizer = hf.Tokenizer(made)
    if model != "unigram":
        tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    if end == "special":
        tokenizer.add_special_tokens(["<unk>", "</s>"])
    if end == "word":
        tokenizer.add_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


MODELS = ["words", "wordpiece", "unigram", "bpe", "bpe of whole words"]


@pytest.mark.parametrize("end", ["special", "word", "piece"])
@pytest.mark.parametrize("model", MODELS)
def test_text_that_spells_a_special_token_stays_text(tmp_path: Path, model: str, end: str) -> None:
    path = _saved(tmp_path, model, end=end)
    tokenizer = load_tokenizer(path)
    texts = [b"</s>", b"ab </s> ab", b"ab</s></s>", b"</s", b"zz </s>"]
    assert all(tokenizer.end not in ids and len(ids) for ids in tokenizer.encode(texts))
    if model not in ("words", "wordpiece"):  # which have no letters within a word
        assert tokenizer.decode(tokenizer.encode([b"</s>"])[0].tolist()).replace(" ", "") == "</s>"
    train, _ = tokenize(texts, tokenizer, 0.0)
    assert (train.tokens == tokenizer.end).sum() == len(texts)
    assert all(train.tokens[begin - 1] == tokenizer.end for begin in [*train.starts[1:], len(train)])
    assert [ids.tolist() for ids in pickle.loads(pickle.dumps(tokenizer)).encode(texts)] == [
        ids.tolist() for ids in tokenizer.encode(texts)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_text_without_special_tokens_has_the_ids_of_the_package(tmp_path: Path, model: str) -> None:
    path = _saved(tmp_path, model)
    plain = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    for text in ("ab ab", "a", "zebra", "</ s>", "<a> b>"):
        assert load_tokenizer(path).encode([text.encode()])[0].tolist() == plain.encode(text).ids


@pytest.mark.parametrize("model", MODELS)
def test_allowed_special_tokens_become_ids_and_no_second_end_follows(tmp_path: Path, model: str) -> None:
    tokenizer = load_tokenizer(_saved(tmp_path, model), allow_special_tokens=True)
    train, _ = tokenize([b"ab </s>", b"</s> ab", b"ab"], tokenizer, 0.0)
    end, ab = tokenizer.end, tokenizer.encode([b"ab"])[0].tolist()
    documents = [piece.tolist() for piece in np.split(train.tokens, train.starts[1:])]
    assert [[i for i in ids if i in (end, *ab)] for ids in documents] == [[*ab, end], [end, *ab, end], [*ab, end]]


def test_an_end_token_of_one_letter_cannot_be_text(tmp_path: Path) -> None:
    path = _saved(tmp_path, "bpe")
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode([b"b"])[0].tolist()
    with pytest.raises(DataError, match=r"encodes the text 'a b' as a special token; use .*data\.allow_special_tokens"):
        tokenizer.encode([b"b a b"])
    assert tokenizer.end in load_tokenizer(path, allow_special_tokens=True).encode([b"b a b"])[0]


def test_token_files_have_the_same_ids_as_training_on_the_text(tmp_path: Path) -> None:
    path = _saved(tmp_path, "unigram")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "ab</s>"}) + "\n" + json.dumps({"text": "</s>ab"}) + "\n")
    for allowed in (False, True):
        out = tmp_path / str(allowed)
        make_token_file([tmp_path / "a.jsonl"], out, tokenizer=str(path), allow_special_tokens=allowed, workers=1)
        documents = [b"ab</s>", b"</s>ab"]
        train, _ = tokenize(documents, load_tokenizer(path, allow_special_tokens=allowed), 0.0)
        ids = [i for document in read_by_hand(out)[1] for i in document]
        assert ids == train.tokens.tolist() and (np.array(ids) == 8).sum() == (3 if allowed else 2)
    with pytest.raises(DataError, match="byte has no special tokens"):
        make_token_file([tmp_path / "a.jsonl"], tmp_path / "b", allow_special_tokens=True)


def test_a_vocabulary_smaller_than_the_tokenizer_is_rejected() -> None:
    assert least_vocab() == 256
    check_vocab(256, ByteTokenizer())
    with pytest.raises(DataError, match=r"model.vocab=255.*data.tokenizer=byte; use 256 or more"):
        check_vocab(255, ByteTokenizer())


def test_files_that_are_not_a_tokenizer_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer.json: no such file; use byte"):
        load_tokenizer(path)
    path.write_text('{"model": 5}')
    with pytest.raises(DataError, match=r"not a tokenizer.json"):
        load_tokenizer(path)


def test_without_the_tokenizers_package_the_error_names_the_extra(
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
