"""From any layout to any other: weights, moments and main parameters are bitwise identical by global name."""

from pathlib import Path

import pytest

from megastack.checkpoint.load import load
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.mesh.mesh import Mesh
from megastack.testing.ranks import run_ranks
from tests.checkpoint.layouts import LAYOUTS, ZERO_KINDS, bits, global_tensor, parameters, state_of, wrong_names

NAMES = sorted(
    f"{kind}/{name}" for kind in ("model", *(f"optim/{kind}" for kind in ZERO_KINDS)) for name in parameters(1)
)


def save_layout(path: Path, number: int, asynchronous: bool) -> None:
    layout = LAYOUTS[number]
    mesh = Mesh.from_environment(layout.shape)
    save(path, state_of(layout, mesh.rank), mesh, asynchronous=asynchronous).wait()


def load_layouts(root: Path, number: int, sources: list[int]) -> list[str]:
    layout = LAYOUTS[number]
    mesh = Mesh.from_environment(layout.shape)
    wrong = []
    for source in sources:
        state = state_of(layout, mesh.rank, blank=True)
        report = load(root / str(source), state, mesh)
        assert list(report.loaded) == NAMES
        wrong += [f"{LAYOUTS[source]} -> {layout}: {name}" for name in wrong_names(state)]
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every layout, half of them written asynchronously."""
    root = tmp_path_factory.mktemp("layouts")
    for number, layout in enumerate(LAYOUTS):
        run_ranks(save_layout, layout.shape.world_size, root / str(number), number, bool(number % 2))
    return root


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[str(layout) for layout in LAYOUTS])
def test_some_pairs_of_layouts(saved: Path, number: int) -> None:
    """Each layout loads its own checkpoint and three others, so that each checkpoint is loaded by four layouts."""
    sources = [(number + step) % len(LAYOUTS) for step in (0, 1, 3, 6)]
    world = LAYOUTS[number].shape.world_size
    assert run_ranks(load_layouts, world, saved, number, sources) == [[]] * world


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[str(layout) for layout in LAYOUTS])
def test_all_pairs_of_layouts(saved: Path, number: int) -> None:
    world = LAYOUTS[number].shape.world_size
    assert run_ranks(load_layouts, world, saved, number, list(range(len(LAYOUTS)))) == [[]] * world


def test_all_checkpoints_hold_the_same_tensors(saved: Path) -> None:
    for number in range(len(LAYOUTS)):
        reader = CheckpointReader(saved / str(number))
        reader.verify()
        assert list(reader.names) == NAMES
        for name in NAMES:
            assert (bits(reader.read(name)) == bits(global_tensor(name))).all(), (LAYOUTS[number], name)


def test_the_layouts_have_empty_ranks_and_uneven_slices() -> None:
    """Ranks without any optimizer state, slices that start inside a row, several boxes of a tensor on one rank."""
    items = {str(y): [i for r in range(y.shape.world_size) for i in state_of(y, r).items] for y in LAYOUTS}
    ranks = {str(y): [state_of(y, r) for r in range(y.shape.world_size)] for y in LAYOUTS}
    empty = [s for states in ranks.values() for s in states if not any(i.boxes for i in s.items if "optim" in i.name)]
    assert empty
    assert any(len(item.boxes) > 2 for found in items.values() for item in found)
    assert any(item.boxes and item.boxes[0][0].offset[-1] for item in items["pp1dp3tp1-flat"])
