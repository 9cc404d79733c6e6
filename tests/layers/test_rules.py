"""Sizes that layers can be split over, against what the layers themselves accept."""

from __future__ import annotations

import pytest

from megastack.layers.attention_spec import AttentionSpec
from megastack.layers.mlp_spec import MLPSpec
from megastack.layers.rules import split_violations
from megastack.layers.spec import divisors
from megastack.layers.vocabulary_spec import VocabularySpec

SIZES = {"heads": 16, "kv_groups": 4, "ffn": 192, "vocab": 256}


def violations(sizes: dict[str, int], tp: int) -> list[str]:
    given = {"vocab_multiple": 128, "sequence": None} | SIZES | sizes
    attention = AttentionSpec(64, given["heads"], given["kv_groups"])
    others = [MLPSpec(64, given["ffn"]), VocabularySpec(given["vocab"], 64, given["vocab_multiple"])]
    return [str(each) for each in split_violations(attention, others, tp, sequence=given["sequence"])]


def test_every_group_count_that_divides_or_is_divided_is_legal() -> None:
    legal = {(g, t): not violations({"kv_groups": g}, t) for g in divisors(16) for t in range(1, 17)}
    expected = {(g, t): 16 % t == 0 and (g % t == 0 or t % g == 0) for g, t in legal}
    assert legal == expected


@pytest.mark.parametrize(
    ("sizes", "tp", "message"),
    [
        ({"heads": 6, "kv_groups": 6}, 4, "parallel.tp=4: must divide model.heads=6; use 1 or 2"),
        ({"ffn": 30}, 4, "parallel.tp=4: must divide model.ffn=30; use 1 or 2"),
        (
            {"heads": 12, "kv_groups": 4},
            6,
            "parallel.tp=6: must divide model.kv_groups=4 or be a multiple of it; use 1, 2 or 4",
        ),
        (
            {"vocab": 5, "vocab_multiple": 10, "ffn": 30, "heads": 30, "kv_groups": 30},
            3,
            "parallel.tp=3: must divide model.vocab=5 padded to 10 by model.vocab_multiple; use 1, 2, 5 or 10",
        ),
        (
            {"sequence": 9},
            2,
            "parallel.tp=2: must divide batch.sequence_length=9 with parallel.sequence_parallel=true; use 1",
        ),
    ],
)
def test_each_rule_names_the_sizes_and_the_degrees_that_would_do(sizes: dict[str, int], tp: int, message: str) -> None:
    assert message in violations(sizes, tp)


def test_the_degrees_offered_are_all_legal() -> None:
    sizes = {"heads": 12, "kv_groups": 4, "ffn": 36}
    assert violations(sizes, 5)[0] == "parallel.tp=5: must divide model.heads=12; use 1, 2 or 4"
    assert all(not violations(sizes, tp) for tp in (1, 2, 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((16, 4, 3, None), "model.kv_groups=3: must divide model.heads=4; use 1, 2 or 4"),
        (
            (18, 4, None, None),
            "model.heads=4: must divide model.hidden=18 where model.head_dim is null; use 1, 2, 3, 6, 9 or 18",
        ),
        (
            (12, 4, None, None),
            "model.head_dim=null: rotary positions pair components, so the width of a head (3) must be even; use 4",
        ),
    ],
)
def test_heads_that_do_not_go_together(given: tuple[int, int, int | None, int | None], message: str) -> None:
    assert [str(violation) for violation in AttentionSpec(*given, rotary=True).size_violations()] == [message]


def test_heads_that_go_together() -> None:
    assert AttentionSpec(16, 4, 2, rotary=True).size_violations() == []
    assert AttentionSpec(18, 4, head_dim=8, rotary=True).size_violations() == []
    assert AttentionSpec(12, 4).size_violations() == []


def test_padding_depends_on_the_multiple_only() -> None:
    padded = [VocabularySpec(vocab, 1, 128).padded for vocab in (1, 128, 129, 50257)]
    assert padded == [128, 128, 256, 50304]
