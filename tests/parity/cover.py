"""A pairwise cover: few rows of a table of choices in which every pair of choices of two columns still occurs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def all_rows(choices: Mapping[str, Sequence[str]]) -> list[Row]:
    """The whole product."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def pairs_of(row: Row) -> set[Pair]:
    """Every pair of choices that a row holds."""
    return set(itertools.combinations(sorted(row.items()), 2))


def pairwise(choices: Mapping[str, Sequence[str]]) -> list[Row]:
    """Rows chosen greedily until every pair occurs; the same list each time."""
    rows = all_rows(choices)
    missing = set().union(*map(pairs_of, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
