"""What the rules accept is what runs: every accepted layout trains a step as one rank does, every refused one fails to
be built or to run when the rules are passed by."""

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
    judged,
    outcomes,
    reference_of,
    work_of,
)
from tests.parity.cover import Row, covering, pairs_of

RANKS = range(1, MOST_RANKS + 1)
QUICK = (1, 2, 3, 4)
"""Numbers of ranks that are run where time is short; all others in the full matrix."""


def ranks_of(row: Row) -> int:
    return int(row["dp"]) * int(row["tp"]) * int(row["pp"])


def accepted(stride: int = 1) -> list[Row]:
    return [row for row, broken in judged(stride) if not broken]


@cache
def accepted_cover() -> list[Row]:
    """Accepted layouts in which every pair of choices occurs that occurs in any of the sample, cheap ones first."""
    return covering(sorted(_quick(accepted(SAMPLE)), key=work_of))


@cache
def refused_cover() -> list[Row]:
    """Refused layouts that break one rule each, in which every rule meets every choice that it ever meets alone."""
    alone = _quick(row | {"rule": broken[0]} for row, broken in judged(SAMPLE) if len(broken) == 1)
    wanted = {pair for row in alone for pair in _with_rule(row)}
    chosen = []
    for row in alone:
        if new := _with_rule(row) & wanted:
            chosen.append(row)
            wanted -= new
    return chosen


def invalid_rows() -> list[Row]:
    """Every refused layout that breaks one rule alone, and one for each set of several rules, shape and world size.

    A layout that breaks two rules fails by either of them, so a second one of the same set shows nothing new.
    """
    chosen = []
    seen = set()
    for row, broken in judged():
        key = (frozenset(broken), row["shape"], ranks_of(row))
        if len(broken) == 1 or (broken and key not in seen):
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
        assert outcome.error, f"{row} is refused, and runs: {outcome}"


def references_of(configs: Iterable[TrainConfig]) -> dict[str, Outcome]:
    wanted = {repr(alone): alone for alone in map(reference_of, configs)}
    new = [alone for key, alone in wanted.items() if key not in KNOWN]
    if new:
        KNOWN.update(zip(map(repr, new), outcomes(new), strict=True))
    return KNOWN


KNOWN: dict[str, Outcome] = {}
"""References of this session, by their configuration."""


def test_each_shape_and_each_kind_of_fault_is_among_the_layouts() -> None:
    assert {row["shape"] for row in accepted(SAMPLE)} == set(SHAPES)
    assert {ranks_of(row) for row in accepted(SAMPLE)} == set(RANKS)
    met = {rule for _, broken in judged(SAMPLE) for rule in broken}
    for words in ("heads", "kv_groups", "ffn", "vocab", "sequence_length", "model.layers", "micro_size", "one stage"):
        assert any(words in rule for rule in met), words


def test_the_cover_holds_every_pair_of_choices() -> None:
    assert set().union(*map(pairs_of, accepted_cover())) == set().union(*map(pairs_of, _quick(accepted(SAMPLE))))


@pytest.mark.parametrize("ranks", QUICK)
def test_accepted_layouts_run_as_one_rank_does(ranks: int) -> None:
    assert_runs(row for row in accepted_cover() if ranks_of(row) == ranks)


@pytest.mark.parametrize("ranks", QUICK)
def test_refused_layouts_fail_when_they_are_forced(ranks: int) -> None:
    if rows := [row for row in refused_cover() if ranks_of(row) == ranks]:
        assert_fails(rows)


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_accepted_layout_runs_as_one_rank_does(ranks: int, shape: str) -> None:
    assert_runs(row for row in accepted() if ranks_of(row) == ranks and row["shape"] == shape)


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_refused_layouts_of_every_kind_fail_when_they_are_forced(ranks: int, shape: str) -> None:
    assert_fails(row for row in invalid_rows() if ranks_of(row) == ranks and row["shape"] == shape)
