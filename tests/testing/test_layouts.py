"""The layouts that verify compares: every valid one, and one rank as the reference."""

from __future__ import annotations

import itertools

import pytest

from megastack.config.convert import replace_values
from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.pipeline.schedules.registry import schedule_names
from megastack.testing.layouts import (
    in_double,
    layout_overrides,
    layout_text,
    reference_of,
    valid_layouts,
    with_sgd,
)
from megastack.testing.training import composed


def identity(config: TrainConfig) -> tuple[object, ...]:
    grid, schedule = config.parallel, config.schedule
    shape = mesh_shape(config)
    split = grid.sequence_parallel and grid.tp > 1
    name = schedule.name if grid.pp * schedule.chunks > 1 else "one stage"
    return (shape.dp, grid.cp, grid.tp, grid.pp, split, name, schedule.chunks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_every_valid_layout_is_listed_exactly_once(ranks: int) -> None:
    config = composed("experiment=parity", "model.layers=3", "batch.global_size=12")
    found = [identity(layout) for layout in valid_layouts(config, ranks)]
    sizes = range(1, ranks + 1)
    expected = set()
    for dp, tp, pp, chunks in itertools.product(sizes, sizes, sizes, range(1, 4)):
        for split, name in itertools.product((True, False), set(schedule_names()) - {"custom"}):
            values = {"dp": dp, "tp": tp, "pp": pp, "sequence_parallel": split}
            keys = {f"parallel.{key}": value for key, value in values.items()}
            tried = replace_values(config, keys | {"schedule.name": name, "schedule.chunks": chunks})
            if dp * tp * pp == ranks and not violations(tried):
                expected.add(identity(tried))
    assert set(found) >= expected
    assert len(found) == len(set(found))
    assert all(not violations(layout) for layout in valid_layouts(config, ranks))


def test_the_reference_is_one_rank_of_the_same_training() -> None:
    config = composed("experiment=parity", "parallel.tp=2", "parallel.pp=2", "schedule=interleaved")
    alone = reference_of(config)
    assert mesh_shape(alone).world_size == 1
    assert (alone.model, alone.batch, alone.optim, alone.seed) == (
        config.model,
        config.batch,
        config.optim,
        config.seed,
    )
    assert not violations(alone)


def test_verification_runs_in_fp64_on_cpus() -> None:
    config = in_double(composed("precision.compute=fp32", "device=cuda", "precision.reduce=fp32"))
    assert (config.precision.compute, config.precision.reduce, config.device) == ("fp64", None, "cpu")


def test_sgd_runs_without_clipping() -> None:
    config = with_sgd(composed("optim=adamw", "optim.clip_norm=1.0"))
    assert (config.optim.name, config.optim.clip_norm) == ("sgd", None)


def test_the_printed_overrides_compose_the_same_layout() -> None:
    config = composed("experiment=parity", "parallel.tp=2", "parallel.pp=2", "schedule=interleaved")
    assert layout_text(config) == "tp2 × pp2, sequence parallel, interleaved of 2 chunks"
    assert identity(composed("experiment=parity", layout_overrides(config))) == identity(config)


def test_zero_options_are_printed_and_compose_the_same_layout() -> None:
    config = composed("experiment=parity", "parallel.dp=4", "parallel.zero.stage=3", "parallel.zero.shard_size=2")
    assert layout_text(config) == "dp4, ZeRO 3 of 2 ranks"
    again = composed("experiment=parity", layout_overrides(config))
    assert again.parallel.zero == config.parallel.zero
