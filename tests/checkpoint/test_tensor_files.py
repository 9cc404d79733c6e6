"""Safetensors files: the library reads them, records are correct, and reads take only the bytes that they need."""

import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from megastack.checkpoint import tensor_files
from megastack.checkpoint.manifest import BoxRecord, FileRecord
from megastack.checkpoint.state import DTYPE_NAMES
from megastack.checkpoint.tensor_files import BoxRead, LazyTensor, group_by_size, read_boxes, write_tensors
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box, whole_box
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
    lazy = [
        LazyTensor(key, DTYPE_NAMES[value.dtype], tuple(value.shape), lambda value=value: value)
        for key, value in values.items()
    ]
    return write_tensors(path, lazy)


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


def test_boxes_are_read_back_from_their_offsets(tmp_path: Path) -> None:
    values = tensors()
    _, begins = write(tmp_path / "x.safetensors", values)
    for key, value in values.items():
        record = BoxRecord(whole_box(value.shape), "x.safetensors", begins[key])
        target = torch.empty(value.shape, dtype=value.dtype)
        read_boxes(
            tmp_path / "x.safetensors", [BoxRead(record, DTYPE_NAMES[value.dtype], whole_box(value.shape), target)]
        )
        assert same_bits(target, value)
        if math.prod(value.shape):
            assert begins[key] % value.dtype.itemsize == 0


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", tensors())
    with pytest.raises(FileExistsError):
        write(tmp_path / "x.safetensors", tensors())


SHAPES = {"a@0,0": (6, 7), "b@0,0,0": (2, 3, 5), "c@0": (11,)}
TENSORS = {key: torch.arange(float(torch.Size(shape).numel())).view(shape) for key, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FileRecord, dict[str, int]]:
    path = tmp_path_factory.mktemp("boxes") / "rank_00000.safetensors"
    lazy = [LazyTensor(key, "F32", SHAPES[key], lambda tensor=tensor: tensor) for key, tensor in TENSORS.items()]
    return path, *write_tensors(path, lazy)


def box_read(begins: dict[str, int], key: str, box: Box, target: torch.Tensor) -> BoxRead:
    return BoxRead(BoxRecord(whole_box(SHAPES[key]), "rank_00000.safetensors", begins[key]), "F32", box, target)


def blank(size: tuple[int, ...], contiguous: bool) -> torch.Tensor:
    """A tensor to fill."""
    return torch.full(size, -1.0) if contiguous else torch.full((*size, 2), -1.0)[..., 0]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, Box, bool]:
    key = draw(st.sampled_from(sorted(SHAPES)))
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in SHAPES[key]]
    return key, Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(wanted=st.lists(cuts(), max_size=6), checked=st.booleans(), chunk=st.sampled_from([4, 24, 1 << 20]))
def test_any_boxes_are_read_from_their_place(
    file: tuple[Path, FileRecord, dict[str, int]],
    wanted: list[tuple[str, Box, bool]],
    checked: bool,
    chunk: int,
) -> None:
    """Boxes may overlap, be empty, be strided in the file or in memory; the checksum is right in every case."""
    path, record, begins = file
    targets = [blank(box.size, contiguous) for _, box, contiguous in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "CHUNK_BYTES", chunk)
        reads = [box_read(begins, key, box, target) for (key, box, _), target in zip(wanted, targets, strict=True)]
        read_boxes(path, reads, check=record if checked else None)
    for (key, box, _), target in zip(wanted, targets, strict=True):
        assert torch.equal(target, TENSORS[key][box.slices])


def test_another_dtype_is_converted(file: tuple[Path, FileRecord, dict[str, int]]) -> None:
    path, _, begins = file
    target = torch.zeros(6, 7, dtype=torch.bfloat16)
    read_boxes(path, [box_read(begins, "a@0,0", whole_box((6, 7)), target)])
    assert torch.equal(target, TENSORS["a@0,0"].bfloat16())


def test_a_wrong_checksum_is_an_error_whichever_boxes_are_read(file: tuple[Path, FileRecord, dict[str, int]]) -> None:
    path, record, begins = file
    assert record.crc32 == zlib.crc32(path.read_bytes())
    wrong = replace(record, crc32=record.crc32 ^ 1)
    for reads in ([], [box_read(begins, "c@0", Box((3,), (4,)), torch.zeros(4))]):
        with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors: crc32 .* \(corrupt\)"):
            read_boxes(path, reads, check=wrong)


def test_a_file_that_ends_early_is_an_error(file: tuple[Path, FileRecord, dict[str, int]], tmp_path: Path) -> None:
    path, record, begins = file
    short = tmp_path / "short"
    short.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        read_boxes(short, [box_read(begins, "c@0", whole_box((11,)), torch.zeros(11))], check=record)


def test_only_the_bytes_of_the_boxes_are_read(
    file: tuple[Path, FileRecord, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record, begins = file
    read: list[tuple[int, int]] = []

    def counting(descriptor: int, targets: Sequence[memoryview], position: int) -> int:
        read.append((position, sum(map(len, targets))))
        return preadv(descriptor, targets, position)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", counting)
    rows = box_read(begins, "a@0,0", Box((2, 0), (2, 7)), torch.zeros(2, 7))
    read_boxes(path, [rows])
    assert read == [(begins["a@0,0"] + 2 * 7 * 4, 2 * 7 * 4)]
    read.clear()
    read_boxes(path, [rows], check=record)
    assert sum(count for _, count in read) == record.size  # each byte once, the box straight into the tensor


def test_tensors_are_grouped_in_order_and_a_large_one_is_alone() -> None:
    lazy = [LazyTensor(str(n), "U8", (n,), lambda: torch.zeros(0)) for n in (2, 2, 9, 1)]
    assert [[tensor.key for tensor in group] for group in group_by_size(lazy, 4)] == [["2", "2"], ["9"], ["1"]]
