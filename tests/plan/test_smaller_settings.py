"""Proposals of settings that need less memory."""

from __future__ import annotations

import pytest

from megastack import compose, violations
from megastack.plan.layout import PROPOSED, smaller_settings

TINY = [
    *("run.steps=2", "batch.global_size=16", "batch.sequence_length=16", "model.layers=4", "model.heads=4"),
    *("model.hidden=32", "model.ffn=64", "model.vocab=256", "loss.chunked=false"),
]
CASES = {
    (): 1,
    ("batch.micro_size=4", "parallel.dp=2"): 2,
    ("parallel.dp=2", "parallel.pp=2", "batch.micro_size=2"): 4,
    ("parallel.dp=4", "parallel.zero.stage=3", "recompute.mode=full"): 4,
    ("parallel.tp=4", "parallel.dp=2", "recompute.mode=selective"): 8,
}


@pytest.mark.parametrize(("more", "ranks"), CASES.items())
def test_every_proposal_is_a_valid_change_on_the_same_ranks(more: tuple[str, ...], ranks: int) -> None:
    found = smaller_settings(compose([*TINY, *more]), ranks)
    assert 0 < len(found) <= PROPOSED
    for proposal in found:
        assert not violations(compose([*TINY, *more, *proposal.split()]), ranks), proposal


def test_cheap_changes_come_first() -> None:
    found = smaller_settings(compose([*TINY, "batch.micro_size=4", "parallel.dp=2"]), 2)
    assert found.index("batch.micro_size=2") < found.index("recompute.mode=selective")
    assert "parallel.zero.stage=1" in found


def test_nothing_is_proposed_that_is_already_set() -> None:
    found = smaller_settings(compose([*TINY, "recompute.mode=full", "batch.micro_size=1"]), 1)
    assert not any(proposal.startswith(("recompute", "batch")) for proposal in found)
