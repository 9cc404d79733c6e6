"""Reading a checkpoint of several ranks in one process; and which rank checks which file when all ranks read."""

from pathlib import Path

import pytest
import torch

from megastack.checkpoint.reader import CheckpointReader, assign_checks
from megastack.checkpoint.save import save
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.ranks import run_ranks
from tests.checkpoint.state_cuts import CUTS, TENSORS, same_bits, state_of, tensor_of


def save_cuts(root: Path) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=3))
    for cut in CUTS:
        save(root / cut, state_of(cut, mesh.rank, 3), mesh)


def test_names_tensors_and_trainer_without_a_process_group(tmp_path: Path) -> None:
    run_ranks(save_cuts, 3, tmp_path)
    for cut in CUTS:
        reader = CheckpointReader(tmp_path / cut)
        assert reader.names == tuple(sorted(TENSORS))
        assert all(same_bits(reader.read(name), tensor_of(name)) for name in TENSORS)
        assert all((reader.shape(name), reader.dtype(name)) == TENSORS[name] for name in TENSORS)
        assert reader.trainer == {"step": 10, "cut": cut}
        reader.verify()
    assert not torch.distributed.is_initialized()


def test_the_tensor_that_is_read_can_be_modified(tmp_path: Path) -> None:
    reader = CheckpointReader(save(tmp_path / "x", state_of("whole", 0, 1), Mesh.single()).path)
    reader.read("model/norm.weight").zero_()
    assert same_bits(reader.read("model/norm.weight"), tensor_of("model/norm.weight"))


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    reader = CheckpointReader(save(tmp_path / "x", state_of("whole", 0, 1), Mesh.single()).path)
    with pytest.raises(CheckpointError, match=r"no tensor 'model/nothing'.*model/norm\.weight"):
        reader.read("model/nothing")


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "trainer.json"])
def test_damage_is_named_before_the_file_is_used(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "x", state_of("whole", 0, 1), Mesh.single()).path
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    reader = CheckpointReader(path)
    with pytest.raises(CheckpointError, match=f"{name}: crc32"):
        reader.verify()
    with pytest.raises(CheckpointError, match=f"{name}: crc32"):
        _ = reader.trainer if name == "trainer.json" else reader.read("model/norm.weight")


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        CheckpointReader(tmp_path)


def test_each_rank_checks_the_file_that_it_reads_most_of() -> None:
    assert assign_checks([{"a": 9, "b": 1}, {"b": 9}]) == [{"a"}, {"b"}]
    assert assign_checks([{"a": 9, "b": 9}, {}]) == [{"a", "b"}, set()]


def test_ranks_that_read_the_same_share_the_checks() -> None:
    same = dict.fromkeys("abcdef", 5)
    checks = assign_checks([same, same, same])
    assert [len(files) for files in checks] == [2, 2, 2]
    assert set().union(*checks) == set("abcdef")


def test_a_file_that_no_rank_reads_is_not_checked() -> None:
    assert assign_checks([{}, {}]) == [set(), set()]
