"""Failure reports, the status file, logs and the console."""

from __future__ import annotations

import json
import logging

import pytest

from megastack.mesh.shape import Axis
from megastack.observe.console import Console, set_up_logging
from megastack.observe.failure import FailureRecord, read_failures, silent_ranks
from megastack.observe.status import FIELDS, read_status, update_status, write_status
from megastack.observe.watchdog import read_reports
from tests.test_records import INVALID

HERE = {Axis.PP: 1, Axis.DP: 0, Axis.CP: 0, Axis.TP: 1}


def _fail(folder, rank: int, *, echo: bool = False) -> None:
    try:
        raise ValueError(f"error of {rank}")
    except ValueError as error:
        FailureRecord.of(error, rank, HERE, step=2, action="step 3", echo=echo).write(folder / f"rank_{rank:05d}.json")


def test_primary_failures_come_before_earlier_secondary_ones(tmp_path):
    for rank, echo in ((2, True), (3, False), (0, False), (1, True)):
        _fail(tmp_path, rank, echo=echo)
    records = read_failures(tmp_path)
    assert [record.rank for record in records] == [3, 0, 2, 1]
    lines = records[0].describe().splitlines()
    assert lines[0].startswith("Traceback") and any("raise ValueError" in line for line in lines)
    assert lines[-1] == "[rank 3 | pp1 dp0 tp1] failed in step 3: ValueError: error of 3"
    assert silent_ranks(records, 6) == []


def test_a_rank_without_a_report_is_found_if_all_others_have_secondary_failures(tmp_path):
    for rank in (0, 2):
        _fail(tmp_path, rank, echo=True)
    assert silent_ranks(read_failures(tmp_path), 4) == [1, 3]
    assert read_failures(tmp_path / "none") == []


def test_status_has_all_fields_and_an_update_keeps_omitted_ones(tmp_path):
    path = tmp_path / "status.json"
    assert read_status(path) is None
    write_status(path, "running", step=4, checkpoint="c", pid=7)
    update_status(path, "failed", reason="r", rank=1)
    found = json.loads(path.read_text())
    assert tuple(found) == tuple(sorted(found, key=FIELDS.index)) and set(found) == set(FIELDS)
    assert (found["status"], found["step"], found["checkpoint"], found["pid"]) == ("failed", 4, "c", 7)
    assert (found["exit_code"], found["rank"], found["coordinates"]) == (1, 1, None)
    assert [write_status(path, name)["exit_code"] for name in ("completed", "preempted", "diverged")] == [0, 75, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_records_that_cannot_be_read_count_as_absent(tmp_path, text):
    path = tmp_path / "rank_00000.json"
    for wrong in (text, b'{"status": 1}', b'{"status": "running", "pid": "7"}', b'{"rank": 0}', b'{"counts": []}'):
        path.write_bytes(wrong)
        assert read_status(path) is None
        assert read_failures(tmp_path) == [] and read_reports(tmp_path) == []
    update_status(path, "running", step=2)
    assert read_status(path) == dict.fromkeys(FIELDS) | json.loads(path.read_text())


def test_a_log_for_each_rank_and_only_warnings_on_the_screen(tmp_path, capsys):
    for rank in (0, 5):
        log = set_up_logging(tmp_path / f"{rank}.log", rank, HERE)
        log.debug("detail")
        log.warning("careful")
    for handler in logging.getLogger("megastack").handlers[:]:
        handler.close()
        logging.getLogger("megastack").removeHandler(handler)
    assert (tmp_path / "5.log").read_text().count("[rank 5 | pp1 dp0 tp1]") == 2
    assert (tmp_path / "0.log").read_text().count("rank 5") == 0
    screen = capsys.readouterr().err
    assert screen.splitlines() == [f"[rank {rank} | pp1 dp0 tp1] WARNING careful" for rank in (0, 5)]


@pytest.mark.parametrize(
    ("environment", "escapes", "colours"),
    [({}, False, False), ({"FORCE_COLOR": "1"}, True, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False)],
)
def test_colours_follow_the_environment_and_no_line_is_wrapped(monkeypatch, capsys, environment, escapes, colours):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "40")
    console = Console()
    console.line("x" * 200, style="bold")
    console.validation({"loss": None, "samples": 3, "tokens": 4})
    console.table(["a", "folder"], [["1", "/" + "y" * 100]])
    console.line("[red]not markup[/red]")
    Console(enabled=False).line("nothing")
    text = capsys.readouterr().out
    assert "x" * 200 in text and "/" + "y" * 100 in text and "[red]not markup[/red]" in text and "nothing" not in text
    assert ("\x1b[" in text) is escapes and ("\x1b[36m" in text) is colours
    assert "loss –  over 3 samples" in text


def test_the_lines_of_a_step_on_gpus_fit_into_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 99_999, "loss": 12.3456, "grad_norm": 123.456, "lr": 3e-4, "tokens_per_s": 12_345_678.0}
    row |= {"step_time_s": 12.3456, "model_tflops_per_device": 1234.5, "mfu": 0.543, "exposed_s": {"tp": 0.5, "pp": 1}}
    memory = {"peak_memory_bytes": 161 * 2**30, "peak_reserved_bytes": 170 * 2**30, "peak_reserved_rank": 16383}
    console = Console(on_gpu=True)
    console.train(row | memory, 100_000)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == ("  1234 TFLOP/s/GPU  MFU 54.3%  peak 161.0 GiB, 170.0 GiB reserved (rank 16383)  exposed 12%")
    assert max(map(len, lines)) <= 100
