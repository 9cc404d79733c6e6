"""Sizes that layers can be split over, against what the layers themselves accept."""

from __future__ import annotations

import pytest

from megastack.layers.rules import SplitSizes, divisors, head_violations, padded_vocab, split_violations

SIZES = {"heads": 16, "kv_groups": 4, "ffn": 192, "vocab": 256}


def test_every_group_count_that_divides_or_is_divided_is_legal() -> None:
    legal = {
        (groups, tp): SplitSizes(**SIZES | {"kv_groups": groups}).fits(tp)
        for groups in divisors(16)
        for tp in range(1, 17)
    }
    expected = {(g, t): 16 % t == 0 and (g % t == 0 or t % g == 0) for g, t in legal}
    assert legal == expected


@pytest.mark.parametrize(
    ("sizes", "tp", "message"),
    [
        ({"heads": 6, "kv_groups": 6}, 4, "tp=4: must divide heads=6; use 1 or 2"),
        ({"ffn": 30}, 4, "tp=4: must divide ffn=30; use 1 or 2"),
        ({"heads": 12, "kv_groups": 4}, 6, "tp=6: must divide kv_groups=4 or be a multiple of it; use 1, 2 or 4"),
        (
            {"vocab": 5, "vocab_multiple": 10, "ffn": 30, "heads": 30, "kv_groups": 30},
            3,
            "tp=3: must divide vocab=5 padded to 10 by vocab_multiple; use 1, 2, 5 or 10",
        ),
        ({"sequence": 9}, 2, "tp=2: must divide sequence=9 with sequence_parallel=true; use 1"),
    ],
)
def test_each_rule_names_the_sizes_and_the_degrees_that_would_do(sizes: dict[str, int], tp: int, message: str) -> None:
    assert message in [str(violation) for violation in split_violations(SplitSizes(**SIZES | sizes), tp)]


def test_the_degrees_offered_are_all_legal() -> None:
    sizes = SplitSizes(heads=12, kv_groups=4, ffn=36, vocab=256)
    assert sizes.degrees() == [1, 2, 4]
    assert all(not split_violations(sizes, tp) for tp in sizes.degrees())


def test_names_are_the_callers() -> None:
    [violation] = split_violations(SplitSizes(**SIZES | {"ffn": 30}), 4, lambda name: f"model.{name}")
    assert str(violation) == "model.tp=4: must divide model.ffn=30; use 1 or 2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((16, 4, 3, None), "kv_groups=3: must divide heads=4; use 1, 2 or 4"),
        ((18, 4, None, None), "heads=4: must divide hidden=18 where head_dim is null; use 1, 2, 3, 6, 9 or 18"),
        (
            (12, 4, None, None),
            "head_dim=null: rotary positions pair components, so the width of a head (3) must be even; use 4",
        ),
    ],
)
def test_heads_that_do_not_go_together(given: tuple[int, int, int | None, int | None], message: str) -> None:
    assert [str(violation) for violation in head_violations(*given, rotary=True)] == [message]


def test_heads_that_go_together() -> None:
    assert head_violations(16, 4, 2, None, rotary=True) == []
    assert head_violations(18, 4, None, 8, rotary=True) == []
    assert head_violations(12, 4, None, None, rotary=False) == []


def test_padding_depends_on_the_multiple_only() -> None:
    assert [padded_vocab(vocab, 128) for vocab in (1, 128, 129, 50257)] == [128, 128, 256, 50304]
