"""One rank's file: the safetensors library reads it, and its record is true."""

import math
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megastack.checkpoint.cover import whole
from megastack.checkpoint.items import DTYPE_NAMES
from megastack.checkpoint.manifest import BoxRecord
from megastack.checkpoint.parts import Part, read_parts
from megastack.checkpoint.tensorfile import Block, write_tensors
from tests.checkpoint.state_cuts import same_bits


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    random = {
        f"model/{name}@0,0": torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        for dtype, name in DTYPE_NAMES.items()
    }
    strided = torch.randn(6, 8, generator=generator).t()[1::2]
    return random | {"a@0,64": strided, "scalar@": torch.tensor(2.5), "none@0,0": torch.zeros(0, 3)}


def write(path: Path, values: dict[str, torch.Tensor]) -> tuple[object, dict[str, int]]:
    blocks = [
        Block(key, DTYPE_NAMES[value.dtype], tuple(value.shape), lambda value=value: value)
        for key, value in values.items()
    ]
    return write_tensors(path, blocks)


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    values = tensors()
    write(tmp_path / "x.safetensors", values)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == values.keys()
    assert all(same_bits(loaded[key], value) for key, value in values.items())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_record_is_the_size_and_checksum_of_the_file(tmp_path: Path) -> None:
    record, _ = write(tmp_path / "x.safetensors", tensors())
    data = (tmp_path / "x.safetensors").read_bytes()
    assert (record.name, record.size, record.crc32) == ("x.safetensors", len(data), zlib.crc32(data))


def test_boxes_are_read_back_from_where_they_begin(tmp_path: Path) -> None:
    values = tensors()
    _, begins = write(tmp_path / "x.safetensors", values)
    for key, value in values.items():
        record = BoxRecord(whole(value.shape), "x.safetensors", begins[key])
        target = torch.empty(value.shape, dtype=value.dtype)
        read_parts(tmp_path / "x.safetensors", [Part(record, DTYPE_NAMES[value.dtype], whole(value.shape), target)])
        assert same_bits(target, value)
        if math.prod(value.shape):
            assert begins[key] % value.dtype.itemsize == 0


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", tensors())
    with pytest.raises(FileExistsError):
        write(tmp_path / "x.safetensors", tensors())
