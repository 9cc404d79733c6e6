"""Differences reported between the configuration of a checkpoint and that of the resuming run."""

from __future__ import annotations

import json

import pytest

import megastack
from megastack.config.convert import to_plain
from megastack.config.fields import keys
from megastack.config.schema import TrainConfig
from megastack.preflight.checkpoint import WITH_EFFECT, WITHOUT_EFFECT, changes

TINY = [
    *("run.steps=10", "batch.global_size=4", "batch.sequence_length=8", "model.layers=2", "model.heads=4"),
    *("model.hidden=16", "model.ffn=32", "model.vocab=256"),
]


def reported(before: list[str], after: list[str]) -> list[str]:
    """The changes from one configuration to another, the first as a checkpoint holds it."""
    old = json.loads(json.dumps(to_plain(megastack.compose([*TINY, *before]))))
    return [str(change) for change in changes(old, megastack.compose([*TINY, *after]))]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ([], ["model.rope.theta=5e5"], ["model.rope.theta: 10000.0 -> 500000.0"]),
        ([], ["model.norm_eps=1e-6", "optim.lr=0.5"], ["model.norm_eps: 1e-05 -> 1e-06", "optim.lr: 0.0003 -> 0.5"]),
        ([], ["optim.betas=[0.9,0.99]"], ["optim.betas: [0.9, 0.95] -> [0.9, 0.99]"]),
        (
            [],
            ["optim.clip_norm=null", "loss.z_loss=1e-4"],
            ["loss.z_loss: 0.0 -> 0.0001", "optim.clip_norm: 1.0 -> null"],
        ),
        ([], ["run.on_nonfinite=skip"], ["run.on_nonfinite: stop -> skip"]),
        (["lr.schedule=cosine"], ["lr.schedule=cosine", "run.steps=77"], ["lr.total_steps: 10 -> 77"]),
        (["lr.schedule=cosine"], ["lr.schedule=cosine", "lr.total_steps=10", "run.steps=5"], []),
        (["lr.schedule=constant"], ["lr.schedule=constant", "run.steps=77", "lr.floor=0.5"], []),
        (["model.kv_groups=null"], ["model.kv_groups=2"], ["model.kv_groups: 4 -> 2"]),
        (["model.kv_groups=null"], ["model.kv_groups=4"], []),
        ([], ["model.mlp={_target_: my.Own, width: 3}"], ["model.mlp: null -> {_target_: my.Own, width: 3}"]),
        ([], ["parallel.dp=2", "schedule.name=gpipe", "batch.micro_size=2", "recompute.mode=full"], []),
        ([], ["run.name=other", "run.dir=x", "checkpoint.every=3", "launch.timeout_s=5", "device=cpu"], []),
        (["data.blend=[{paths:[a],weight:1}]"], ["data.blend=[{paths:[b],weight:1}]"], []),
    ],
)
def test_changes_that_affect_the_computed_values_are_reported(
    before: list[str], after: list[str], lines: list[str]
) -> None:
    assert reported(before, after) == lines


def test_keys_missing_from_an_older_checkpoint_have_their_defaults() -> None:
    old = to_plain(megastack.compose(TINY))
    del old["model"]["rope"], old["optim"]["eps"]
    assert changes(old, megastack.compose(TINY)) == []
    assert [change.key for change in changes(old, megastack.compose([*TINY, "optim.eps=1e-6"]))] == ["optim.eps"]


def test_a_new_key_is_compared_by_default() -> None:
    """A key that is added to the schema is compared unless it or its section is listed here."""
    names = {key.name for key in keys(TrainConfig)}
    assert {*WITHOUT_EFFECT, *WITH_EFFECT} <= names
    compared = {name.partition(".")[0] for name in names} - set(WITHOUT_EFFECT)
    assert compared == {"seed", "batch", "model", "loss", "optim", "lr", "precision", "data"}
