"""Loading: any layout from any other, bitwise; and one error, the same on all ranks, of all mismatches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megastack.checkpoint.load import load
from megastack.checkpoint.save import save
from megastack.checkpoint.state import State, StateItem
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.placement.boxes import Box, range_boxes
from megastack.testing.ranks import run_ranks
from tests.checkpoint.state_cuts import CUTS, TENSORS, state_of, tensor_of, wrong_items


def save_every_cut(root: Path, world: int) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=world))
    for cut in CUTS:
        save(root / f"{cut}{world}", state_of(cut, mesh.rank, world), mesh)


def load_every_checkpoint(root: Path, world: int) -> list[str]:
    mesh = Mesh.from_environment(MeshShape(tp=world))
    wrong = []
    for number, path in enumerate(sorted(root.iterdir())):
        for cut in (CUTS[number % len(CUTS)], CUTS[(number + 1) % len(CUTS)]):
            state = state_of(cut, mesh.rank, world, blank=True)
            report = load(path, state, mesh)
            assert report.loaded == tuple(sorted(TENSORS)) and not report.missing and not report.unexpected
            wrong += [f"{path.name} as {cut}: {name}" for name in wrong_items(state)]
    return wrong


def test_any_sharding_on_any_ranks_loads_as_any_other_bitwise(tmp_path: Path) -> None:
    for world in (1, 2, 3):
        run_ranks(save_every_cut, world, tmp_path, world)
    for world in (1, 2, 4):
        assert run_ranks(load_every_checkpoint, world, tmp_path, world) == [[]] * world


LENGTHS = {"a": 3, "b": 5, "c": 7}


def flat_state(rank: int, world: int, *, blank: bool = False, alignment: int = 4) -> State:
    """Moments as one flat buffer, padded to equal slices, one per rank."""
    part = -(-sum(LENGTHS.values()) // (world * alignment)) * alignment
    items, base = [], 0
    for number, (name, length) in enumerate(LENGTHS.items()):
        start, stop = (min(max(edge - base, 0), length) for edge in (rank * part, (rank + 1) * part))
        values = torch.arange(length) + 100.0 * number
        boxes = [(box, values[box.slices].clone()) for box in range_boxes((length,), start, stop)]
        filled = tuple((box, torch.zeros_like(value) if blank else value) for box, value in boxes)
        items.append(StateItem(f"optim/exp_avg/{name}", (length,), filled))
        base += length
    return State(items)


def save_flat(root: Path) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=4))
    save(root / "x", flat_state(mesh.rank, 4), mesh)


def load_flat(root: Path) -> bool:
    mesh = Mesh.from_environment(MeshShape(dp=3))
    state, wanted = flat_state(mesh.rank, 3, blank=True), flat_state(mesh.rank, 3)
    load(root / "x", state, mesh)
    pairs = zip(state.items, wanted.items, strict=True)
    return all(torch.equal(a, b) for x, y in pairs for (_, a), (_, b) in zip(x.boxes, y.boxes, strict=True))


def test_flat_slices_with_different_padding_keep_every_moment_by_name(tmp_path: Path) -> None:
    run_ranks(save_flat, 4, tmp_path)
    assert run_ranks(load_flat, 3, tmp_path) == [True] * 3


def test_views_and_parameters_are_filled_in_place(tmp_path: Path) -> None:
    save(tmp_path / "x", state_of("whole", 0, 1), Mesh.single())
    padded = torch.nn.Parameter(torch.full((40, 7), -1.0))
    item = StateItem("model/embedding.weight", (37, 7), ((Box((0, 0), (37, 7)), padded[:37]),))
    load(tmp_path / "x", State([item]), Mesh.single(), strict=False)
    assert torch.equal(padded[:37], tensor_of("model/embedding.weight"))
    assert bool((padded[37:] == -1).all())
    assert padded.requires_grad


def test_only_the_weights_on_request(tmp_path: Path) -> None:
    save(tmp_path / "x", state_of("whole", 0, 1), Mesh.single())
    state = state_of("whole", 0, 1, blank=True)
    state.trainer = {"step": 3}
    report = load(tmp_path / "x", state, Mesh.single(), weights_only=True)
    assert report.loaded == tuple(sorted(name for name in TENSORS if name.startswith("model/")))
    assert report.trainer == {}
    assert state.trainer == {"step": 3}
    assert {name.split("/")[0] for name in wrong_items(state)} == {"optim"}
    load(tmp_path / "x", state_of("whole", 0, 1, blank=True, only="model/"), Mesh.single(), weights_only=True)


def whole_items(names: list[str]) -> list[StateItem]:
    return [StateItem.replicated(name, torch.zeros_like(tensor_of(name))) for name in names]


def load_mismatches(root: Path) -> tuple[str, bool, tuple[str, ...], tuple[str, ...]]:
    """Both ranks have a name that the checkpoint lacks; rank 0 has two tensors of another shape and dtype."""
    mesh = Mesh.from_environment(MeshShape(pp=2))
    kept = [name for name in TENSORS if name not in ("optim/mask", "model/norm.weight")]
    fine = [*whole_items(kept), StateItem.replicated("model/renamed.weight", torch.ones(3))]
    mismatched = {"optim/mask": torch.zeros(6, dtype=torch.bool), "model/norm.weight": torch.zeros(3).double()}
    wrong = [StateItem.replicated(name, tensor) for name, tensor in mismatched.items() if mesh.rank == 0]
    try:
        load(root / "x", State(fine + wrong), mesh)
        text = "no error"
    except CheckpointError as error:
        text = str(error)
    untouched = all(not tensor.any() for item in fine[:-1] for _, tensor in item.boxes)
    report = load(root / "x", State(fine), mesh, strict=False)
    assert wrong_items(State(fine[:-1])) == [] and bool((fine[-1].boxes[0][1] == 1).all())
    return text, untouched, report.missing, report.unexpected


def test_all_mismatches_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    save(tmp_path / "x", state_of("whole", 0, 1), Mesh.single())
    first, second = run_ranks(load_mismatches, 2, tmp_path)
    assert first == second
    text, untouched, missing, unexpected = first
    assert "missing from the checkpoint: model/renamed.weight" in text
    assert "optim/mask: shape (6,) here, (5,) in the checkpoint" in text
    assert "model/norm.weight: dtype float64 here, float32 in the checkpoint" in text
    assert untouched
    assert (missing, unexpected) == (("model/renamed.weight",), ("model/norm.weight", "optim/mask"))


def test_unexpected_names_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "x", state_of("whole", 0, 1), Mesh.single())
    names = [name for name in TENSORS if name != "optim/step"]
    with pytest.raises(CheckpointError, match="unexpected in the checkpoint: optim/step"):
        load(tmp_path / "x", State(whole_items(names)), Mesh.single())


def test_a_dtype_is_converted_only_on_request(tmp_path: Path) -> None:
    save(tmp_path / "x", State([StateItem.replicated("model/w", torch.tensor([0.1234567]))]), Mesh.single())
    target = torch.zeros(1, dtype=torch.bfloat16)
    state = State([StateItem.replicated("model/w", target)])
    for strict in (True, False):
        with pytest.raises(CheckpointError, match="cast=True"):
            load(tmp_path / "x", state, Mesh.single(), strict=strict)
    assert not target.any()
    assert load(tmp_path / "x", state, Mesh.single(), cast=True).cast == ("model/w",)
    assert target.item() == torch.tensor(0.1234567).bfloat16().item()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def save_two(root: Path) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    save(root / "x", state_of("rows", mesh.rank, 2), mesh)


def load_damaged(root: Path) -> str:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    state = state_of("rows", mesh.rank, 2, blank=True)
    try:
        load(root / "x", state, mesh)
    except CheckpointError as error:
        untouched = all(not tensor.any() for item in state.items for _, tensor in item.boxes)
        assert untouched or "left the state partially overwritten" in str(error)
        return str(error)
    return "no error"


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", ["rank_00000.safetensors", "rank_00001.safetensors", "trainer.json", "manifest.json"])
def test_a_damaged_file_is_named_on_all_ranks(tmp_path: Path, damage: Callable[[Path], None], name: str) -> None:
    run_ranks(save_two, 2, tmp_path)
    damage(tmp_path / "x" / name)
    first, second = run_ranks(load_damaged, 2, tmp_path)
    assert first == second
    assert name in first and "not loaded" in first
    others = {"rank_00000.safetensors", "rank_00001.safetensors", "trainer.json"} - {name}
    assert not any(other in first for other in others)


def save_experts(root: Path) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    experts = range(mesh.rank * 2, mesh.rank * 2 + 2)
    items = [
        StateItem.replicated(f"{kind}experts.{expert}.weight", torch.full((3, 5), float(expert)))
        for expert in experts
        for kind in ("model/", "optim/exp_avg/")
    ]
    save(root / "x", State(items), mesh)


def load_experts(root: Path, world: int) -> bool:
    mesh = Mesh.from_environment(MeshShape(dp=world))
    experts = range(mesh.rank * 4 // world, (mesh.rank + 1) * 4 // world)
    tensors = {
        f"{kind}experts.{expert}.weight": (torch.zeros(3, 5), float(expert))
        for expert in experts
        for kind in ("model/", "optim/exp_avg/")
    }
    load(root / "x", State([StateItem.replicated(name, tensor) for name, (tensor, _) in tensors.items()]), mesh)
    return all(bool((tensor == value).all()) for tensor, value in tensors.values())


def test_tensors_of_single_ranks_are_restored_by_global_name(tmp_path: Path) -> None:
    run_ranks(save_experts, 2, tmp_path)
    for world in (1, 2, 4):
        assert run_ranks(load_experts, world, tmp_path, world) == [True] * world


def peak_of_a_load(root: Path, dim: int) -> int:
    """Peak growth in bytes of this rank's memory while it loads a quarter of a 32 MB checkpoint of one file."""
    mesh = Mesh.from_environment(MeshShape(tp=4))
    offset, size = [0, 0], [1024, 1024]
    offset[dim], size[dim] = 256 * mesh.rank, 256
    box = Box(tuple(offset), tuple(size))
    state = State([StateItem(f"model/w{n}", (1024, 1024), ((box, torch.zeros(size)),)) for n in range(8)])
    load(root / "x", state, mesh)  # imports and connections of the first use do not count
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    load(root / "x", state, mesh)
    assert all(bool((item.boxes[0][1] == 1).all()) for item in state.items)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """A figure of this process in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status[field].split()[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_load_needs_memory_for_its_own_tensors_and_one_more(tmp_path: Path, dim: int) -> None:
    whole = [StateItem.replicated(f"model/w{n}", torch.ones(1024, 1024)) for n in range(8)]
    save(tmp_path / "x", State(whole), Mesh.single())
    growth = run_ranks(peak_of_a_load, 4, tmp_path, dim)
    assert max(growth) < 6 << 20, growth  # one whole tensor is 4 MiB
