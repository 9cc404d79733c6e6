"""``schedule: {_target_: my_file.fn, …}``: composed, shown, written and read again, validated, and trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastack.cli import main
from megastack.config.compose import compose, compose_partial
from megastack.config.reading import from_yaml, to_yaml
from megastack.config.rules import violations
from tests.tiny_runs import losses, train

HERE = "tests.own_schedules"
MINE = f"schedule._target_={HERE}.fill_and_drain"


def test_options_stand_beside_the_target_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "schedule"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"_target_: {HERE}.fill_and_drain\norder: reverse\n")
    chosen = ["schedule=mine", "parallel.pp=2", "batch.global_size=4"]
    config = compose(chosen, config_dir=tmp_path)
    assert config.schedule._target_ == f"{HERE}.fill_and_drain" and config.schedule.options == {"order": "reverse"}
    assert violations(config) == [] and from_yaml(to_yaml(config)) == config
    assert main(["show", *chosen, "--config-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"schedule  {HERE}.fill_and_drain, 2 stages" in shown and "|F1 F0" in shown


def test_options_stand_beside_the_target_on_the_command_line() -> None:
    both = [MINE, "schedule.order=reverse", "parallel.pp=2"]
    assert compose(both).schedule.options == {"order": "reverse"}
    assert compose([MINE, "schedule.options.order=reverse"]).schedule.options == {"order": "reverse"}
    assert compose([MINE]).schedule.options is None


@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ([MINE, "schedule.ordr=reverse"], f"schedule.ordr=reverse: {MINE} takes no such option; use order"),
        (
            ["schedule._target_=nowhere.fn"],
            "schedule._target_=nowhere.fn: importing nowhere failed with Module",
        ),
        (["schedule._target_=fn"], "schedule._target_=fn: must be a dotted path; use my_file.fn"),
        (["schedule._target_=''"], "schedule._target_=: must be a dotted path"),
        ([f"schedule._target_={HERE}.without_backward"], f"schedule._target_={HERE}.without_backward: "),
        ([f"schedule._target_={HERE}.HERE"], "has no class or function HERE"),
        (
            [MINE, "schedule.microbatches=3"],
            "schedule.microbatches=3: must not be an option; the schedule",
        ),
        ([MINE, "schedule.options=3"], "schedule.options=3: must be a mapping; use {name: value} or null"),
        (["schedule.options={order: reverse}"], "schedule.order=reverse: schedule.name=1f1b takes no such option"),
        (["schedule.order=reverse"], "schedule.order=reverse: no such key"),
        (
            [f"schedule._target_={HERE}.split_backward", "parallel.zero.stage=2", "parallel.dp=2"],
            f"schedule._target_={HERE}.split_backward: parallel.zero.stage=2 reduces gradients after I",
        ),
    ],
)
def test_what_cannot_run_is_one_error(choices: list[str], line: str) -> None:
    partial = compose_partial(choices)
    found = [*partial.errors, *violations(partial.config)]
    assert len(found) == 1 and line in str(found[0]), found


def test_two_ranks_train_with_it_as_with_gpipe(tmp_path: Path) -> None:
    layout = ["parallel.pp=2", "run.steps=2"]
    own, other = tmp_path / "own", tmp_path / "gpipe"
    own.mkdir()
    other.mkdir()
    assert train(own, *layout, MINE, "schedule.order=forward") == 0
    assert train(other, *layout, "schedule=gpipe") == 0
    assert losses(own / "run") == losses(other / "run")
