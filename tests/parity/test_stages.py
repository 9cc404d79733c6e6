"""Unusual stages, compared with one rank in fp64: stages without blocks, frozen stages, tied weights on one rank, every
number of microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from megastack.assemble.training import build_training
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.mesh.mesh import Mesh
from megastack.testing.compare import TOLERANCES, Trace, differences
from megastack.testing.ranks import run_ranks
from megastack.testing.training import trace_layout
from tests.parity.cases import FAMILIES, Changes, configured, dataset

STEPS = 2
ADAM = {"optim.name": "adamw"}
TIED = {"model.tied": True}
FROZEN = {"optim.freeze": ["^embedding", r"^blocks\.0\."]}


@cache
def trace(*changes: tuple[tuple[str, Any], ...]) -> Trace:
    return trace_layout(configured(*map(dict, changes)), STEPS, dataset=dataset())


def frozen(changes: Changes) -> tuple[tuple[str, Any], ...]:
    return tuple((key, _hashable(value)) for key, value in changes.items())


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def assert_same(model: Changes, layout: Changes) -> Trace:
    expected = trace(frozen(model))
    actual = trace_layout(configured(model, layout), STEPS, dataset=dataset())
    found = differences(expected, actual, tolerance=TOLERANCES[torch.float64])
    assert not found, "\n".join(map(str, found[:20]))
    return actual


def layers(*counts: int, **degrees: int) -> Changes:
    """A pipeline with these numbers of blocks per stage."""
    pp = degrees.pop("pp", len(counts))
    chunks = len(counts) // pp
    schedule = {"schedule.name": "interleaved" if chunks > 1 else "1f1b", "schedule.chunks": chunks}
    return {
        **{f"parallel.{axis}": degree for axis, degree in degrees.items()},
        **schedule,
        "parallel.pp": pp,
        "parallel.layers_per_stage": list(counts),
    }


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (ADAM, layers(0, 4, dp=2)),
        (ADAM, layers(4, 0, tp=2)),
        (ADAM | TIED, layers(0, 2, 0, 2)),
        ({}, layers(0, 2, 0, 2, 0, 0, 0, 0, pp=4)),
        (FAMILIES["gpt2"] | TIED, layers(0, 1, 3, 0, tp=2)),
    ],
    ids=["embedding_alone_dp2", "head_alone_tp2", "empty_inside", "mostly_empty_interleaved", "both_ends_tp2"],
)
def test_stages_without_blocks(model: Changes, layout: Changes) -> None:
    assert_same(model, layout)


@pytest.mark.parametrize(
    "layout",
    [
        layers(1, 1, 1, 1, 1, 1, pp=2) | {"model.layers": 6},
        layers(2, 2, pp=1),
        layers(1, 1, 2, 0, pp=2, dp=2),
        layers(1, 1, 2, pp=1, tp=2),
    ],
    ids=["pp2x3", "pp1x2", "pp2x2_dp2", "pp1x3_tp2"],
)
def test_tied_weights_on_one_rank_or_two(layout: Changes) -> None:
    depth = {key: value for key, value in layout.items() if key == "model.layers"}
    assert_same(TIED | ADAM | depth, layout)


@pytest.mark.parametrize("layout", [layers(1, 3), layers(1, 2, 1, 0, pp=2, tp=2)], ids=["pp2", "pp2x2_tp2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_frozen_first_stage_does_not_change_and_the_others_match(layout: Changes, optimizer: str) -> None:
    actual = assert_same(FROZEN | {"optim.name": optimizer, "optim.weight_decay": 0.1}, layout)
    for name, weight in actual.weights[-1].items():
        is_frozen = name.startswith(("embedding", "blocks.0."))
        assert torch.equal(weight, actual.initial[name]) == is_frozen, name
        assert (name in actual.gradients[0]) != is_frozen, name


SPLITS = [(pp, dp, micro) for pp in (1, 2, 4) for dp, micro in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4))]


@pytest.mark.parametrize(("pp", "dp", "micro"), [split for split in SPLITS if split[0] * split[1] < 8])
def test_microbatches_do_not_change_norm_gradients_and_update(pp: int, dp: int, micro: int) -> None:
    """M from 1 to 8, including fewer microbatches than stages; plain SGD, which does not hide scale errors."""
    changes = {"parallel.pp": pp, "parallel.dp": dp, "batch.micro_size": micro, "batch.global_size": 8}
    assert_same({"optim.name": "sgd", "optim.clip_norm": 0.05}, changes)


def consumed(config: TrainConfig, data: Dataset) -> list[list[Any]]:
    """The sample numbers and tokens of this rank's microbatches in two steps."""
    training = build_training(config, Mesh.from_environment(mesh_shape(config), device="cpu"), data)
    steps = [training.step.loader.step(step) for step in (0, 3)]
    return [[(m.samples_B.tolist(), m.tokens_BS.tolist(), m.labels_BS.tolist()) for m in step] for step in steps]


@pytest.mark.parametrize(
    "layout",
    [{"parallel.dp": 4}, {"parallel.dp": 2, "parallel.tp": 2}, {"parallel.dp": 2, "parallel.pp": 4}],
    ids=["dp4", "dp2.tp2", "dp2.pp4"],
)
def test_all_layouts_read_the_same_samples_in_the_same_order(layout: Mapping[str, int]) -> None:
    config = configured(layout, {"batch.micro_size": 1})
    shape = mesh_shape(config)
    (alone,) = run_ranks(consumed, 1, configured({"batch.micro_size": 1}), dataset())
    ranks = run_ranks(consumed, shape.world_size, config, dataset())
    for step, expected in enumerate(alone):
        for rank, found in enumerate(ranks):
            own = expected[shape.coordinates(rank)["dp"] :: shape.dp]  # type: ignore[index]
            assert found[step] == own, f"rank {rank}"
        assert [sample for batch, *_ in expected for sample in batch] == list(range(24 * step, 24 * step + 8))
