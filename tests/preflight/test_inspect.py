"""Rejected before anything is started or written: exit code 78, a line for every error, no run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megastack.cli.main import main
from megastack.config.compose import compose
from megastack.config.convert import INVALID, replace_values
from megastack.config.fields import keys
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, ErrorLine, Violation
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.inspect import inspect
from megastack.preflight.model import check_mesh
from tests.data.token_cases import write_by_hand
from tests.tiny_runs import overrides, status, text, train


class Plain(nn.Module):
    """Has a parameter, but declares no placements."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))


class Picky(nn.Module):
    def __init__(self, *args, **kwargs):
        raise ValueError("width=0: must be positive")


class Failing(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.width = 1 // 0


def inspect_all(config: TrainConfig, known: Sequence[ErrorLine] = ()) -> None:
    errors = ErrorCollector(known)
    inspect(config, errors, check_mesh(config, errors))


@pytest.fixture
def rejected(tmp_path, capfd):
    """Run, expect 78 and no files; returns the lines of the report."""

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
def test_unusable_data(tmp_path, rejected, content, more, words):
    path = tmp_path / "given.jsonl"
    if content is not None:
        path.write_bytes(content)
    report = rejected(f"data.paths=[{path}]", *more)
    assert len(report) <= 2 and any(words in line for line in report)


def _token_files(folder: Path) -> dict[str, str]:
    """Token files of 70,000 ids each, one of them invalid, beyond what a rank checks at once."""
    good = [[7] * 1000] * 70
    write_by_hand(folder / "good", [[8] * 1000] * 70, 8)
    write_by_hand(folder / "late", [*good[:-1], [7] * 999 + [999]], 8)
    write_by_hand(folder / "noted", [[999, *[7] * 69_999]], 8)
    (folder / "noted.json").write_text(json.dumps({"largest_id": 999, "tokens": 70_000}))
    np.save(folder / "array.npy", np.where(np.arange(70_000) == 69_000, 999, 7))
    np.save(folder / "negative.npy", np.where(np.arange(70_000) == 69_000, -5, 7))
    return {name: str(folder / name) for name in ("good", "late", "noted", "array.npy", "negative.npy")}


TOO_LARGE = "token id 999 in"


@pytest.mark.parametrize("verb", ["train", "verify"])
@pytest.mark.parametrize(
    ("names", "choice", "words"),
    [
        ("late", "data.paths=[{0}]", [TOO_LARGE]),
        ("noted", "data.paths=[{0}]", [TOO_LARGE]),
        ("array.npy", "data.paths=[{0}]", [TOO_LARGE]),
        ("negative.npy", "data.paths=[{0}]", ["token id -5 at token 69000 is below 0"]),
        ("good late", "data.blend=[{{paths: [{0}], weight: 1}}, {{paths: [{1}], weight: 0}}]", [TOO_LARGE]),
        ("good late", "data.phases=[{{from_step: 2, paths: [{1}]}}]\tdata.paths=[{0}]", [TOO_LARGE]),
        ("late noted negative.npy", "data.paths=[{0},{1},{2}]", [TOO_LARGE, TOO_LARGE, "token id -5"]),
        ("late", "data.paths=[{0},gone]", [TOO_LARGE, "gone.idx: does not exist"]),
        ("good late", "data.phases=[{{from_step: 2, paths: [{1}]}}]\tdata.paths=[{0},gone]", [TOO_LARGE, "gone.idx"]),
    ],
)
def test_ids_outside_the_vocabulary_are_rejected_before_anything(tmp_path, capfd, verb, names, choice, words):
    files = _token_files(tmp_path)
    given = choice.format(*(files[name] for name in names.split())).split("\t")
    fixed = ["data.source=bin", "data.paths=[]", "model.vocab=256", "run.steps=3", "data.validation_fraction=0.1"]
    assert main([verb, *overrides(tmp_path), *fixed, *given]) == 78
    report = capfd.readouterr().err.strip().splitlines()
    assert len(report) == len(words)
    assert all(sum(word in line for line in report) == words.count(word) for word in words)
    assert not (tmp_path / "run").exists()


def test_ids_are_reported_with_other_errors_and_not_checked_with_an_invalid_vocabulary(tmp_path, capfd):
    path = _token_files(tmp_path)["late"]
    given = [*overrides(tmp_path), "data.source=bin", f"data.paths=[{path}]"]
    assert main(["train", *given, "model.vocab=256", "optim.lr=-1"]) == 78
    report = capfd.readouterr().err
    assert TOO_LARGE in report and "optim.lr=" in report
    assert main(["train", *given, "model.vocab=0"]) == 78
    assert "999" not in capfd.readouterr().err


def test_unusable_resume_is_reported_together_with_the_data(tmp_path, rejected):
    (tmp_path / "no_checkpoint").mkdir()
    report = rejected(f"resume={tmp_path / 'no_checkpoint'}", "data.paths=[none.jsonl]", keeps=True)
    assert any("none.jsonl" in line for line in report) and any("resume=" in line for line in report)
    assert any("resume=last" in line for line in rejected("resume=last", keeps=True))
    assert any("resume=auto" in line for line in rejected("resume=auto", "run.dir=null", keeps=True))


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
            ("model.attention={_target_: tests.preflight.test_inspect.Plain}",),
            "blocks.0.attention.own: has no placement",
        ),
        (
            ("model.mlp={_target_: tests.preflight.test_inspect.Picky}",),
            "model.mlp._target_=tests.preflight.test_inspect.",
        ),
        (("optim.freeze=[embeding]",), "optim.freeze=embeding: matches no parameter; use embedding.weight"),
        (
            ("optim.groups=[{pattern: 'mlp.upp'}]",),
            "optim.groups=mlp.upp: matches no parameter; use blocks.0",
        ),
        (
            ("recompute.mode=pattern", "recompute.pattern=blocks.mlp"),
            "recompute.pattern=blocks.mlp: matches the whole name of no module; use for example",
        ),
    ],
)
def test_layers_and_patterns_that_only_the_model_can_tell(rejected, overrides, line):
    """A class that does not exist, is not a layer, declares nothing or raises; a pattern without a match."""
    report = rejected("parallel.dp=2", *overrides)
    assert any(printed.startswith(line) for printed in report), report


def test_the_model_and_the_data_are_reported_together(rejected):
    report = rejected("optim.freeze=[nothing]", "optim.groups=[{pattern: nix}]", "data.paths=[none.jsonl]")
    for line, key in zip(report, ("optim.freeze=nothing", "optim.groups=nix", "data.paths"), strict=True):
        assert line.startswith(key)


def test_an_invalid_phase_hides_no_error_of_the_others(rejected):
    report = rejected(
        "parallel.tp=2",
        "data.phases=[{from_step: 1, sequence_length: 33},{from_step: 2, source: text, paths: [none.txt]},"
        "{from_step: 3, blend: [{source: text, paths: [no.txt], weight: 1},{paths: [none], weight: 1}]}]",
    )
    assert any(line.startswith("data.phases[0].sequence_length=33: ") for line in report), report
    starts = ("data.phases[1]: data.paths=none.txt: does not", "data.phases[2]: data.paths=no.txt: does not")
    for start in (*starts, "data.phases[2]: data.paths=none.idx: "):
        assert sum(line.startswith(start) for line in report) == 1, report


def test_all_errors_of_every_kind_make_one_report(tmp_path, rejected):
    """Values that cannot be read, rules, layers, patterns, data, paths and device: one line each, once."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "bad.jsonl").write_text("no json")
    invalid = {
        "batch.micro_sice=2": "batch.micro_sice=2: no such key; use batch.micro_size",
        "seed=two": "seed=two: must be a whole number",
        "parallel.tp=3": "parallel.tp=3: must divide model.heads=2; use 1 or 2",
        "model.vocab=128": "model.vocab=128: must hold the 256 ids of data.tokenizer=byte; use 256 or more",
        "batch.sequence_length=0": "batch.sequence_length=0: must be at least 1 and at most",
        "optim.freeze=[embeding]": "optim.freeze=embeding: matches no parameter; use embedding.weight",
        "optim.groups=[{pattern: mlp.upp}]": "optim.groups=mlp.upp: matches no parameter; use ",
        f"data.paths=[none.jsonl,{tmp_path}/bad.jsonl]": "data.paths=none.jsonl: does not exist",
        f"resume={tmp_path}/nope": f"resume={tmp_path}/nope: is not a usable checkpoint (",
        f"run.dir={tmp_path}/file/run": f"run.dir={tmp_path}/file/run: cannot be created ({tmp_path}/file is a file",
        "checkpoint.load_weights=none": "checkpoint.load_weights=none: resume loads weights as well",
    }
    report = rejected(*invalid, keeps=True)
    expected = [*invalid.values(), f"data.paths={tmp_path}/bad.jsonl:1: is not JSON"]
    assert [sum(line.startswith(start) for line in report) for start in expected] == [1] * len(expected), report
    assert all(line.startswith((*expected, "parallel.tp=3: must divide")) for line in report), report
    report = rejected("model.mlp={_target_: nope.A}", "model.attention={_target_: nope.B}", "data.tokenizer=none.json")
    assert [line.partition("=")[0] for line in report] == [
        *("model.attention._target_", "model.mlp._target_", "data.tokenizer")
    ]


def test_any_invalid_value_leaves_the_other_errors_in_the_report(tmp_path):
    """No check fails on a value that could not be read, and none repeats its error; for every key."""
    more = ("model.attention={_target_: nope.B}", "resume=nope", "data.tokenizer=none.json", "device=cuda")
    config = compose([*overrides(tmp_path), *more])
    with pytest.raises(ConfigError) as whole:
        inspect_all(config)
    assert len(whole.value.errors) == 4 - (torch.cuda.device_count() > 0)
    for key in keys(TrainConfig):
        unread = Violation(key.name, "odd", "must be something else")
        invalid = replace_values(config, {key.name: INVALID})
        with pytest.raises(ConfigError) as rejected:
            inspect_all(invalid, [unread, *violations(invalid)])
        own = [line for line in rejected.value.errors if str(line).partition("=")[0].startswith(key.name)]
        assert own[0] is unread and len(own) <= 1 + (key.name == "model"), own
        lost = {line for line in map(str, whole.value.errors) if line not in map(str, rejected.value.errors)}
        assert all(_may_go(line, key.name) for line in lost), (key.name, lost)


def _may_go(line: str, key: str) -> bool:
    """Whether an error cannot be found if a key is invalid."""
    about = line.partition("=")[0]
    needs = {"resume": ("run", "run.dir", "run.root", "checkpoint", "checkpoint.on_corrupt", "resume")}
    needs |= {"data.tokenizer": ("data", "data.source", "data.blend")}
    return about.startswith(key) or key in needs.get(about, ())


def test_the_origin_of_an_invalid_value_is_named(tmp_path, capfd):
    mine = tmp_path / "experiment" / "mine.yaml"
    mine.parent.mkdir()
    lines = ("data: {tokenizer: none.json}", "optim: {freeze: [embeding], betas: [0.9]}", "seed: two")
    mine.write_text("\n".join(["# @package _global_", "defaults: [parity]", *lines]) + "\n")
    assert main(["train", "experiment=mine", f"run.root={tmp_path}/out", "--config-dir", str(tmp_path)]) == 78
    report = capfd.readouterr().err.splitlines()
    starts = ("seed=two", "optim.betas=[0.9]", "optim.freeze=embeding", "data.tokenizer=none.json")
    for line, start in zip(report, starts, strict=True):
        assert line.startswith(start) and line.count(f"(in {mine})") == 1, report


def test_a_layer_whose_constructor_fails_is_rejected_with_its_line(rejected):
    report = rejected("model.mlp={_target_: tests.preflight.test_inspect.Failing}", "optim.freeze=[nothing]")
    assert any(
        "Failing: cannot be built, ZeroDivisionError" in line and "test_inspect.py, line" in line for line in report
    )


def test_illegal_values_and_unwritable_folders(tmp_path, rejected):
    report = rejected("parallel.tp=3", "parallel.pp=5", "run.stops=3", "batch.micro_size=3")
    assert len(report) >= 4 and all("=" in line and ": " in line for line in report)
    assert "run.steps" in next(line for line in report if line.startswith("run.stops"))
    (tmp_path / "file").write_text("in the way")
    assert "run.dir=" in rejected(f"run.dir={tmp_path}/file/run", keeps=True)[0]


@pytest.mark.full
def test_a_checkpoint_of_another_run_is_not_continued(tmp_path, rejected, capfd):
    """A change of sample order, data or model is found before the start."""
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
        assert any(line.startswith(words) for line in rejected(*again, *more, keeps=True))
        assert not (tmp_path / "again").exists()
    [line] = rejected(*again, "model.ffn=64", "parallel.dp=2", keeps=True)
    assert line.startswith(f"resume={path}: does not fit the model: blocks.0.mlp.up.weight is [2, 64, 16] here and [2,")
    [line] = rejected(f"checkpoint.load_weights={path}", f"run.dir={tmp_path}/again", "model.tied=true", keeps=True)
    assert line.endswith("does not fit the model: head.weight is only in the checkpoint; use the model.* of its run")
    assert not (tmp_path / "again").exists()
    assert train(tmp_path, *again, "precision=fp32", "parallel.dp=2") == 78
    report = capfd.readouterr().err
    assert "dtype float32 here, float64 in the checkpoint" in report and "Traceback" not in report
    assert status(tmp_path / "again")["exit_code"] == 78
    (path / "rank_00000.safetensors").write_bytes(b"damaged")
    assert any("rank_00000.safetensors" in line for line in rejected(*again, keeps=True))


def test_a_missing_device_and_missing_weights(tmp_path, rejected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "empty").mkdir()
    report = rejected("device=cuda", f"checkpoint.load_weights={tmp_path}/nope", keeps=True)
    assert report[0].startswith(f"checkpoint.load_weights={tmp_path}/nope: no such folder; use")
    assert report[1].startswith("device=cuda: this machine has no GPU") and not (tmp_path / "run").exists()
    for name, words in {"file": "is a file", "empty": "is not a usable checkpoint"}.items():
        [line, *_] = rejected(f"checkpoint.load_weights={tmp_path}/{name}", keeps=True)
        assert line.startswith(f"checkpoint.load_weights={tmp_path}/{name}: {words}")
        assert not (tmp_path / "run").exists()


def test_rules_about_the_device_that_auto_selects(rejected, monkeypatch, tmp_path):
    monkeypatch.setattr("megastack.preflight.inspect.count_gpus", lambda: 0)
    assert rejected("device=auto", "launch.numa_binding=node") == [
        "launch.numa_binding=node: needs ranks on GPUs (device=auto selects cpu on this machine); use none"
    ]
    monkeypatch.setattr("megastack.preflight.inspect.count_gpus", lambda: 2)
    monkeypatch.setattr("megastack.config.layout_rules.batching_error", lambda *sizes, **options: "F0 before F1")
    [line] = rejected("device=auto")
    assert line.startswith("schedule.name=1f1b: lists messages in an order that can deadlock on GPUs (F0 before F1)")
    assert "(device=auto selects cuda on this machine)" in line


def test_more_ranks_than_this_machine_can_run(rejected, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    [line] = rejected("parallel.dp=129", "batch.global_size=129")
    assert line.startswith("world=129: ") and "use torchrun or srun" in line and "at most 128 ranks" in line


def test_a_file_in_place_of_the_run_folder(tmp_path, rejected):
    (tmp_path / "run_file").write_text("in the way")
    [line] = rejected(f"run.dir={tmp_path}/run_file", keeps=True)
    assert line.startswith(f"run.dir={tmp_path}/run_file: ") and "is a file" in line
    assert not (tmp_path / "run_file-2").exists()


def test_a_folder_in_place_of_the_tokenizer_is_called_a_folder(tmp_path, rejected):
    [line, *_] = rejected(f"data.tokenizer={tmp_path}")
    assert line.startswith(f"data.tokenizer={tmp_path}: is a folder")


def test_freezing_every_parameter_is_rejected(rejected):
    [line] = rejected("optim.freeze=[.]")
    assert line == "optim.freeze=[.]: freezes every parameter; use patterns that leave some to train"
