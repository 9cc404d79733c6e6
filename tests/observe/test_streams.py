"""Output that never raises: closed pipes, full disks, closed descriptors, limited encodings."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

import megastack
from megastack.observe.console import Console, set_up_logging
from megastack.observe.streams import BestEffortStream, best_effort_output, release_output, write_stderr
from tests.tiny_runs import overrides, rows, status, train

ROOT = Path(megastack.__file__).resolve().parent.parent
BROKEN = ("no reader", "full", "closed")


def _broken(kind: str) -> TextIO:
    """A stream whose writes fail, at once or at the first flush."""
    if kind == "full":
        return open("/dev/full", "w", encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", encoding="utf-8")
    if kind == "closed":
        stream.close()
    return stream


@contextmanager
def _output(kind: str) -> Iterator[TextIO]:
    """Broken streams, to be used within a test, since pytest installs its own streams after the fixtures."""
    stream = _broken(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", _broken(kind))
        yield stream


@pytest.mark.parametrize("kind", BROKEN)
def test_a_training_completes_without_a_console(tmp_path: Path, kind: str) -> None:
    with _output(kind):
        assert train(tmp_path, "run.steps=2", "parallel.dp=2") == 0
    ended = status(tmp_path / "run")
    assert (ended["status"], ended["step"], len(rows(tmp_path / "run"))) == ("completed", 2, 2)


@pytest.mark.parametrize("kind", ["no reader", "full"])
def test_a_training_from_python_completes_after_its_caller_wrote_to_a_broken_stream(tmp_path: Path, kind: str) -> None:
    """The caller's buffer is flushed when a rank starts and when it ends."""
    with _output(kind) as stream:
        stream.write("a line of the caller's")
        result = megastack.train(megastack.compose([*overrides(tmp_path), "run.steps=2"]))
        assert sys.stdout is stream
        BestEffortStream(stream).release()
    assert (result.status, len(rows(tmp_path / "run"))) == ("completed", 2)


@pytest.mark.parametrize("kind", BROKEN)
def test_writing_to_a_broken_stream_does_not_raise(kind: str) -> None:
    stream = BestEffortStream(_broken(kind))
    stream.writelines(["a\n", "b\n"])
    stream.flush()
    assert stream.error is not None
    assert stream.write("more") == 4


def test_a_missing_stream_discards_everything() -> None:
    stream = BestEffortStream(None)
    assert stream.write("×") == 1 and not stream.isatty() and stream.error is None


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", b"tp 1 x 2 * a... b -> c - d ?\n"),
        ("latin-1", "tp 1 × 2 · a... b -> c - d ?\n".encode("latin-1")),
        ("utf-8", "tp 1 × 2 · a… b → c – d 語\n".encode()),
    ],
)
def test_characters_that_an_encoding_lacks_are_replaced(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: bytes
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding=encoding))
    Console().line("tp 1 × 2 · a… b → c – d 語")
    assert buffer.getvalue() == shown


def test_undecodable_bytes_of_an_argument_can_be_printed_and_logged(tmp_path: Path, capsys: object) -> None:
    text = b"run \xff".decode("utf-8", "surrogateescape")
    buffer = io.BytesIO()
    stream = BestEffortStream(io.TextIOWrapper(buffer, encoding="utf-8"))
    stream.write(text)
    stream.flush()
    assert buffer.getvalue() == b"run ?"
    log = set_up_logging(tmp_path / "log", 0, {})
    log.info(text)
    assert "run \\udcff" in (tmp_path / "log").read_text(encoding="utf-8")


def test_a_slow_reader_does_not_end_the_output() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = BestEffortStream(os.fdopen(writer, "w", encoding="utf-8"))
    for _ in range(100):
        stream.write("x" * 4096)
        stream.flush()
    assert stream.error is None
    assert len(os.read(reader, 1 << 20)) > 0
    os.close(reader)


def test_the_streams_of_the_caller_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _broken("full")
    monkeypatch.setattr(sys, "stdout", stream)
    with best_effort_output():
        sys.stdout.write("lost")
        with best_effort_output():
            pass
        assert sys.stdout is not stream
        assert release_output() == "No space left on device"
    assert sys.stdout is stream
    stream.close()  # does not raise, since its descriptor is the null device now


def test_the_descriptor_of_standard_error_may_be_closed() -> None:
    kept = os.dup(2)
    os.close(2)
    try:
        write_stderr("×")
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    text = command.replace("megastack", f"{sys.executable} -m megastack.cli")
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("megastack show | head -1 >/dev/null; exit ${PIPESTATUS[0]}", 0, ""),
        ("megastack show >&-", 0, ""),
        ("megastack show 0<&- >&- 2>&-", 0, ""),
        ("megastack show parallel.tp=3 2>&-", 78, ""),
        ("megastack show >/dev/full", 1, "standard output: No space left on device\n"),
        ("megastack --help >/dev/full", 0, ""),
        ("PYTHONIOENCODING=ascii megastack show >/dev/null", 0, ""),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 megastack show >/dev/null", 0, ""),
    ],
)
def test_a_command_without_a_console_ends_quietly(command: str, code: int, said: str) -> None:
    done = _shell(command)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.full
@pytest.mark.parametrize("where", ["| head -1 >/dev/null", ">&-", "0<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_training_of_the_command_line_without_a_console(tmp_path: Path, where: str) -> None:
    given = " ".join(f"'{override}'" for override in [*overrides(tmp_path), "run.steps=3", "parallel.dp=2"])
    done = _shell(f"megastack train {given} {where}; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (status(tmp_path / "run")["status"], len(rows(tmp_path / "run"))) == ("completed", 3)
    logs = (tmp_path / "run" / "logs").iterdir()
    assert all(log.read_text(encoding="utf-8").endswith("completed after step 3\n") for log in logs)
