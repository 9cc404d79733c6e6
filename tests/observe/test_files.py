"""Atomic writes on a full disk, and files with a partial last line."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
from collections.abc import Iterator

import pytest

from megastack.mesh.shape import Axis
from megastack.observe.console import set_up_logging
from megastack.observe.failure import read_failures
from megastack.observe.files import LineFile, read_records, replace_text
from megastack.observe.folder import RunFolder
from megastack.observe.metrics import MetricsWriter, read_metrics, row
from megastack.observe.status import read_status
from megastack.observe.watchdog import read_reports


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """A context in which no file of this process can grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_is_appended_completely_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append("first")
    with room(10), pytest.raises(OSError, match=r"cannot write: .*lines"):
        file.append("a longer second one")
    assert path.read_text() == "first\n"
    file.append("third")
    file.close()
    assert path.read_text() == "first\nthird\n"


def test_a_file_that_cannot_be_replaced_is_unchanged_and_no_temporary_file_remains(tmp_path) -> None:
    path = tmp_path / "status.json"
    replace_text(path, "old")
    with room(2), pytest.raises(OSError, match=r"cannot write: .*status.json"):
        replace_text(path, "much longer")
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"] and path.read_text() == "old"


def test_metrics_can_be_read_after_a_row_that_did_not_fit(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, tensorboard=False)
    writer.write(row("train", 1, {"loss": 0.5}))
    with room(path.stat().st_size + 5), pytest.raises(OSError, match=r"metrics\.jsonl"):
        writer.write(row("train", 2, {"loss": 0.25}))
    writer.close()
    assert [found["step"] for found in read_metrics(path)] == [1]


def test_a_log_that_cannot_be_written_is_an_error(tmp_path) -> None:
    log = set_up_logging(tmp_path / "rank.log", 0, dict.fromkeys(Axis, 0))
    try:
        with room(0), pytest.raises(OSError, match=r"cannot write: .*rank.log"):
            log.info("does not fit")
    finally:
        for handler in logging.getLogger("megastack").handlers[:]:
            logging.getLogger("megastack").removeHandler(handler)
            handler.close()


WHOLE = b'{"kind": "train", "step": 1, "loss": 0.5}\n'
PARTIAL = {
    "half a row": b'{"kind": "train", "st',
    "a row without its last byte": b'{"kind": "train", "step": 2, "loss": 0.25',
    "half a character": b'{"kind": "event", "text": "\xc3',
    "null bytes": b"\0" * 4096,
    "half a row and null bytes": b'{"kind": "tr' + b"\0" * 100,
    "a long one": b'{"kind": "' + b"x" * 200_000,
    "another kind of JSON": b"17",
}


@pytest.mark.parametrize("partial", PARTIAL)
@pytest.mark.parametrize("before", [WHOLE, b""])
def test_a_partial_row_is_skipped_and_removed_before_the_next_append(tmp_path, partial: str, before: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before + PARTIAL[partial])
    whole = [1] if before else []
    assert [found["step"] for found in read_metrics(path)] == whole
    writer = MetricsWriter(path, tensorboard=False)
    writer.write(row("train", 3, {"loss": 0.125}))
    writer.close()
    assert [found["step"] for found in read_metrics(path)] == [*whole, 3]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*whole, 3]


def test_a_row_that_lacks_only_its_newline_is_kept(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE[:-1])
    file = LineFile(path)
    file.append('{"kind": "train", "step": 2}')
    file.close()
    assert [found["step"] for found in read_metrics(path)] == [1, 2]


def test_partial_rows_in_the_middle_of_a_file_are_skipped(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + b'{"kind": "tr{"kind": "train", "step": 2}\n' + b"\0" * 9 + WHOLE.replace(b"1", b"3"))
    assert [found["step"] for found in read_metrics(path)] == [1, 3]


def test_records_of_null_bytes_count_as_missing(tmp_path) -> None:
    run = RunFolder(tmp_path)
    for path in (run.status, run.failure(0), run.report(0)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\0" * 64)
    assert read_status(run.status) is None and read_records(run.status) == []
    assert read_failures(run.failures) == [] == read_reports(run.watch)
