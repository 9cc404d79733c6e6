"""Files on a disk that fills up."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Iterator

import pytest

from megastack.mesh.shape import Axis
from megastack.observe.files import LineFile, replace_text
from megastack.observe.logging import set_up_logging
from megastack.observe.metrics import MetricsWriter, read_metrics, row


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_is_there_whole_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append("first")
    with room(10), pytest.raises(OSError, match=r"cannot write: .*lines"):
        file.append("a longer second one")
    assert path.read_text() == "first\n"
    file.append("third")
    file.close()
    assert path.read_text() == "first\nthird\n"


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path) -> None:
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
