"""A run on token files, stopped and continued with other weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megastack.assemble.training import Training, build_training
from megastack.checkpoint.save import save
from megastack.data.blend import BlendOrder
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh
from megastack.testing.training import composed
from tests.data.token_cases import write_by_hand
from tests.tiny_runs import overrides


def built(folder: Path, weights: str, names: tuple[str, ...] = ("a", "b")) -> Training:
    pairs = zip(names, weights.split(), strict=True)
    blend = ",".join(f"{{paths:[{folder / name}],weight:{weight}}}" for name, weight in pairs)
    changes = [f"data.blend=[{blend}]", "data.source=builtin", "data.paths=[]"]
    return build_training(composed([*overrides(folder), *changes]), Mesh.single())


def advance(training: Training, steps: int) -> list[np.ndarray]:
    numbers = []
    for _ in range(steps):
        numbers.append(training.step.loader.sample_numbers(training.progress.step))
        training.step(training.progress.step)
        training.progress.step += 1
    return numbers


def saved(training: Training, path: Path) -> Path:
    save(path, training.state(), training.mesh).wait()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for name in "abc":
        write_by_hand(tmp_path / name, rng.integers(0, 256, (400, 40)).tolist(), 8)
    return tmp_path


def test_weights_change_at_a_resume_without_repeating_or_losing_a_sample(folder: Path) -> None:
    first = built(folder, "1 1")
    numbers = advance(first, 2)
    second = built(folder, "1 3")
    second.restore(saved(first, folder / "one"))
    numbers += advance(second, 2)
    third = built(folder, "1 0 1", ("a", "b", "c"))
    third.restore(saved(second, folder / "two"))
    assert [change.begin for change in third.blend] == [0, 2 * len(numbers[0]), 4 * len(numbers[0])]
    numbers += advance(third, 2)
    drawn = np.concatenate(numbers)
    assert len(set(drawn)) == len(drawn)
    order = third.step.loader.order
    assert isinstance(order, BlendOrder)
    sources, draws = order.draws(np.arange(len(drawn)))
    for number in range(3):
        assert draws[sources == number].tolist() == list(range((sources == number).sum())), number


def test_the_same_weights_continue_the_straight_run(folder: Path) -> None:
    straight = advance(built(folder, "1 2"), 4)
    first = built(folder, "1 2")
    advance(first, 2)
    second = built(folder, "1 2")
    second.restore(saved(first, folder / "one"))
    assert np.array_equal(straight[2:], advance(second, 2)) and len(second.blend) == 1


def test_a_source_is_not_dropped_by_leaving_it_out(folder: Path) -> None:
    path = saved(built(folder, "1 1"), folder / "one")
    with pytest.raises(CheckpointError, match=r"data\.blend: 1 of the sources .* keep them, with weight 0"):
        built(folder, "1 1", ("a", "c")).restore(path)
