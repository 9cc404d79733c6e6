"""Refused before anything is started or written: exit code 78, every fault a line, no run folder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tiny_runs import status, text, train


class Plain(nn.Module):
    """Owns a parameter, and is no module that could say how it is cut."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))


class Picky(nn.Module):
    def __init__(self, *args, **kwargs):
        raise ValueError("width=0: must be positive")


class Broken(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.width = 1 // 0


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
            ("data.tokenizer=bytes",),
            "data.tokenizer=bytes: no such file; use byte or the path of a tokenizer.json",
        ),
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


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("model.mlp={_target_: no_such_file.MLP}",),
            "model.mlp._target_=no_such_file.MLP: importing no_such_file failed",
        ),
        (
            ("model.mlp={_target_: megastack.layers.mlp.ParalelMLP}",),
            "model.mlp._target_=megastack.layers.mlp.ParalelMLP: megastack.layers.mlp has no class or function "
            "ParalelMLP; use ParallelMLP",
        ),
        (
            ("model.block={_target_: torch.nn.Linear}",),
            "model.block._target_=torch.nn.modules.linear.Linear: cannot be",
        ),
        (("model.mlp={_target_: builtins.dict}",), "model.mlp._target_=builtins.dict: cannot be called"),
        (
            ("model.attention={_target_: tests.launch.test_preflight.Plain}",),
            "blocks.0.attention.own: has no placement",
        ),
        (
            ("model.mlp={_target_: tests.launch.test_preflight.Picky}",),
            "model.mlp._target_=tests.launch.test_preflight.",
        ),
        (("optim.freeze=[embeding]",), "optim.freeze=embeding: matches no parameter; near names are embedding.weight"),
        (
            ("optim.groups=[{pattern: 'mlp.upp'}]",),
            "optim.groups=mlp.upp: matches no parameter; near names are blocks.0",
        ),
        (
            ("recompute.mode=pattern", "recompute.pattern=blocks.mlp"),
            "recompute.pattern=blocks.mlp: matches the whole name of no module; use for example",
        ),
    ],
)
def test_layers_and_patterns_that_only_the_model_can_tell(refused, overrides, line):
    """A class that is not there, is no layer, declares nothing or refuses; a pattern without a match."""
    report = refused("parallel.dp=2", *overrides)
    assert any(said.startswith(line) for said in report), report


def test_the_model_and_the_data_are_reported_together(refused):
    report = refused("optim.freeze=[nothing]", "optim.groups=[{pattern: nix}]", "data.paths=[none.jsonl]")
    for line, key in zip(report, ("optim.freeze=nothing", "optim.groups=nix", "data.paths"), strict=True):
        assert line.startswith(key)


def test_a_layer_that_breaks_is_left_to_the_ranks_and_their_traceback(tmp_path, capfd):
    assert train(tmp_path, "model.mlp={_target_: tests.launch.test_preflight.Broken}") == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


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


def test_a_device_and_weights_that_are_not_there(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "empty").mkdir()
    report = refused("device=cuda", f"checkpoint.load_weights={tmp_path}/nope", keeps=True)
    assert report[0].startswith(f"checkpoint.load_weights={tmp_path}/nope: no such folder; use")
    assert report[1].startswith("device=cuda: this machine has no GPU") and not (tmp_path / "run").exists()
    for name, words in {"file": "is a file", "empty": "is no usable checkpoint"}.items():
        [line, *_] = refused(f"checkpoint.load_weights={tmp_path}/{name}", keeps=True)
        assert line.startswith(f"checkpoint.load_weights={tmp_path}/{name}: {words}")
        assert not (tmp_path / "run").exists()


def test_more_ranks_than_this_machine_can_hold(refused, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    [line] = refused("parallel.dp=129", "batch.global_size=129")
    assert line.startswith("world=129: ") and "use torchrun or srun" in line and "at most 128 ranks" in line


def test_a_file_in_place_of_the_run_folder(tmp_path, refused):
    (tmp_path / "run_file").write_text("in the way")
    [line] = refused(f"run.dir={tmp_path}/run_file", keeps=True)
    assert line.startswith(f"run.dir={tmp_path}/run_file: ") and "is a file" in line
    assert not (tmp_path / "run_file-2").exists()


def test_a_folder_in_place_of_the_tokenizer_is_called_a_folder(tmp_path, refused):
    [line, *_] = refused(f"data.tokenizer={tmp_path}")
    assert line.startswith(f"data.tokenizer={tmp_path}: is a folder")


def test_freezing_every_parameter_is_refused(refused):
    assert refused("optim.freeze=[.]") == ["optim.freeze=[.]: freezes every parameter; leave some to train"]
