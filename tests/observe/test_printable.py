"""Text for a terminal: control characters are escaped there and kept in records."""

from __future__ import annotations

import ast
import json
import logging
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastack.cli.generation import _TextPrinter
from megastack.cli.main import main
from megastack.data.tokenizers import ByteTokenizer
from megastack.mesh.shape import Axis
from megastack.observe.console import Console, set_up_logging
from megastack.observe.metrics import MetricsWriter
from megastack.observe.printable import printable
from megastack.training.report import Recorder

EVIL = "a\x1b[2J\x1b]0;title\x07b\x08\x9b31m\rc\x00\u202e\n\td\x7f"
SHOWN = r"a\x1b[2J\x1b]0;title\x07b\x08\x9b31m\rc\x00\u202e" + "\n\td" + r"\x7f"


ON_SCREEN = SHOWN.expandtabs()


def control_characters(text: str) -> set[str]:
    """Control characters, except newline and tab."""
    return {each for each in text if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")} - {"\n", "\t"}


def test_control_characters_are_escaped() -> None:
    assert printable(EVIL) == SHOWN
    assert (
        printable("one\r\ntwo\n\tüñ 日本 👩\u200d💻 \u2028 \udcff") == "one\ntwo\n\tüñ 日本 👩\u200d💻 \\u2028 \\udcff"
    )


@given(st.text(st.characters()))
def test_no_control_character_remains_and_printable_text_is_unchanged(text: str) -> None:
    assert not control_characters(printable(text))
    assert printable(printable(text)) == printable(text)
    printable(text).encode()


def test_console_output(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.line(EVIL, style="red")
    console.text(EVIL)
    out = capsys.readouterr().out
    assert not control_characters(out) and out == ON_SCREEN + "\n" + ON_SCREEN
    console.table(["name\x1b", "X"], [["\x1b[1m", "Y"], ["plain", "Z"]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.index(each) for line, each in zip(lines, "XYZ", strict=True)] == [10, 10, 10]


def test_streamed_text(capsys: pytest.CaptureFixture[str]) -> None:
    stream = _TextPrinter(ByteTokenizer(), b"go \x1b[1m", Console())
    for byte in EVIL.encode():
        stream([byte])
    stream.finish()
    assert capsys.readouterr().out == r"go \x1b[1m" + ON_SCREEN + "\n"


def test_a_sample_is_escaped_on_the_screen_and_recorded_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", tensorboard=None)
    recorder = Recorder(1, 1, lambda step: 1.0, None, Console(), metrics=metrics)
    recorder.sample(1, "\x1b[1mgo", EVIL)
    metrics.close()
    out, row = capsys.readouterr().out, json.loads((tmp_path / "metrics.jsonl").read_text())
    assert not control_characters(out) and r"\x1b[1mgo" + ON_SCREEN.replace(" ", "") in out.replace(" ", "")
    assert (row["prompt"], row["text"]) == ("\x1b[1mgo", EVIL)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "data.source=text", "data.paths=['/gone/\x1b[31m.txt']", "batch.sequence_length=16"],
        ["show", "data.source=text", "data.paths=['/gone/\x1b[31m.txt']"],
        ["show", "run.name='\x1b[31m\udcff'", "model.heads=3"],
        ["show", "\x1b[31mkey=1"],
        ["tokenize", "/gone/\x1b[31m\udcff.txt", "--out", "/tmp/never"],
        ["generate", "/gone/\x1b[31m", "--prompt", "a"],
        ["checkpoint", "ls", "/gone/\x1b[31m\udcff"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]).encode("unicode_escape").decode(),
)
def test_errors_and_notes_of_every_verb(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) in (0, 1, 78)
    captured = capfd.readouterr()
    assert captured.out + captured.err and not control_characters(captured.out + captured.err)


def test_documents_in_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"\x1b[31m": 1}\n')
    assert main(["tokenize", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "o"), "--field", "\x1b[2J"]) == 78
    err = capfd.readouterr().err
    assert "a.jsonl:1" in err and not control_characters(err)


def test_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = set_up_logging(tmp_path / "rank.log", 0, dict.fromkeys(Axis, 0))
    logger.warning("met %s", EVIL)
    for handler in logger.handlers:
        handler.close()
    logging.getLogger("megastack").handlers.clear()
    for text in (capfd.readouterr().err, (tmp_path / "rank.log").read_text()):
        assert SHOWN in text and not control_characters(text)


EXCEPT = {
    ("cli/show.py", "text + '\\n'"),  # made printable before; a drawing is for a file
    ("cli/main.py", "f'standard output: {lost}'"),  # the system's own words
    ("observe/console.py", "Text.assemble((f\"step {row['step']:"),  # numbers
}


def test_nothing_else_writes_to_the_terminal() -> None:
    root = Path(__file__).resolve().parents[2] / "megastack"
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" or called.endswith(("stdout.write", "stderr.write", "_rich.print")):
                assert isinstance(node, ast.Call)
                name, shown = path.relative_to(root).as_posix(), ast.unparse(node.args[0])
                known = any(name == where and shown.startswith(what) for where, what in EXCEPT)
                assert known or "printable(" in shown, f"{name}:{node.lineno}: {shown}"
