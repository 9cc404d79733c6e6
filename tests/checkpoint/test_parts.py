"""Reading parts of a file: into the right places, no more than is needed, and never past a wrong checksum."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.checkpoint import parts as module
from megastack.checkpoint.cover import whole
from megastack.checkpoint.manifest import BoxRecord, FileRecord
from megastack.checkpoint.parts import Part, read_parts
from megastack.checkpoint.tensorfile import Block, write_tensors
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box

SHAPES = {"a@0,0": (6, 7), "b@0,0,0": (2, 3, 5), "c@0": (11,)}
TENSORS = {key: torch.arange(float(torch.Size(shape).numel())).view(shape) for key, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FileRecord, dict[str, int]]:
    path = tmp_path_factory.mktemp("parts") / "rank_00000.safetensors"
    blocks = [Block(key, "F32", SHAPES[key], lambda tensor=tensor: tensor) for key, tensor in TENSORS.items()]
    return path, *write_tensors(path, blocks)


def part(begins: dict[str, int], key: str, box: Box, target: torch.Tensor) -> Part:
    return Part(BoxRecord(whole(SHAPES[key]), "rank_00000.safetensors", begins[key]), "F32", box, target)


def blank(size: tuple[int, ...], tidy: bool) -> torch.Tensor:
    """A tensor to fill; an untidy one has gaps in memory."""
    return torch.full(size, -1.0) if tidy else torch.full((*size, 2), -1.0)[..., 0]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, Box, bool]:
    key = draw(st.sampled_from(sorted(SHAPES)))
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in SHAPES[key]]
    return key, Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(wanted=st.lists(cuts(), max_size=6), checked=st.booleans(), chunk=st.sampled_from([4, 24, 1 << 20]))
def test_any_parts_come_from_where_they_lie(
    file: tuple[Path, FileRecord, dict[str, int]],
    wanted: list[tuple[str, Box, bool]],
    checked: bool,
    chunk: int,
) -> None:
    """Parts may overlap, be empty, be strided in the file or in memory; the checksum is right in every case."""
    path, record, begins = file
    targets = [blank(box.size, tidy) for _, box, tidy in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk)
        reads = [part(begins, key, box, target) for (key, box, _), target in zip(wanted, targets, strict=True)]
        read_parts(path, reads, check=record if checked else None)
    for (key, box, _), target in zip(wanted, targets, strict=True):
        assert torch.equal(target, TENSORS[key][box.slices])


def test_another_dtype_is_converted(file: tuple[Path, FileRecord, dict[str, int]]) -> None:
    path, _, begins = file
    target = torch.zeros(6, 7, dtype=torch.bfloat16)
    read_parts(path, [part(begins, "a@0,0", whole((6, 7)), target)])
    assert torch.equal(target, TENSORS["a@0,0"].bfloat16())


def test_a_wrong_checksum_is_an_error_whatever_is_read(file: tuple[Path, FileRecord, dict[str, int]]) -> None:
    path, record, begins = file
    assert record.crc32 == zlib.crc32(path.read_bytes())
    wrong = replace(record, crc32=record.crc32 ^ 1)
    for reads in ([], [part(begins, "c@0", Box((3,), (4,)), torch.zeros(4))]):
        with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors: crc32 .* \(corrupt\)"):
            read_parts(path, reads, check=wrong)


def test_a_file_that_ends_early_is_an_error(file: tuple[Path, FileRecord, dict[str, int]], tmp_path: Path) -> None:
    path, record, begins = file
    short = tmp_path / "short"
    short.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        read_parts(short, [part(begins, "c@0", whole((11,)), torch.zeros(11))], check=record)


def test_only_the_bytes_of_the_parts_are_read(
    file: tuple[Path, FileRecord, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record, begins = file
    read: list[tuple[int, int]] = []

    def counting(descriptor: int, targets: Sequence[memoryview], position: int) -> int:
        read.append((position, sum(map(len, targets))))
        return preadv(descriptor, targets, position)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", counting)
    rows = part(begins, "a@0,0", Box((2, 0), (2, 7)), torch.zeros(2, 7))
    read_parts(path, [rows])
    assert read == [(begins["a@0,0"] + 2 * 7 * 4, 2 * 7 * 4)]
    read.clear()
    read_parts(path, [rows], check=record)
    assert sum(count for _, count in read) == record.size  # each byte once, the part straight into its place
