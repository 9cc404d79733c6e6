"""``megastack generate`` and ``megastack evaluate``: from a run folder, on other layouts than it was trained on."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastack.cli.main import main
from megastack.cli.unused import UNUSED, unused_keys
from megastack.config.fields import keys
from megastack.config.schema import TrainConfig
from megastack.interop.transfer import import_model
from tests.data.token_cases import write_by_hand
from tests.interop.hub_folders import CONFIGS, write
from tests.tiny_runs import rows, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on two pipeline stages, validated at its end."""
    folder = tmp_path_factory.mktemp("runs")
    more = ["parallel.pp=2", "parallel.layers_per_stage=[2,1]", "model.layers=3", "run.steps=3", "run.validate_every=3"]
    assert train(folder, *more, "checkpoint.at_end=true") == 0
    return folder / "run"


def record_of(verb: str, run: Path, *arguments: str) -> dict[str, Any]:
    record = run.parent / "record.json"
    record.unlink(missing_ok=True)
    assert main([verb, str(run), *arguments, "--json", str(record), "launch.threads_per_rank=1"]) == 0
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def ids(run: Path, *arguments: str) -> list[list[int]]:
    return [text["ids"] for text in record_of("generate", run, "--max-new-tokens", "8", *arguments)["texts"]]


def test_generation_from_a_run_is_the_same_on_other_layouts(run: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("three times\n\n7 times 7 is\n")
    given = ["--prompt", "one", "--prompts", str(prompts), "--temperature", "1", "--seed", "3"]
    own = ids(run, *given)
    assert len(own) == 3 and all(len(each) == 8 or each[-1] == 0xFF for each in own)
    assert ids(run, *given, "parallel.pp=1") == own
    assert ids(run, *given, "parallel.pp=1", "parallel.tp=2", "--no-cache") == own


def test_a_single_text_is_shown_as_it_grows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    more = ["parallel.pp=1", "compile=true", "optim.lr=1"]
    found = record_of("generate", run, "--prompt", "2 times 2", "--max-new-tokens", "5", *more)
    out = capsys.readouterr().out
    assert "note      generate does not use compile, optim.lr\n" in out
    assert "2 times 2" + found["texts"][0]["text"] + "\n" in out
    assert "one rank, fp64, greedy" in out and str(run / "checkpoints") in out
    assert sorted(run.rglob("*")) == before


def test_evaluation_of_the_validation_split_equals_the_runs_validation(run: Path) -> None:
    row = rows(run, "validation")[-1]
    for layout in (["parallel.pp=1"], ["parallel.dp=2"]):
        found = record_of("evaluate", run, *layout)
        assert found["tokens"] == row["tokens"]
        assert math.isclose(found["nats"], row["loss"], rel_tol=1e-12)
    assert math.isclose(found["perplexity"], math.exp(row["loss"]), rel_tol=1e-12)


def test_every_token_of_a_file_counts_once(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("two times two is four, and so on " * 3)
    documents = tmp_path / "text.jsonl"
    documents.write_text('{"text": "abc"}\n{"text": "' + "d" * 40 + '"}\n')
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.frombuffer(text.read_bytes(), np.uint8).astype(np.uint16))
    found = record_of("evaluate", run, "--file", str(text), "parallel.pp=1")
    assert found["tokens"] == len(text.read_text()) - 1
    assert record_of("evaluate", run, "--file", str(tokens), "parallel.pp=1")["nats"] == pytest.approx(
        found["nats"], rel=1e-12
    )
    assert record_of("evaluate", run, "--file", str(documents), "parallel.pp=1")["tokens"] == 2 + 39


def test_token_files_are_read_in_every_format(run: Path, tmp_path: Path) -> None:
    """Documents of 5 and 50 tokens, 53 of them predicted: a pair in each way to name it, and an array of rows."""
    ids = np.frombuffer(b"four times four is sixteen, and so on " * 2, np.uint8)[:55]
    write_by_hand(tmp_path / "pair", [ids[:5].tolist(), ids[5:].tolist()], 8)
    texts = [bytes(part).decode() for part in (ids[:5], ids[5:])]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    expected = record_of("evaluate", run, "--file", f"{tmp_path}/text.jsonl", "parallel.pp=1")
    for name, layout in (("pair", "parallel.pp=1"), ("pair.bin", "parallel.pp=2"), ("pair.idx", "parallel.pp=1")):
        found = record_of("evaluate", run, "--file", f"{tmp_path}/{name}", layout)
        assert found["tokens"] == expected["tokens"] == 53
        assert math.isclose(found["nats"], expected["nats"], rel_tol=1e-12)
    np.save(tmp_path / "rows.npy", ids.reshape(5, 11).astype(np.int32))
    assert record_of("evaluate", run, "--file", f"{tmp_path}/rows.npy", "parallel.pp=1")["tokens"] == 50


@pytest.mark.parametrize("bad", [300, -1])
def test_a_token_file_with_other_ids_is_rejected(
    bad: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "bad.npy", np.array([1, 2, bad, 3], dtype=np.int16))
    assert main(["evaluate", str(run), "--file", f"{tmp_path}/bad.npy", "launch.threads_per_rank=1"]) == 78
    assert f"token id {bad} in {tmp_path}/bad.npy at token 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "arguments", "reason"),
    [
        ("generate", [], "no prompt"),
        ("generate", ["--prompt", "a", "parallel.dp=2"], "parallel.dp=2"),
        ("generate", ["--prompt", "a", "--top-k", "2"], "top_k=2: temperature=0"),
        ("generate", ["--prompts", "nowhere.txt"], "nowhere.txt"),
        ("generate", ["--prompt", "a", "model.hidden=32", "parallel.pp=1"], "does not fit the model"),
        ("generate", ["--prompt", "a", "parallel.tp=3"], "parallel.tp=3: must divide"),
        ("evaluate", ["--file", "nowhere.txt"], "nowhere.txt: does not exist"),
        ("evaluate", ["data.validation_fraction=0"], "no validation split"),
    ],
)
def test_invalid_arguments_are_rejected(
    run: Path, verb: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(run), *arguments, "launch.threads_per_rank=1"]) == 78
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_all_errors_make_one_report(run: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that cannot be read, rules, layers, data and prompts."""
    invalid = ["parallel.tq=2", "parallel.tp=3", "model.mlp={_target_: nope.A}", "data.tokenizer=none.json"]
    more = ["--prompts", "nowhere.txt", "--temperature", "-1"] if verb == "generate" else ["data.paths=[gone.jsonl]"]
    assert main([verb, str(run), *invalid, *more, "model.layers=0", "run.steps=2"]) == 78
    report = capsys.readouterr().err.splitlines()
    starts = ("parallel.tq=2: no such key", "parallel.tp=3: must divide", "model.mlp._target_=nope.A: importing")
    starts += ("model.layers=0: must be", "data.tokenizer=none.json: no such file")
    own = ("temperature=-1", "--prompts nowhere.txt") if verb == "generate" else ("data.paths=gone.jsonl",)
    assert all(any(line.startswith(start) for line in report) for start in (*starts, *own)), report
    assert all(line.startswith((*starts, *own)) for line in report), report


def test_damaged_weights_are_named_with_the_newest_usable_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, usable = (tmp_path / "checkpoints" / f"step_{step:08d}" for step in (3, 2))
    for path in (damaged, usable):
        shutil.copytree(run / "checkpoints" / "step_00000003", path)
    shutil.copy(run / "config.yaml", tmp_path)
    file = damaged / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    export = ["export", str(tmp_path), "--out", str(tmp_path / "out")]
    for command in (
        ["generate", str(tmp_path), "--prompt", "a", "parallel.pp=1"],
        ["evaluate", str(tmp_path), "parallel.dp=2"],
        export,
    ):
        assert main(command) == 78
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{damaged}: no usable checkpoint ({file}: ") and line.endswith(f"; use {usable}")


@pytest.mark.parametrize("verb", UNUSED)
def test_keys_that_a_verb_does_not_use_exist(verb: str) -> None:
    assert set(UNUSED[verb]) <= {key.name for key in keys(TrainConfig)}
    assert unused_keys(verb, ["observe.dump_steps=[1]", "+model.layers=3", "data=builtin"]) == ["observe.dump_steps"]


def test_a_folder_without_a_checkpoint_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 78
    assert f"{tmp_path}: no usable checkpoint" in capsys.readouterr().err


def test_an_imported_folder_has_its_model_and_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    source = write(tmp_path / "source", CONFIGS["gpt2"])  # of 32 learned positions
    vocabulary = {chr(ord("a") + i): i for i in range(26)} | {"<unk>": 26, "</s>": 27}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    letters.save(str(source / "tokenizer.json"))
    import_model(source, tmp_path / "in", proof="none")
    given = ["--prompt", "abc", "--prompt", "defgh", "--max-new-tokens", "6", "precision.compute=fp64"]
    own = record_of("generate", tmp_path / "in", *given)["texts"]
    assert own[0]["prompt"] == "abc" and all(len(text["ids"]) == 6 or text["ids"][-1] == 27 for text in own)
    assert record_of("generate", tmp_path / "in", *given, "parallel.tp=2")["texts"] == own
    assert main(["generate", str(tmp_path / "in"), "--prompt", "abc", "--max-new-tokens", "30"]) == 78
    assert "prompt 0: its 3 tokens and max_new_tokens=30 exceed the 32 positions" in capsys.readouterr().err
    letters.add_special_tokens(["</s>"])
    letters.save(str(tmp_path / "special.json"))
    command = ["generate", str(tmp_path / "in"), "--prompt", "ab</s>", "--max-new-tokens", "31"]
    for allowed, count in (("false", 6), ("true", 3)):
        choices = [f"data.tokenizer={tmp_path / 'special.json'}", f"data.allow_special_tokens={allowed}"]
        assert main([*command, *choices]) == 78
        assert f"prompt 0: its {count} tokens" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "in"), "--prompt", "a\udcff"]) == 78
    assert "is not UTF-8" in capsys.readouterr().err


def test_an_empty_token_file_is_rejected(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.npy").touch()
    assert main(["evaluate", str(run), "--file", f"{tmp_path}/empty.npy", "launch.threads_per_rank=1"]) == 78
    assert f"{tmp_path}/empty.npy: cannot be read as an array" in capsys.readouterr().err


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported folder without a tokenizer, with a vocabulary of 37."""
    folder = tmp_path_factory.mktemp("bare")
    import_model(write(folder / "source", CONFIGS["llama2"]), folder / "in", proof="none")
    return folder / "in"


def test_ids_in_a_file_need_no_tokenizer(bare: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(30, dtype=np.int16))
    assert record_of("evaluate", bare, "--file", f"{tmp_path}/ids.npy")["tokens"] == 29
    lost = f"data.tokenizer={tmp_path}/lost.json"
    assert record_of("evaluate", bare, "--file", f"{tmp_path}/ids.npy", lost)["tokens"] == 29


@pytest.mark.parametrize(
    ("verb", "arguments", "reason"),
    [
        (
            "generate",
            ["--prompt", "a"],
            "data.tokenizer=byte: BARE has no tokenizer.json, and its 37 tokens are not bytes",
        ),
        ("evaluate", ["--file", "TEXT"], "data.tokenizer=byte: BARE has no tokenizer.json"),
        ("evaluate", ["--file", "TEXT", "data.tokenizer=byte"], "model.vocab=37: must hold the 256 ids"),
        ("evaluate", [], "BARE: is an import, which no run and no validation split belong to; use --file FILE"),
        ("evaluate", ["data.tokenizer=byte"], "is an import, which no run and no validation split belong to"),
        ("evaluate", ["--file", "gone.npy"], "--file gone.npy: does not exist"),
    ],
)
def test_what_an_import_lacks_is_named(
    bare: Path, tmp_path: Path, verb: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("three words here")
    given = [str(tmp_path / "text.txt") if each == "TEXT" else each for each in arguments]
    assert main([verb, str(bare), *given, "launch.threads_per_rank=1"]) == 78
    report = capsys.readouterr().err
    assert reason.replace("BARE", str(bare)) in report
    assert len(report.splitlines()) == 1
