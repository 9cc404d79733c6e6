"""Run folders are claimed exclusively, also by runs that start at the same time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from megastack.observe.folder import claim

fork = multiprocessing.get_context("fork")


def _claim_many(base: Path, start: object, found: object) -> None:
    start.wait()
    found.put([str(claim(base / str(number), "unused").path) for number in range(25)])


def test_processes_that_start_together_get_different_folders(tmp_path):
    """Eight processes claim the same 25 names; one of the folders exists already, empty."""
    (tmp_path / "3").mkdir()
    start, found = fork.Barrier(8), fork.SimpleQueue()
    processes = [fork.Process(target=_claim_many, args=(tmp_path, start, found)) for _ in range(8)]
    for process in processes:
        process.start()
    taken = [path for _ in processes for path in found.get()]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(taken) == len(set(taken)) == 200
    assert {Path(path).name for path in taken} >= {"3", "3-2", "3-8"} and not (tmp_path / "3-9").exists()


def test_names_and_which_folders_count_as_taken(tmp_path):
    moment = 1_700_000_000.0
    first, second = (claim(None, tmp_path / "out", moment).path for _ in range(2))
    assert first.parent.parent == tmp_path / "out" and second == first.with_name(first.name + "-2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert claim(tmp_path / "full", "unused").path == tmp_path / "full-2"
    (tmp_path / "empty").mkdir()
    assert claim(tmp_path / "empty", "unused").path == tmp_path / "empty"
    assert claim(tmp_path / "empty", "unused").path == tmp_path / "empty-2"


def test_the_current_folder_is_named_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    assert claim(".", "unused").path == tmp_path / "job"
    assert claim(".", "unused").path == tmp_path / "job-2"
    with pytest.raises(OSError, match="cannot be a run folder"):
        claim("/", "unused")
