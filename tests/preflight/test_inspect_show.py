"""``megastack show`` rejects the models and data that ``train`` rejects; data on another machine is a note."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastack.cli.main import main
from megastack.preflight import inspect
from tests.data.token_cases import write_by_hand
from tests.tiny_runs import overrides


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Data by name: token files with and without an invalid id, lines that are not JSON, empty and missing files."""
    write_by_hand(tmp_path / "good", [[8] * 1000] * 3, 8)
    write_by_hand(tmp_path / "bad", [[8] * 1000, [999] * 1000, [8] * 1000], 8)
    (tmp_path / "lines.jsonl").write_text("no json\n")
    (tmp_path / "empty.txt").write_text("")
    return {name: str(tmp_path / name) for name in ("good", "bad", "lines.jsonl", "empty.txt", "gone", "gone.jsonl")}


def report_of(verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], *choices: str) -> tuple[int, list[str]]:
    capfd.readouterr()
    code = main([verb, *overrides(tmp_path), "model.vocab=256", "data.validation_fraction=0", *choices])
    captured = capfd.readouterr()
    assert bool(captured.out) is (code == 0)
    return code, captured.err.strip().splitlines()


BOTH = [
    ["model.mlp={_target_: my.file.Nothing}"],
    ["model.attention={_target_: megastack.layers.attention.Nothing}", "model.block={_target_: torch.nn.Linear}"],
    ["model.mlp={_target_: tests.preflight.test_inspect.Picky}"],
    ["optim.freeze=[nothing]", "recompute.mode=pattern", "recompute.pattern=nothing"],
    ["data.source=bin", "data.paths=[{bad}]"],
    ["data.source=bin", "data.paths=[{good}]", "data.phases=[{{from_step: 1, paths: [{bad}]}}]"],
    ["data.paths=[]", "data.blend=[{{paths: [{good}], weight: 1}}, {{paths: [{bad}], weight: 1}}]", "optim.lr=-1"],
    ["data.paths=[{lines.jsonl}]", "model.mlp={{_target_: my.file.Nothing}}"],
    ["data.source=text", "data.paths=[{empty.txt}]"],
    ["data.paths=[{lines.jsonl}]", "model.heads=3", "unknown=1"],
    ["batch.sequence_length=100000"],
    ["data.source=bin", "data.paths=[{good}]", "batch.sequence_length=100000"],
]


@pytest.mark.parametrize("choices", BOTH, ids=" ".join)
def test_it_rejects_what_train_rejects_with_the_same_report(tmp_path, places, capfd, choices):
    given = [choice.replace("{{", "{").replace("}}", "}") for choice in choices]
    for name, path in places.items():
        given = [choice.replace(f"{{{name}}}", path) for choice in given]
    code, report = report_of("train", tmp_path, capfd, "run.steps=2", *given)
    assert (code, bool(report)) == (78, True)
    assert report_of("show", tmp_path, capfd, "run.steps=2", *given) == (78, report)


def test_missing_data_is_a_note_and_the_rest_is_checked(tmp_path, places, capfd):
    gone, bad = places["gone"], places["bad"]
    for choices in (["data.source=bin", f"data.paths=[{gone}]"], [f"data.paths=[{gone}.jsonl, {gone}/*.jsonl]"]):
        code, notes = report_of("show", tmp_path, capfd, *choices)
        assert code == 0 and notes
        assert all(note.startswith("note: data.paths=") and "is not on this machine" in note for note in notes)
        assert report_of("train", tmp_path, capfd, *choices)[0] == 78
    code, notes = report_of("show", tmp_path, capfd, f"data.tokenizer={gone}.json")
    assert (code, notes) == (0, [f"note: data.tokenizer={gone}.json: is not on this machine, not checked"])
    code, report = report_of("show", tmp_path, capfd, "data.source=bin", f"data.paths=[{gone}, {bad}]")
    assert code == 78 and len(report) == 1 and "token id 999" in report[0]
    code, report = report_of("show", tmp_path, capfd, "data.tokenizer=bytes")
    assert code == 78 and "data.tokenizer=bytes: no such file" in report[0]


def test_large_text_is_not_read(tmp_path, places, capfd, monkeypatch):
    path = tmp_path / "large.jsonl"
    path.write_text(json.dumps({"text": "a" * 4096}) + "\nno json\n")
    assert report_of("show", tmp_path, capfd, f"data.paths=[{path}]")[0] == 78
    monkeypatch.setattr(inspect, "MOST_TEXT", 1024)
    code, notes = report_of("show", tmp_path, capfd, f"data.paths=[{path}]")
    assert code == 0 and notes == [f"note: data.paths={path}: 0 MiB of text in all, not checked"]


def test_a_built_in_corpus_that_is_too_short_is_a_note(capfd):
    capfd.readouterr()
    assert main(["show", "model=llama3_405b", "parallel.tp=8", "batch.sequence_length=1048576"]) == 0
    assert "note: batch.sequence_length=1048576: the training split has" in capfd.readouterr().err
    assert main(["show", "model=llama3_405b", "model.vocab=200"]) == 78
    assert "model.vocab=200: must hold the 256 ids" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["show", "train"])
def test_an_error_that_several_checks_find_is_reported_once(verb, tmp_path, capfd):
    assert report_of(verb, tmp_path, capfd, "seed=-1") == (78, ["seed=-1: must be at least 0; use 0 or more"])


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (2, "cuda")])
def test_the_memory_shown_is_that_of_the_device_of_this_machine(tmp_path, monkeypatch, gpus, device):
    monkeypatch.setattr(inspect, "count_gpus", lambda: gpus)
    found = {}
    for name in ("auto", "cpu", "cuda"):
        path = tmp_path / f"{name}.json"
        assert main(["show", *overrides(tmp_path), "model.dropout=0.1", f"device={name}", "--json", str(path)]) == 0
        found[name] = json.loads(path.read_text())["places"][0]["activation_bytes"]
    assert found["cuda"] < found["cpu"] and found["auto"] == found[device]
