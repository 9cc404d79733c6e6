"""Token ids of an export, from the original or the tokenizer's files; and the same bytes after a round trip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastack.config.choices import DataSource
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError
from megastack.interop.hub_export import byte_ids, generation_config, token_ids
from megastack.interop.transfer import export_model, import_model
from tests.interop.hub_folders import CONFIGS, LLAMA, write
from tests.interop.test_transfer import imported_config

BARE = {key: value for key, value in LLAMA.items() if not key.endswith("_token_id")} | {"num_hidden_layers": 1}
WORDS: dict[str, Any] = {"model": {"vocab": {"a": 0, "<s>": 5}}, "added_tokens": [{"id": 36, "content": "<end>"}]}


def folder(path: Path, **files: Any) -> dict[str, Path]:
    path.mkdir(exist_ok=True)
    named = {f"{name}.json": content for name, content in files.items()}
    for name, content in named.items():
        (path / name).write_text(json.dumps(content))
    return {name: path / name for name in named}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None)),
        ({"tokenizer": WORDS, "tokenizer_config": {"eos_token": "<end>", "bos_token": "<s>"}}, (5, 36)),
        ({"tokenizer": WORDS, "tokenizer_config": {"eos_token": {"content": "<end>"}, "bos_token": None}}, (None, 36)),
        ({"tokenizer": WORDS, "special_tokens_map": {"bos_token": {"content": "<s>"}}}, (5, None)),
        ({"tokenizer": {"model": {"vocab": [["<unk>", 0.0], ["</s>", 0.0]]}}}, (None, 1)),
        ({"tokenizer": {"model": {"vocab": {"<|endoftext|>": 3}}}}, (None, 3)),
        ({"vocab": {"a": 0, "<end>": 7}, "tokenizer_config": {"eos_token": "<end>"}}, (None, 7)),
        ({"tokenizer_config": {"eos_token": "<end>"}}, (None, None)),  # no vocabulary to look it up in
    ],
)
def test_the_tokenizers_files_have_beginning_and_end(
    files: dict[str, Any], expected: tuple[Any, Any], tmp_path: Path
) -> None:
    found = token_ids(folder(tmp_path, **files))
    assert (found["bos_token_id"], found["eos_token_id"]) == expected
    assert found.keys() == {"bos_token_id", "eos_token_id"}


def test_the_original_takes_precedence_over_the_tokenizer_and_that_over_the_class(tmp_path: Path) -> None:
    files = folder(tmp_path, tokenizer=WORDS, tokenizer_config={"eos_token": "<end>"})
    original = {"model_type": "llama", "eos_token_id": [2, 36], "pad_token_id": 0}
    assert token_ids(files, original) == {"eos_token_id": [2, 36], "pad_token_id": 0, "bos_token_id": None}
    assert token_ids(files, {"model_type": "llama", "eos_token_id": None})["eos_token_id"] is None
    assert token_ids(files, {"model_type": "llama"})["eos_token_id"] == 36
    assert token_ids({}, {"model_type": "llama"}, vocab=37) == {"bos_token_id": 1, "eos_token_id": 2}
    assert token_ids({}, {"model_type": "gpt2"}, vocab=37) == {"bos_token_id": None, "eos_token_id": None}


def test_invalid_ids_are_errors_that_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eos_token_id=two: must be a token id or a list of them or null"):
        token_ids({}, {"eos_token_id": "two"})
    files = folder(tmp_path, tokenizer=WORDS, tokenizer_config={"eos_token": "<gone>"})
    with pytest.raises(
        ConfigError, match=r"token=<gone>: eos_token in the tokenizer's settings, but not in its vocabulary"
    ):
        token_ids(files)


def test_generation_config_has_the_same_ids() -> None:
    assert generation_config({"bos_token_id": 1, "eos_token_id": [2, 3], "unk_token_id": 0}) == {
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
    assert generation_config({"bos_token_id": None, "eos_token_id": None}) == {}
    assert byte_ids(256) == {"bos_token_id": None, "eos_token_id": 255}
    assert byte_ids(37) == {"bos_token_id": None, "eos_token_id": None}


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def test_an_export_has_the_ids_of_the_imported_tokenizer_and_a_round_trip_the_same_bytes(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "source", BARE)
    folder(source, tokenizer=WORDS, tokenizer_config={"eos_token": "<end>", "bos_token": "<s>"})
    import_model(source, tmp_path / "in", proof="none")
    config = imported_config(tmp_path / "in")
    export_model(tmp_path / "in" / "weights", tmp_path / "out", config, proof="none")
    written = read(tmp_path / "out" / "config.json")
    assert (written["bos_token_id"], written["eos_token_id"]) == (5, 36)
    assert read(tmp_path / "out" / "generation_config.json") == {
        "_from_model_config": True,
        "bos_token_id": 5,
        "eos_token_id": 36,
    }
    import_model(tmp_path / "out", tmp_path / "in again", proof="none")
    again = imported_config(tmp_path / "in again")
    assert again.model == config.model
    export_model(tmp_path / "in again" / "weights", tmp_path / "out again", again, proof="none")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out again").iterdir())
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "out again" / name).read_bytes(), name


def test_the_generation_config_of_the_source_is_copied(tmp_path: Path) -> None:
    source = write(tmp_path / "source", CONFIGS["llama2"])
    (source / "generation_config.json").write_text('{"temperature": 0.6,\n "eos_token_id": [2, 3]}')
    import_model(source, tmp_path / "in", proof="none")
    export_model(tmp_path / "in" / "weights", tmp_path / "out", imported_config(tmp_path / "in"), proof="none")
    kept = (tmp_path / "out" / "generation_config.json").read_bytes()
    assert kept == (source / "generation_config.json").read_bytes()
    assert read(tmp_path / "out" / "config.json")["eos_token_id"] == 2


def exported(tmp_path: Path, config: TrainConfig, number: int) -> tuple[dict[str, Any], Path, tuple[str, ...]]:
    """An export of a checkpoint that was not imported, so that the run's own tokenizer is used."""
    run, out = tmp_path / "run" / "weights", tmp_path / f"out {number}"
    if not run.exists():
        run.parent.mkdir()
        (tmp_path / "in" / "weights").rename(run)
    done = export_model(run, out, config, proof="none")
    return read(out / "config.json"), out, done.notes


def test_a_runs_own_tokenizer_has_its_end_and_is_copied_with_its_usual_name(tmp_path: Path) -> None:
    import_model(write(tmp_path / "source", BARE), tmp_path / "in", proof="none")
    config = imported_config(tmp_path / "in")
    folder(tmp_path / "words", mine=WORDS, tokenizer_config={"eos_token": "<end>"})
    own = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "words" / "mine.json")))
    written, out, notes = exported(tmp_path, own, 1)
    assert (written["bos_token_id"], written["eos_token_id"], notes) == (None, 36, ())
    assert read(out / "tokenizer.json") == WORDS
    written, out, notes = exported(tmp_path, config, 2)
    assert (written["eos_token_id"], notes) == (None, ())  # bytes, whose end is not among 37 ids
    written, out, notes = exported(tmp_path, replace(config, data=replace(config.data, source=DataSource.bin)), 3)
    assert written["eos_token_id"] is None and "--like" in notes[0]
    assert not (out / "generation_config.json").exists()
    lost = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "lost.json")))
    written, out, notes = exported(tmp_path, lost, 4)
    assert written["eos_token_id"] is None and "lost.json does not exist" in notes[0]


WINDOWED = CONFIGS["mistral"] | {"sliding_window": 16}


@pytest.mark.parametrize(("length", "window"), [(16, 16), (17, None)])
def test_a_window_is_kept_if_the_runs_sequences_fit_in_it(length: int, window: int | None, tmp_path: Path) -> None:
    done = import_model(write(tmp_path / "source", WINDOWED), tmp_path / "in", sequence_length=16, proof="none")
    assert "attends to 16 tokens" in done.notes[0]
    assert "attends to 16 tokens" in next((tmp_path / "in" / "model").glob("*.yaml")).read_text()
    config = imported_config(tmp_path / "in", batch={"global_size": 1, "sequence_length": length})
    weights = tmp_path / "in" / "weights"
    export_model(weights, tmp_path / "out", config, architecture="mistral", proof="reference")
    written = read(tmp_path / "out" / "config.json")
    assert written["sliding_window"] == window
    assert written["max_position_embeddings"] == (64 if window else length)


def test_only_the_token_ids_of_another_model_are_used(tmp_path: Path) -> None:
    import_model(write(tmp_path / "source", BARE), tmp_path / "in", proof="none")
    other = write(tmp_path / "other", CONFIGS["llama3"] | {"eos_token_id": 7, "max_position_embeddings": 4096})
    config, weights = imported_config(tmp_path / "in"), tmp_path / "in" / "weights"
    export_model(weights, tmp_path / "out", config, like=other, proof="none")
    written = read(tmp_path / "out" / "config.json")
    assert (written["eos_token_id"], written["max_position_embeddings"]) == (7, 16)
    (other / "config.json").write_text('{"model_type": [], "eos_token_id": 8}')
    export_model(weights, tmp_path / "out again", config, like=other, proof="none")
    assert read(tmp_path / "out again" / "config.json")["eos_token_id"] == 8
