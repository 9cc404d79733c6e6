"""The manifest: round trip, and errors for anything incomplete or inconsistent."""

import json
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from megastack.checkpoint.manifest import (
    BoxRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    box_key,
    dump_manifest,
    rank_file,
    read_manifest,
)
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box

FILES = {
    "rank_00000.safetensors": FileRecord("rank_00000.safetensors", 200, 7),
    "trainer.json": FileRecord("trainer.json", 3, 8),
}


def manifest(*boxes: BoxRecord, shape: tuple[int, ...] = (4, 3), dtype: str = "F32") -> Manifest:
    return Manifest(FILES, {"model/w": TensorRecord(dtype, shape, boxes)}, 2, 1.5)


def whole_box(file: str = "rank_00000.safetensors", begin: int = 80) -> BoxRecord:
    return BoxRecord(Box((0, 0), (4, 3)), file, begin)


def write(folder: Path, value: Manifest) -> Path:
    (folder / "manifest.json").write_text(dump_manifest(value))
    return folder


def test_round_trip(tmp_path: Path) -> None:
    value = manifest(
        BoxRecord(Box((0, 0), (1, 3)), "rank_00000.safetensors", 80),
        BoxRecord(Box((1, 0), (3, 3)), "rank_00000.safetensors", 92),
    )
    read = read_manifest(write(tmp_path, value))
    assert (read, read.time, read.world_size) == (value, 1.5, 2)


def test_names() -> None:
    assert box_key("model/blocks.0.mlp.up.weight", (0, 64, 0)) == "model/blocks.0.mlp.up.weight@0,64,0"
    assert box_key("optim/step", ()) == "optim/step@"
    assert rank_file(3) == "rank_00003.safetensors"


def test_a_flipped_bit_anywhere_is_an_error_or_harmless(tmp_path: Path) -> None:
    value = manifest(whole_box())
    text = bytearray(write(tmp_path, value).joinpath("manifest.json").read_bytes())
    picks = random.Random(3)
    rejected = 0
    for position in range(len(text)):
        flipped = bytearray(text)
        flipped[position] ^= 1 << picks.randrange(8)
        (tmp_path / "manifest.json").write_bytes(flipped)
        try:
            assert read_manifest(tmp_path) == value  # white space, or the case of a digit of the checksum
        except CheckpointError as error:
            assert "manifest.json" in str(error)
            rejected += 1
    assert rejected > 0.95 * len(text)


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (manifest(), "hold 0 of the 12 elements"),
        (manifest(whole_box(), whole_box()), "overlap"),
        (manifest(whole_box(begin=160)), "outside"),
        (manifest(whole_box(file="rank_00001.safetensors")), "outside"),
        (manifest(whole_box(), dtype="F31"), "dtype"),
        (Manifest({**FILES, "../x": FileRecord("../x", 1, 1)}, {}), "not a file of a checkpoint"),
        (Manifest({}, {}), r"trainer\.json"),
    ],
)
def test_an_inconsistent_manifest_is_an_error(tmp_path: Path, value: Manifest, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_manifest(write(tmp_path, value))


@pytest.mark.parametrize(("key", "content"), [("format", "other"), ("version", 2)])
def test_a_foreign_or_newer_format_is_an_error(tmp_path: Path, key: str, content: object) -> None:
    path = write(tmp_path, manifest(whole_box())) / "manifest.json"
    outer = json.loads(path.read_text())
    outer["body"][key] = content
    body = json.dumps(outer["body"], sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({"crc32": f"{zlib.crc32(body):08x}", "body": outer["body"]}))
    with pytest.raises(CheckpointError, match=key):
        read_manifest(tmp_path)


def test_checking_folders_does_not_import_torch() -> None:
    code = "import megastack.checkpoint.folder, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
