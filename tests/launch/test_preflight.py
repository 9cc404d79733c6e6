"""Refused before anything is started or written: exit code 78, every fault a line, no run folder."""

from __future__ import annotations

import pytest

from tests.tiny_runs import status, text, train


@pytest.fixture
def refused(tmp_path, capfd):
    """Run, expect 78 and nothing left behind; the lines of the report."""

    def run(*more: str, keeps: bool = False) -> list[str]:
        before = sorted(tmp_path.rglob("*"))
        text(tmp_path)
        assert train(tmp_path, *more) == 78
        assert keeps or (not (tmp_path / "run").exists() and len(sorted(tmp_path.rglob("*"))) <= len(before) + 1)
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err and captured.out == ""
        return captured.err.strip().splitlines()

    return run


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (b"", (), "empty"),
        (b"\n\n", (), "empty"),
        (b"no json\n", (), "not JSON"),
        (b'{"text": "\xff"}\n', (), "UTF-8"),
        (b'{"text": "a"}\n', (), "batch.sequence_length=16"),
        (None, (), "does not exist"),
        (
            b'{"text": "long enough for one sample"}\n',
            ("model.vocab=128", "data.validation_fraction=0"),
            "model.vocab=128",
        ),
        (b'{"text": "long enough for one sample"}\n', ("data.tokenizer=none.json",), "data.tokenizer=none.json"),
    ],
)
def test_unusable_data(tmp_path, refused, content, more, words):
    path = tmp_path / "given.jsonl"
    if content is not None:
        path.write_bytes(content)
    report = refused(f"data.paths=[{path}]", *more)
    assert len(report) <= 2 and any(words in line for line in report)


def test_unusable_resume_is_reported_together_with_the_data(tmp_path, refused):
    (tmp_path / "no_checkpoint").mkdir()
    report = refused(f"resume={tmp_path / 'no_checkpoint'}", "data.paths=[none.jsonl]", keeps=True)
    assert any("none.jsonl" in line for line in report) and any("resume=" in line for line in report)
    assert any("resume=last" in line for line in refused("resume=last", keeps=True))
    assert any("resume=auto" in line for line in refused("resume=auto", "run.dir=null", keeps=True))


def test_illegal_values_and_unwritable_folders(tmp_path, refused):
    report = refused("parallel.tp=3", "parallel.pp=5", "run.stops=3", "batch.micro_size=3")
    assert len(report) >= 4 and all("=" in line and ": " in line for line in report)
    assert "run.steps" in next(line for line in report if line.startswith("run.stops"))
    (tmp_path / "file").write_text("in the way")
    assert "run.dir=" in refused(f"run.dir={tmp_path}/file/run", keeps=True)[0]


def test_a_checkpoint_of_another_run_is_not_continued(tmp_path, refused, capfd):
    """What would change sample order or data is known before the start; a misfit of the model right after it."""
    assert train(tmp_path, "run.steps=1", "checkpoint.at_end=true") == 0
    capfd.readouterr()
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    (tmp_path / "other.jsonl").write_text((tmp_path / "text.jsonl").read_text().replace("times", "plus"))
    again = (f"resume={path}", "run.steps=2", f"run.dir={tmp_path}/again")
    for more, words in {
        ("seed=1",): "seed=1",
        ("batch.global_size=8",): "batch.global_size=8",
        ("batch.sequence_length=8",): "batch.sequence_length=8",
        (f"data.paths=[{tmp_path}/other.jsonl]",): "data:",
    }.items():
        assert any(line.startswith(words) for line in refused(*again, *more, keeps=True))
        assert not (tmp_path / "again").exists()
    capfd.readouterr()
    assert train(tmp_path, *again, "model.ffn=64", "parallel.dp=2") == 78
    report = capfd.readouterr().err
    assert "blocks.0.mlp" in report and "Traceback" not in report
    assert status(tmp_path / "again")["exit_code"] == 78
    (path / "rank_00000.safetensors").write_bytes(b"damaged")
    assert any("rank_00000.safetensors" in line for line in refused(*again, keeps=True))
