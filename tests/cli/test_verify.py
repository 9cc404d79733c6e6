"""``megastack verify``: exit codes, console output, JSON record."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megastack.cli.main import main

SMALL = [
    *("experiment=parity", "model.layers=2", "model.hidden=16", "model.ffn=16", "model.vocab_multiple=8"),
    *("batch.global_size=2", "batch.sequence_length=8", "data.source=jsonl"),
]
OWN = "model.mlp={_target_: tests.testing.wrong_layers.%s}"


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    words = [{"text": f"document {number} of many words " * 3} for number in range(60)]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, words)))
    return ["verify", *SMALL, f"data.paths=[{tmp_path}/words.jsonl]", "--steps", "1"]


def test_equal_is_0_and_prints_tolerance_and_precision(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdict.json"
    others = ["compile=true", "device=cuda", "observe.dump_steps=[1]"]
    code = main([*small, OWN % "GainMLP", "parallel.tp=2", "precision=fp32", *others, "--json", str(file)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "fp64 (the configuration says fp32)" in printed
    assert "tp2, sequence parallel, against one rank" in printed
    assert "equal" in printed.splitlines()[-1]
    assert [line for line in printed.splitlines() if line.startswith("note")] == [
        "note     compile=true is not compared: verify runs the layouts without compilation",
        "note     device=cuda is not compared: verify runs the layouts on the CPU",
        "note     verify does not use observe.dump_steps",
    ]
    record = json.loads(file.read_text())
    assert record["equal"] is True
    assert record["layouts"][0]["worst"]["sgd"]["gradient"] < 1e-12
    assert record["layouts"][0]["finding"] is None


def test_a_difference_is_1_and_names_parameter_amount_and_cause(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdict.json"
    assert main([*small, OWN % "UndeclaredGain", "parallel.tp=2", "--json", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("differs  the gradient of blocks.1.mlp.gain (UndeclaredGain)") for line in lines)
    assert any(line.startswith("by ") and "1e-10 is allowed" in line for line in lines)
    assert any(line.startswith("cause    undeclared partial gradient over tp") for line in lines)
    assert max(map(len, lines)) < 125
    finding = json.loads(file.read_text())["layouts"][0]["finding"]
    assert (finding["kind"], finding["name"], finding["step"]) == ("gradient", "blocks.1.mlp.gain", 1)


def test_all_prints_a_line_for_each_layout_and_explains_the_first_bad_one(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdict.json"
    arguments = [*small, OWN % "UndeclaredGain", "model.layers=1", "--all", "--ranks", "2", "--json", str(file)]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    statuses = {layout["layout"]: layout["status"] for layout in json.loads(file.read_text())["layouts"]}
    assert statuses == {"dp2": "equal", "tp2, sequence parallel": "differs", "tp2, no sequence parallelism": "equal"}
    assert all(any(line.startswith(f"{s:8} {name}") for line in printed.splitlines()) for name, s in statuses.items())
    assert "1 of 3 layouts is not equal" in printed
    assert "blocks.0.mlp.gain" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.tp=3"], "parallel.tp=3: must divide model.heads=4"),
        (["model.headz=3"], "use model.heads"),
        (["parallel.tp=2", OWN % "Undeclared"], "blocks.0.mlp.extra: has no placement"),
        (["parallel.tp=2", OWN % "Nowhere"], "has no class or function Nowhere"),
        (["--all", "--ranks", "7"], "--ranks=7: no layout of 7 ranks is valid"),
        (["--all", "--ranks", "65"], "ranks=65: .*at most 64"),
        (["data.paths=[nothing.txt]", "parallel.tp=2"], "nothing.txt"),
    ],
)
def test_a_rejected_configuration_is_78_with_the_reason(
    small: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small, *arguments]) == 78
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("flags", [[], ["--all", "--ranks", "2"]])
def test_all_errors_make_one_report(
    small: list[str], tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").write_text("tp: 3\n")
    faulty = ["parallel=mine", "model.layers=x", OWN % "Nowhere", "data.paths=[nothing.txt]", "optim.betas=[0.9]"]
    assert main([*small, *faulty, "--config-dir", str(tmp_path), *flags]) == 78
    captured = capsys.readouterr()
    report = captured.err.splitlines()
    starts = ["model.layers=x: must be a whole number", "optim.betas=[0.9]: must be two numbers", "model.mlp._target_="]
    tp = f"parallel.tp=3: must divide model.heads=4 (in {tmp_path}/parallel/mine.yaml); use"
    for start in (*starts, "data.paths=nothing.txt: does not exist"):
        assert sum(line.startswith(start) for line in report) == 1, report
    assert sum(line.startswith(tp) for line in report) == (not flags)  # of all layouts, its own is not one
    assert captured.out == ""


@pytest.mark.parametrize("flags", [["--ranks", "2"], ["--all", "--ranks", "0"], ["--steps", "none"], ["--nonsense"]])
def test_a_wrong_flag_is_2(small: list[str], flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*small, *flags])
    assert caught.value.code == 2


def test_a_rank_of_another_launcher_is_rejected(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(small) == 78


def test_one_rank_is_equal_to_itself_with_a_note(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small) == 0
    assert "layouts are compared with one rank, which is this layout; try parallel.tp=2" in capsys.readouterr().out
