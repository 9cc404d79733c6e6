"""A run folder has one owner, however many processes start together on any machine, and however an owner ends."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megastack.observe import claims, ownership
from megastack.observe.claims import NO_JOB, Job, claim_path, create_claim, highest, newest_claim
from megastack.observe.ownership import (
    FolderInUse,
    Heartbeat,
    Ownership,
    OwnershipGuard,
    TakenOver,
    living_owner,
    take_ownership,
)
from megastack.observe.process import Process

fork = multiprocessing.get_context("fork")


@pytest.fixture
def other() -> Iterator[Process]:
    """Another living process."""
    sleeper = fork.Process(target=time.sleep, args=(600,))
    sleeper.start()
    assert sleeper.pid is not None
    yield Process._of(sleeper.pid)
    sleeper.kill()
    sleeper.join()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "LIMIT_S", 0.5)


def owned_by(folder: Path, owner: Process, number: int = 1, job: Job = NO_JOB) -> Path:
    """Write a claim as that process would."""
    path = claim_path(folder, number)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"token": "t", "owner": asdict(owner), "job": asdict(job)}))
    return path


def gone() -> Process:
    child = fork.Process(target=time.sleep, args=(600,))
    child.start()
    assert child.pid is not None
    process = Process._of(child.pid)
    child.kill()
    child.join()
    return process


def _take_all(folders: list[Path], start: object, found: object) -> None:
    taken = []
    start.wait()  # type: ignore[attr-defined]
    for number, folder in enumerate(folders):
        try:
            take_ownership(folder, NO_JOB)
            taken.append(number)
        except FolderInUse:
            pass
    found.put(taken)  # type: ignore[attr-defined]
    start.wait()  # type: ignore[attr-defined]  # an owner that ends is dead


@pytest.mark.parametrize("before", ["none", "released", "dead"])
def test_exactly_one_of_several_simultaneous_starts_gets_the_folder(tmp_path: Path, before: str) -> None:
    folders, dead = [tmp_path / str(number) for number in range(25)], gone()
    for folder in folders:
        folder.mkdir()
        if before == "dead":
            owned_by(folder, dead, number=7)
        elif before == "released":
            take_ownership(folder, NO_JOB).release()
    start, found = fork.Barrier(6), fork.SimpleQueue()
    processes = [fork.Process(target=_take_all, args=(folders, start, found)) for _ in range(6)]
    for process in processes:
        process.start()
    taken = [number for _ in processes for number in found.get()]
    for process in processes:
        process.join()
    assert sorted(taken) == list(range(25))
    number = {"none": 1, "released": 2, "dead": 8}[before]
    assert all(os.listdir(folder / "owner") == [f"claim_{number:08d}.json"] for folder in folders)


def test_a_start_that_was_stopped_does_not_take_the_folder_from_a_later_owner(tmp_path: Path, other: Process) -> None:
    """It found the owner of claim 1 dead; meanwhile others claimed the folder, and the last one is alive."""
    owned_by(tmp_path, other, number=5)
    for number in (2, 5):
        assert create_claim(tmp_path, number, NO_JOB) is None
    assert os.listdir(tmp_path / "owner") == ["claim_00000005.json"]


def test_a_living_owner_is_named_and_nothing_is_written(tmp_path: Path, other: Process) -> None:
    path = owned_by(tmp_path, other)
    before = path.stat().st_mtime_ns, path.read_text()
    living = living_owner(tmp_path, NO_JOB)
    assert str(living) == f"process {other.pid} on host {other.host}, started " + str(living).rpartition("started ")[2]
    with pytest.raises(FolderInUse, match=rf"process {other.pid} on host .*, started 20\d\d-"):
        take_ownership(tmp_path, NO_JOB)
    assert os.listdir(path.parent) == [path.name] and (path.stat().st_mtime_ns, path.read_text()) == before


def test_a_dead_owner_is_replaced_at_once_even_if_its_pid_is_reused(tmp_path: Path, other: Process) -> None:
    for number, owner in enumerate((gone(), replace(other, ticks=other.ticks - 1))):
        (folder := tmp_path / str(number)).mkdir()
        owned_by(folder, owner)
        began = time.monotonic()
        assert take_ownership(folder, NO_JOB).number == 2
        assert time.monotonic() - began < 5 < ownership.LIMIT_S


def test_a_killed_owner_that_was_not_reaped_is_dead(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        time.sleep(600)
        os._exit(0)
    owner = Process._of(pid)
    assert owner.is_alive(Process.current()) is True
    os.kill(pid, signal.SIGSTOP)
    assert owner.is_alive(Process.current()) is True
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert owner.is_alive(Process.current()) is False
    os.waitpid(pid, 0)


ELSEWHERE = {
    "another machine": {"host": "far", "boot": "b"},
    "another boot, same name": {"boot": "b"},
    "another container, same name": {"namespace": "pid:[1]"},
    "a system without boot ids": {"boot": "", "namespace": ""},
}


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=ELSEWHERE)
@pytest.mark.parametrize("beats", [True, False])
def test_an_owner_on_another_machine_is_alive_as_long_as_its_claim_changes(
    tmp_path: Path, other: Process, short: None, place: dict[str, str], beats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a local process with that id nor the owner's clock, which is a day late, matters."""
    path = owned_by(tmp_path, replace(other, **place))
    os.utime(path, (time.time() - 86400,) * 2)
    if not beats:
        assert take_ownership(tmp_path, NO_JOB).number == 2
        return
    sleep = time.sleep
    monkeypatch.setattr(ownership.time, "sleep", lambda s: os.utime(path, (time.time() - 86399,) * 2) or sleep(s))
    with pytest.raises(FolderInUse, match=f"process {other.pid}"):
        take_ownership(tmp_path, NO_JOB)


def test_the_process_itself_is_judged_by_its_heartbeat(tmp_path: Path, short: None) -> None:
    """A program that replaced itself keeps its process id and start time."""
    owned_by(tmp_path, Process.current())
    assert take_ownership(tmp_path, NO_JOB).number == 2


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", '{"token": 1}', '{"token": "t", "owner": {"pid": 1e99}}'])
def test_an_unreadable_claim_is_watched_like_one_of_another_machine(tmp_path: Path, short: None, text: str) -> None:
    path = owned_by(tmp_path, Process.current())
    path.write_text(text)
    began = time.monotonic()
    assert take_ownership(tmp_path, NO_JOB).number == 2
    assert time.monotonic() - began >= ownership.LIMIT_S


@pytest.mark.parametrize(
    ("earlier", "later", "supersedes"),
    [
        (Job("rendezvous a"), Job("rendezvous a"), True),
        (Job("rendezvous a"), Job("rendezvous b"), False),
        (Job(), Job(), False),
        (Job(None, "17", 0), Job(None, "17", 1), True),
        (Job(None, "17", 0), Job(None, "17", 0), False),
        (Job(None, "17", 0), Job(None, "18", 1), False),
    ],
)
def test_a_later_start_of_the_same_job_gets_the_folder(
    tmp_path: Path, other: Process, earlier: Job, later: Job, supersedes: bool
) -> None:
    owned_by(tmp_path, other, job=earlier)
    first = Ownership(tmp_path, 1, "t")
    guard = OwnershipGuard(first)
    guard()
    if not supersedes:
        with pytest.raises(FolderInUse):
            take_ownership(tmp_path, later)
        return
    second = take_ownership(tmp_path, later)
    guard()  # the last check is recent
    with pytest.raises(TakenOver, match=rf"was taken over by process {os.getpid()} on"):
        guard.now()
    assert second.held and not first.held
    first.release()
    assert not newest_claim(tmp_path).released


def test_a_heartbeat_touches_the_claim_and_releases_it_on_any_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "HEARTBEAT_S", 0.02)
    owner = take_ownership(tmp_path, NO_JOB)
    before = newest_claim(tmp_path)
    with pytest.raises(KeyboardInterrupt), Heartbeat(owner):
        while newest_claim(tmp_path).mark == before.mark:
            time.sleep(0.01)
        child = fork.Process(target=_leave, args=(Heartbeat(owner),))
        child.start()
        child.join()
        assert not newest_claim(tmp_path).released
        raise KeyboardInterrupt
    assert newest_claim(tmp_path).released and highest(tmp_path) == 1


def _leave(beats: Heartbeat) -> None:
    beats.__exit__(None, None, None)


def test_a_heartbeat_does_not_recreate_a_removed_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "HEARTBEAT_S", 0.01)
    owner = take_ownership(tmp_path, NO_JOB)
    with Heartbeat(owner):
        claim_path(tmp_path, 2).write_text("{}")
        claim_path(tmp_path, 1).unlink()
        time.sleep(0.1)
    assert os.listdir(tmp_path / "owner") == ["claim_00000002.json"]


def test_a_file_system_without_links(tmp_path: Path, other: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(claims.os, "link", fail)
    first = take_ownership(tmp_path, NO_JOB)
    assert newest_claim(tmp_path).token == first.token
    assert create_claim(tmp_path, 1, NO_JOB) is None
    first.release()
    assert take_ownership(tmp_path, NO_JOB).number == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["link", "mkdir"])
def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, operation: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(claims.os, operation, fail)
    with pytest.raises(OSError, match=f"cannot write: {os.strerror(code)}: .*claim_00000001.json"):
        take_ownership(tmp_path, NO_JOB)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
