"""Layout does not change the mathematics: loss, every gradient, the norm and the weights, against one rank, in fp64."""

from __future__ import annotations

from functools import cache

import pytest

from megastack.testing.compare import Trace
from megastack.testing.training import composed, layout_differences, trace_layout
from tests.parity.cover import Row, all_rows, pairs_of, pairwise
from tests.parity.layouts import CHOICES, layout_overrides, model_overrides

STEPS = 3
ROWS = pairwise(CHOICES)


@cache
def reference(overrides: tuple[str, ...]) -> Trace:
    return trace_layout(composed(overrides), STEPS)


def name(row: Row) -> str:
    return "-".join(f"{key[:2]}:{value}" if key != "layout" else value for key, value in row.items())


def check(row: Row, text: str) -> None:
    model = model_overrides(row, text)
    config = composed(model, layout_overrides(row))
    found = layout_differences(reference(tuple(model)), config, STEPS)
    assert not found, "\n".join(map(str, found[:20]))


def test_every_pair_of_choices_is_covered() -> None:
    every = set().union(*map(pairs_of, all_rows(CHOICES)))
    assert set().union(*map(pairs_of, ROWS)) == every


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_training_equals_one_rank(row: Row, text: str) -> None:
    check(row, text)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in all_rows(CHOICES) if row not in ROWS], ids=name)
def test_training_equals_one_rank_in_every_cell(row: Row, text: str) -> None:
    check(row, text)
