"""The rules match the runtime: accepted layouts train like a single rank, rejected ones fail if forced."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest

from megastack.config.schema import TrainConfig
from tests.parity.accepted import (
    MOST_RANKS,
    SAMPLE,
    SHAPES,
    Outcome,
    config_of,
    layouts_with_rules,
    outcomes,
    reference_of,
    work_of,
)
from tests.parity.cover import Row, covering, pairs_of

RANKS = range(1, MOST_RANKS + 1)
QUICK = (1, 2, 3, 4)
"""World sizes of the quick tests; the full tests run all of them."""


def ranks_of(row: Row) -> int:
    return int(row["dp"]) * int(row["tp"]) * int(row["pp"])


def accepted(stride: int = 1) -> list[Row]:
    return [row for row, rules in layouts_with_rules(stride) if not rules]


@cache
def accepted_cover() -> list[Row]:
    """Accepted layouts that cover every pair of choices in the sample, cheap ones first."""
    return covering(sorted(_quick(accepted(SAMPLE)), key=work_of))


@cache
def rejected_cover() -> list[Row]:
    """Rejected layouts that violate one rule each and cover every pair of such a rule and a choice in the sample."""
    alone = _quick(row | {"rule": rules[0]} for row, rules in layouts_with_rules(SAMPLE) if len(rules) == 1)
    wanted = {pair for row in alone for pair in _with_rule(row)}
    chosen = []
    for row in alone:
        if new := _with_rule(row) & wanted:
            chosen.append(row)
            wanted -= new
    return chosen


def rejected_rows() -> list[Row]:
    """Every rejected layout that violates a single rule, and one for each set of several rules, shape and world size.

    A layout that violates several rules may fail because of any of them, so one per set is enough.
    """
    chosen = []
    seen = set()
    for row, rules in layouts_with_rules():
        key = (frozenset(rules), row["shape"], ranks_of(row))
        if len(rules) == 1 or (rules and key not in seen):
            chosen.append(row)
            seen.add(key)
    return chosen


def _quick(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if ranks_of(row) in QUICK]


def _with_rule(row: Row) -> set[tuple[str, str, str]]:
    return {(row["rule"], key, value) for key, value in row.items() if key != "rule"}


def assert_runs(rows: Iterable[Row]) -> None:
    configs = [config_of(row) for row in rows]
    references = references_of(configs)
    for config, outcome in zip(configs, outcomes(configs), strict=True):
        expected = references[repr(reference_of(config))]
        assert not outcome.differs(expected), f"{config.parallel} {config.schedule} {config.batch}: {outcome}"


def assert_fails(rows: Iterable[Row]) -> None:
    rows = list(rows)
    for row, outcome in zip(rows, outcomes([config_of(row) for row in rows], force=True), strict=True):
        assert outcome.error, f"{row} is rejected, but runs: {outcome}"


def references_of(configs: Iterable[TrainConfig]) -> dict[str, Outcome]:
    wanted = {repr(alone): alone for alone in map(reference_of, configs)}
    new = [alone for key, alone in wanted.items() if key not in KNOWN]
    if new:
        KNOWN.update(zip(map(repr, new), outcomes(new), strict=True))
    return KNOWN


KNOWN: dict[str, Outcome] = {}
"""Outcomes of reference configurations in this session."""


def test_the_sample_contains_every_shape_and_kind_of_error() -> None:
    assert {row["shape"] for row in accepted(SAMPLE)} == set(SHAPES)
    assert {ranks_of(row) for row in accepted(SAMPLE)} == set(RANKS)
    met = {rule for _, rules in layouts_with_rules(SAMPLE) for rule in rules}
    for words in ("heads", "kv_groups", "ffn", "vocab", "sequence_length", "model.layers", "micro_size", "one stage"):
        assert any(words in rule for rule in met), words


def test_the_cover_contains_every_pair_of_choices() -> None:
    assert set().union(*map(pairs_of, accepted_cover())) == set().union(*map(pairs_of, _quick(accepted(SAMPLE))))


@pytest.mark.parametrize("ranks", QUICK)
def test_accepted_layouts_match_one_rank(ranks: int) -> None:
    assert_runs(row for row in accepted_cover() if ranks_of(row) == ranks)


@pytest.mark.parametrize("ranks", QUICK)
def test_rejected_layouts_fail_when_forced(ranks: int) -> None:
    if rows := [row for row in rejected_cover() if ranks_of(row) == ranks]:
        assert_fails(rows)


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_accepted_layout_matches_one_rank(ranks: int, shape: str) -> None:
    assert_runs(row for row in accepted() if ranks_of(row) == ranks and row["shape"] == shape)


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_rejected_layouts_of_every_kind_fail_when_forced(ranks: int, shape: str) -> None:
    assert_fails(row for row in rejected_rows() if ranks_of(row) == ranks and row["shape"] == shape)
