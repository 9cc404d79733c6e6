"""Data phases: the samples that are drawn in each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megastack.data.dataset import DataPhase, Dataset, DatasetSpec, build_dataset
from megastack.data.phases import initial_histories, phase_orders
from tests.data.token_cases import write_by_hand


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for name in "abc":
        write_by_hand(tmp_path / name, rng.integers(0, 256, (60, 9)).tolist(), 8)
    return tmp_path


def cut(folder: Path, weights: str, length: int = 4) -> Dataset:
    """Token files by name, one alone or several with a digit as weight: `a`, `a1b3`."""
    pairs = list(zip(weights[::2], weights[1::2], strict=True)) if len(weights) > 1 else []
    blend = [DatasetSpec("bin", [folder / name], float(weight)) for name, weight in pairs]
    paths = [] if blend else [folder / weights]
    return build_dataset(source="bin", paths=paths, blend=blend, sequence_length=length, vocab=256)


def consumed(data: Dataset, size: int, steps: int) -> list[tuple[int, np.ndarray]]:
    """The phase and the first tokens of the samples of each step."""
    orders = phase_orders(data, 3, initial_histories(data, size), size)
    found = []
    for step in range(steps):
        at = sum(phase.from_step <= step for phase in data.phases) - 1
        numbers = orders[at].many(step * size + np.arange(size, dtype=np.int64))
        found.append((at, data.phases[at].data.train.samples.rows(numbers).tokens_BS[:, :4]))
    return found


def distinct(rows: list[np.ndarray]) -> int:
    return len({tuple(row) for row in np.concatenate(rows).tolist()})


@pytest.mark.parametrize(
    ("phases", "together"),
    [
        (["a", "b", "a"], [(0, 2), (1,)]),
        (["a1b1", "a1b3", "a", "b"], [(0, 1, 2, 3)]),
        (["a", "a1b2c1", "c"], [(0, 1, 2)]),
        (["a", "a1b0", "b"], [(0, 1), (2,)]),
    ],
    ids=["there_and_back", "weights", "alone_and_in_a_blend", "weight_0"],
)
def test_a_source_continues_where_an_earlier_phase_left_it(
    phases: list[str], together: list[tuple[int, ...]], folder: Path
) -> None:
    first, *later = (cut(folder, weights) for weights in phases)
    data = replace(first, later_phases=tuple(DataPhase(3 * at, each) for at, each in enumerate(later, 1)))
    found = consumed(data, 8, 3 * len(phases))
    for group in together:
        rows = [tokens for at, tokens in found if at in group]
        assert distinct(rows) == 8 * len(rows)


def test_each_phase_draws_its_samples_without_repeats_or_gaps(folder: Path) -> None:
    """A phase of another length starts at its own first entry, at any step; an epoch has every sample."""
    first, second = cut(folder, "a"), cut(folder, "a", 7)
    data = replace(first, later_phases=(DataPhase(5, second),))
    samples = second.train.samples
    epoch = len(samples)
    (order,) = phase_orders(data, 3, initial_histories(data, 8), 8)[1:]
    assert sorted(order.many(40 + np.arange(epoch))) == list(range(epoch))
    alone = phase_orders(second, 3, initial_histories(second, 8), 8)[0]
    assert np.array_equal(order.many(40 + np.arange(3 * epoch)), alone.many(np.arange(3 * epoch)))
