"""The layout does not change training in fp64: initial weights, loss, gradients, norm and updated weights match one
rank."""

from __future__ import annotations

from functools import cache

import pytest

from megastack.testing.compare import Trace
from megastack.testing.training import layout_differences, trace_layout
from tests.parity.cases import configured, dataset, layout_of, model_of, rows
from tests.parity.cover import Row, covering, pairs_of

STEPS = 2
ROWS = covering(rows())


@cache
def reference(model: tuple[tuple[str, object], ...]) -> Trace:
    return trace_layout(configured(dict(model)), STEPS, dataset=dataset())


def name(row: Row) -> str:
    return "-".join(f"{key[:2]}:{value}" if key != "layout" else value for key, value in row.items())


def check(row: Row) -> None:
    model = model_of(row)
    expected = reference(tuple(model.items()))
    found = layout_differences(expected, configured(model, layout_of(row)), STEPS, dataset=dataset())
    assert not found, "\n".join(map(str, found[:20]))
    assert len(expected.gradients) == len(expected.weights) == STEPS


def test_every_pair_of_choices_is_covered() -> None:
    every = set().union(*map(pairs_of, rows()))
    assert set().union(*map(pairs_of, ROWS)) == every


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_training_matches_one_rank(row: Row) -> None:
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in rows() if row not in ROWS], ids=name)
def test_training_matches_one_rank_for_every_combination(row: Row) -> None:
    check(row)
