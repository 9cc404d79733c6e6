"""Records of a checkpoint that are not what they should be: a CheckpointError names the file, a resume goes on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megastack.checkpoint.folder import checkpoint_error, resolve_resume
from megastack.checkpoint.manifest import read_manifest
from megastack.checkpoint.reader import CheckpointReader
from megastack.cli import main
from megastack.errors import CheckpointError
from tests.checkpoint.test_folder import at, write
from tests.test_records import INVALID

RANK = "rank_00000.safetensors"
Body = dict[str, Any]
Pair = tuple[int, int]


def rewrite(path: Path, change: Callable[[Body], object]) -> None:
    """Change a manifest's body and sign it again."""
    file = path / "manifest.json"
    body = json.loads(file.read_text())["body"]
    change(body)
    crc = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    file.write_text(json.dumps({"crc32": f"{crc:08x}", "body": body}))


def retrain(path: Path, text: bytes) -> None:
    """Change the trainer's state so that its checksum fits."""
    (path / "trainer.json").write_bytes(text)
    record = {"size": len(text), "crc32": f"{zlib.crc32(text):08x}"}
    rewrite(path, lambda body: body["files"].update({"trainer.json": record}))


def tensor(body: Body) -> Body:
    return body["tensors"]["model/w"]


def box(body: Body) -> Body:
    return tensor(body)["boxes"][0]


def halves(body: Body, begins: Pair, sizes: Pair = (2, 3), offsets: Pair = (0, 2)) -> None:
    start = box(body)["begin"]
    tensor(body)["boxes"] = [
        {"offset": [offset, 0], "size": [size, 7], "file": RANK, "begin": start + begin}
        for offset, size, begin in zip(offsets, sizes, begins, strict=True)
    ]


WRONG: dict[str, Callable[[Body], object]] = {
    "no files": lambda body: body.pop("files"),
    "files is a list": lambda body: body.update(files=[]),
    "tensors is null": lambda body: body.update(tensors=None),
    "a tensor is a number": lambda body: body["tensors"].update(x=3),
    "a box is a string": lambda body: tensor(body).update(boxes=["box"]),
    "boxes is an object": lambda body: tensor(body).update(boxes={}),
    "an absolute name": lambda body: body["files"].update({"/etc/passwd": {"size": 1, "crc32": "00000000"}}),
    "a name above": lambda body: body["files"].update({f"../{RANK}": {"size": 1, "crc32": "00000000"}}),
    "other digits": lambda body: body["files"].update({"rank_٠٠٠٠١.safetensors": {"size": 1, "crc32": "00000000"}}),
    "a box elsewhere": lambda body: box(body).update(file="../x"),
    "a negative begin": lambda body: box(body).update(begin=-8),
    "a negative offset": lambda body: box(body).update(offset=[-1, 0]),
    "a begin beyond the file": lambda body: box(body).update(begin=10**6),
    "a huge begin": lambda body: box(body).update(begin=10**30),
    "a fraction": lambda body: box(body).update(begin=80.0),
    "a truth value": lambda body: box(body).update(offset=[False, False]),
    "a string": lambda body: tensor(body).update(shape=["5", "7"]),
    "a size of text": lambda body: body["files"][RANK].update(size="300"),
    "a size beyond the file": lambda body: box(body).update(size=[50, 7]),
    "a huge shape": lambda body: tensor(body).update(shape=[0, 2**62, 2**62], boxes=[]),
    "many dims": lambda body: tensor(body).update(shape=[0] * 65, boxes=[]),
    "a dtype that is a list": lambda body: tensor(body).update(dtype=[]),
    "an overlap": lambda body: halves(body, (0, 28), sizes=(2, 3), offsets=(0, 1)),
    "a hole": lambda body: halves(body, (0, 56), sizes=(2, 2), offsets=(0, 2)),
    "bytes that two boxes share": lambda body: halves(body, (0, 28)),
    "a crc32 with a sign": lambda body: body["files"][RANK].update(crc32="-0000001"),
    "a crc32 that is a number": lambda body: body["files"][RANK].update(crc32=7),
    "a time without end": lambda body: body.update(time=1e300),
    "a negative time": lambda body: body.update(time=-1),
    "a time that is text": lambda body: body.update(time="now"),
    "no ranks": lambda body: body.update(world_size=0),
    "a version that is a list": lambda body: body.update(version=[1]),
    "a format that is a list": lambda body: body.update(format=[]),
}


def refused(run: Path, name: str) -> None:
    """Every way to look at the newest checkpoint names the file, and a resume takes the one before."""
    newest = at(run / "checkpoints", 4)
    assert name in str(checkpoint_error(newest)) and name in str(checkpoint_error(newest, content=False))
    found = resolve_resume("auto", run, run)
    assert found.checkpoint == at(run / "checkpoints", 2) and name in found.skipped[0]
    with pytest.raises(CheckpointError, match=name):
        resolve_resume("auto", run, run, on_corrupt="refuse")
    for action in ("ls", "show", "verify"):
        assert main(["checkpoint", action, str(run)]) == 1


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_manifest_that_is_signed_and_wrong(tmp_path: Path, change: Callable[[Body], object]) -> None:
    folder = write(tmp_path, 2, 4)
    rewrite(at(folder, 4), lambda body: None)
    read_manifest(at(folder, 4))
    rewrite(at(folder, 4), change)
    with pytest.raises(CheckpointError, match=r"step_00000004/manifest\.json: "):
        CheckpointReader(at(folder, 4))
    refused(tmp_path, "manifest.json")


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
@pytest.mark.parametrize("name", ["manifest.json", "trainer.json"])
def test_a_record_that_cannot_be_read(tmp_path: Path, name: str, text: bytes) -> None:
    folder = write(tmp_path, 2, 4)
    if name == "trainer.json":
        retrain(at(folder, 4), text)
    else:
        (at(folder, 4) / name).write_bytes(text)
    refused(tmp_path, name)


@pytest.mark.parametrize(
    "state",
    [
        *({"step": value} for value in (-1, 2.0, "4", None, True)),
        *({"consumed_tokens": 2**70}, {"batch": []}, {"stages": {}}, {"stages": [1]}, {"stages": [{}]}),
        *({"blend": [{"begin": 0}]}, {"blend": [{"begin": 0, "weights": {"a": "1"}}]}),
    ],
)
def test_trainer_state_of_other_types(tmp_path: Path, state: dict[str, object]) -> None:
    folder = write(tmp_path, 2, 4)
    retrain(at(folder, 4), json.dumps(state).encode())
    refused(tmp_path, "trainer.json")


def test_a_checkpoint_that_is_removed_while_it_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    reader = CheckpointReader(at(folder, 2))
    assert reader.read("model/w").numel() == 35
    for file in at(folder, 2).iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=rf"{RANK}: .*removed"):
        reader.read("model/w")
    with pytest.raises(CheckpointError, match=r"trainer\.json: missing"):
        _ = reader.trainer
