"""Profiles of training steps: the trace opens, and names the actions and operations of the rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megastack.observe import profiler
from megastack.observe.profiler import StepProfiler, write_memory_snapshot
from tests.tiny_runs import train


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def names(path: Path) -> set[str]:
    return {event.get("name", "") for event in events(path)}


def test_a_selected_step_is_traced_and_no_other(tmp_path: Path) -> None:
    profiled = StepProfiler([2], lambda step: tmp_path / f"{step}.json.gz", torch.device("cpu"), "rank 0")
    for step in (1, 2, 3):
        with profiled.around(step):
            torch.ones(3).square()
    assert [path.name for path in tmp_path.iterdir()] == ["2.json.gz"]
    assert {"step 2", "aten::square"} <= names(tmp_path / "2.json.gz")


def test_actions_messages_and_collectives_are_named_on_every_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = ["parallel.tp=2", "parallel.pp=2", "observe.profile_steps=[2]", "run.steps=3"]
    assert train(tmp_path, *layout) == 0
    assert capfd.readouterr().err == ""
    traces = sorted((tmp_path / "run" / "profile" / "step_2").iterdir())
    assert [path.name for path in traces] == [f"rank_{rank:05d}.json.gz" for rank in range(4)]
    for rank, path in enumerate(traces):
        found = names(path)
        stage = rank // 2
        assert {"step 2", f"{stage}F0", f"{stage}B0"} <= found
        assert {"start tp reduce_scatter", "wait for pp receive"} <= found
        processes = [event["args"]["name"] for event in events(path) if event.get("name") == "process_name"]
        assert f"rank {rank} | pp{stage} dp0 tp{rank % 2}" in processes and "python" not in processes


def test_no_snapshot_is_written_without_a_gpu_and_a_failed_one_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not write_memory_snapshot(tmp_path / "none.pickle") and not list(tmp_path.iterdir())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    written: list[Path] = []
    monkeypatch.setattr(profiler, "dump_cuda_memory", written.append)
    assert write_memory_snapshot(tmp_path / "profile" / "memory.pickle") and written == [
        tmp_path / "profile" / "memory.pickle"
    ]

    def fail(path: Path) -> None:
        raise RuntimeError("no memory for the snapshot")

    monkeypatch.setattr(profiler, "dump_cuda_memory", fail)
    with caplog.at_level("WARNING", logger="megastack"):
        assert not write_memory_snapshot(tmp_path / "memory.pickle")
