"""A process is killed before or after any operation on the disk: a usable checkpoint stays usable."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megastack.checkpoint import publish
from megastack.checkpoint.folder import Resume, keep_last, list_checkpoints, resolve_resume
from megastack.checkpoint.publish import recover
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.checkpoint.state import State, StateItem
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh

CHANGES = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync", "write")


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip flushes: a killed process loses nothing that it wrote."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def put(folder: Path, step: int, value: float) -> None:
    state = State([StateItem.replicated("model/w", torch.full((5, 7), value))], {"step": step})
    save(folder / f"step_{step:08d}", state, Mesh.single())


def value_of(checkpoint: Path | None) -> float:
    assert checkpoint is not None
    return float(CheckpointReader(checkpoint).read("model/w")[0, 0])


def damage(folder: Path, step: int) -> None:
    file = folder / f"step_{step:08d}" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class Killed(BaseException):
    """Raised by every operation of a killed process."""


def killed_at(number: int, work: Callable[[], object], *, after: bool) -> bool:
    """Whether ``work`` reached its n-th change on the disk and was killed there; it changes nothing afterwards."""
    left = number

    def killing(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*given: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 or (left == 0 and not after):
                raise Killed
            result = change(*given, **more)
            if left == 0:
                raise Killed
            return result

        return changed

    opened = io.open

    def opening(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
        return (killing(opened) if set(mode) & set("wxa") else opened)(file, mode, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, killing(getattr(os, name)))
        patch.setattr(io, "open", opening)
        patch.setattr(builtins, "open", opening)
        with contextlib.suppress(Killed, CheckpointError):  # a collective may turn one into the other
            work()
    return left <= 0


def every_kill(folder: Path, prepare: Callable[[], object], work: Callable[[], object]) -> list[list[str]]:
    """Kill ``work`` at each of its changes, and resume; returns the names that each kill left."""
    found = []
    for after in (False, True):
        for number in range(1, 100):
            for path in folder.glob("*"):
                publish.remove_folder(path) if path.is_dir() else path.unlink()
            prepare()
            killed = killed_at(number, work, after=after)
            found.append(names(folder))
            resume(folder)
            if not killed:
                break
    return found


def resume(folder: Path) -> None:
    """Resume as a start does: find the checkpoint, then own the folder and recover it; the value does not change."""
    found = resolve_resume("auto", folder.parent, folder.parent)
    value = value_of(found.checkpoint)
    recovered = recover(folder)
    assert found.checkpoint is not None
    place = recovered.get(found.checkpoint, found.checkpoint)
    assert value_of(place) == value and not place.name.startswith(".")
    assert resolve_resume("auto", folder.parent, folder.parent) == Resume(place, folder.parent, found.skipped)
    assert not [name for name in names(folder) if name.startswith(".step")]
    put(folder, 8, 8.0)
    assert value_of(place) == value


@pytest.mark.parametrize("others", [(), (2,)], ids=["alone", "with an older one"])
def test_replacing_a_checkpoint_leaves_the_new_or_the_old_one(tmp_path: Path, others: tuple[int, ...]) -> None:
    folder = tmp_path / "checkpoints"

    def prepare() -> None:
        for step in (*others, 4):
            put(folder, step, float(step))

    seen = every_kill(folder, prepare, lambda: put(folder, 4, 5.0))
    assert [".step_00000004.replaced", ".step_00000004.writing"] in [
        [name for name in left if name.startswith(".step")] for left in seen
    ]
    assert all("step_00000004" in left or ".step_00000004.replaced" in left for left in seen)


def test_replacing_a_damaged_checkpoint_leaves_the_previous_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def prepare() -> None:
        put(folder, 2, 2.0)
        put(folder, 4, 4.0)
        damage(folder, 4)

    every_kill(folder, prepare, lambda: put(folder, 4, 5.0))


def test_publishing_and_removing_leave_a_usable_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work() -> None:
        put(folder, 6, 6.0)
        keep_last(folder, 1)

    every_kill(folder, lambda: [put(folder, step, float(step)) for step in (2, 4)], work)


@pytest.mark.parametrize(
    ("published", "damaged"),
    [(False, None), (False, "writing"), (False, "replaced"), (True, None), (True, "replaced"), (True, "step")],
)
def test_recovery_can_be_killed_too(tmp_path: Path, published: bool, damaged: str | None) -> None:
    """Between the renames or after them, with one of the two damaged."""
    folder = tmp_path / "checkpoints"
    path = folder / "step_00000004"
    new = path if published else publish.writing_folder(path)
    replaced = publish.replaced_folder(path)

    def prepare() -> None:
        put(folder, 4, 5.0)
        path.rename(folder / "aside")
        put(folder, 4, 4.0)
        path.rename(replaced)
        (folder / "aside").rename(new)
        for place, kind in ((new, "step" if published else "writing"), (replaced, "replaced")):
            if damaged == kind:
                file = place / "rank_00000.safetensors"
                file.write_bytes(file.read_bytes()[:-1] + b"?")

    prepare()
    expected = 4.0 if damaged in ("writing", "step") else 5.0
    assert value_of(resolve_resume("auto", tmp_path, tmp_path).checkpoint) == expected
    recover(folder)
    assert value_of(path) == expected and names(folder) == ["latest", "step_00000004"]
    every_kill(folder, prepare, lambda: recover(folder))
    every_kill(folder, prepare, lambda: put(folder, 4, 6.0))
    every_kill(folder, prepare, lambda: keep_last(folder, 1))


def test_damaged_checkpoints_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    """A damaged checkpoint is renamed back if there is no better one; foreign files are never removed."""
    folder = tmp_path / "checkpoints"
    put(folder, 2, 2.0)
    put(folder, 4, 4.0)
    damage(folder, 4)
    (folder / "step_00000004").rename(folder / ".step_00000004.replaced")
    (folder / ".step_00000006.writing").mkdir()
    (folder / ".step_00000006.writing" / "notes.txt").write_text("mine")
    found = resolve_resume("auto", tmp_path, tmp_path)
    assert found.checkpoint == folder / "step_00000002" and "rank_00000.safetensors: crc32" in found.skipped[0]
    recover(folder)
    assert [entry.step for entry in list_checkpoints(folder)] == [2, 4]
    assert (folder / ".step_00000006.writing" / "notes.txt").exists()
