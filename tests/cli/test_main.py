"""The command line itself: verbs, flags, help."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megastack.cli.main import VERBS, main


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["-m"],
        ["train", "--no-such-flag"],
        ["train", "--multi"],
        ["show", "-m"],
        ["show", "--format", "gif"],
    ],
)
def test_a_wrong_verb_or_flag_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: megastack" in capsys.readouterr().err


def test_help_names_the_verbs_and_imports_no_torch():
    script = (
        "import sys; from megastack.cli.main import main\n"
        "from megastack.cli.main import VERBS\n"
        "for arguments in (['--help'], *([verb, '--help'] for verb in VERBS)):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'hydra', 'rich'} & set(sys.modules), sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in VERBS) and "--config-dir" in done.stdout


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert re.fullmatch(r"megastack .+\n", capsys.readouterr().out)


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "megastack.cli", "show", "seed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("seed"), done.stderr


def test_flags_and_overrides_mix_in_any_order(tmp_path, capsys):
    flags = ["--json", str(tmp_path / "layout.json")]
    texts = []
    for arguments in (["parallel.tp=2", *flags, "model.layers=8"], [*flags, "parallel.tp=2", "model.layers=8"]):
        assert main(["show", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "tp2" in texts[0] and (tmp_path / "layout.json").exists()


def test_an_invalid_configuration_exits_with_78_and_every_error(capsys):
    assert main(["show", "parallel.tp=3", "model.layer=2"]) == 78
    report = capsys.readouterr().err.splitlines()
    assert report[0] == "model.layer=2: no such key; use model.layers"
    assert any(line.startswith("parallel.tp=3: must divide model.heads=4; use 1, 2 or 4") for line in report)


def test_only_one_rank_of_a_world_prints_the_report(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "parallel.tp=4"]) == 78
        assert ("parallel.dp=null" in capsys.readouterr().err) is speaks


VERBS_OF_RANKS = (["train"], ["train", "-m", "seed=1,2"], ["verify"])


@pytest.mark.parametrize("command", VERBS_OF_RANKS, ids=" ".join)
@pytest.mark.parametrize(
    ("variables", "start"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: must be a whole number"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "WORLD_SIZE=: must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: must be less than WORLD_SIZE=2"),
        ({"RANK": "1"}, "RANK=1: WORLD_SIZE is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1, WORLD_SIZE=2: MASTER_ADDR and MASTER_PORT are not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "abc"}, "MASTER_PORT=abc: must be a whole number"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "SLURM_NTASKS: is not set"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.partition(":")[0],
)
def test_invalid_rank_variables_are_named_on_every_rank(command, variables, start, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*command, "parallel.dp=2"]) == 78
    report = capsys.readouterr().err
    assert report.startswith(start) and "Traceback" not in report


def test_a_missing_argument_is_named_without_the_optional_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: CHECKPOINT\n")


def test_degrees_that_do_not_match_the_world_size_are_rejected_on_every_rank(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "32")
    for rank in ("0", "17", "31"):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "parallel.tp=4", "parallel.pp=8", "parallel.dp=4", "model.layers=8"]) == 78
        printed = capsys.readouterr().err.splitlines()
        expected = "parallel.dp=4: pp·dp·cp·tp = 128 must be the world of 32 ranks; use 1"
        assert (expected in printed) is (rank == "0")


def test_an_invalid_schedule_file_is_rejected_with_its_grid(tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("0B0,0F0\n")
    sizes = ["batch.global_size=1", "batch.micro_size=1"]
    for verb in ("show", "train"):
        assert main([verb, "schedule.name=custom", f"schedule.path={tmp_path}/mine.csv", *sizes]) == 78
        printed = capsys.readouterr().err
        assert printed.startswith(f"schedule.path={tmp_path}/mine.csv: rank 0, step 0: 0B0 comes before 0F0")
        assert ">0B0<" in printed and "Traceback" not in printed
