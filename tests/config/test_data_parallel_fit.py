"""The largest valid data-parallel degree for a number of ranks, by the same rules as every configuration."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastack.config.compose import compose
from megastack.config.convert import replace_values
from megastack.config.rules import fit_data_parallel, violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError


@pytest.fixture(scope="module")
def base() -> TrainConfig:
    """A valid elastic configuration with a global batch of 24."""
    elastic = ("launch.elastic=true", "resume=auto", "run.dir=here", "batch.global_size=24", "batch.micro_size=1")
    return compose(["experiment=parity", "model.layers=8", "model.heads=8", "model.kv_groups=8", *elastic])


CASES: list[tuple[dict[str, Any], int, int]] = [
    ({}, 1, 1),
    ({}, 8, 8),
    ({}, 7, 6),  # 24 has no divisor 7
    ({}, 5, 4),
    ({}, 23, 12),
    ({}, 100, 24),
    ({"parallel.dp": 8}, 100, 8),  # the configured degree is the upper limit
    ({"parallel.dp": 8}, 7, 6),
    ({"parallel.dp": 5}, 100, 4),
    ({"batch.micro_size": 2}, 8, 6),
    ({"batch.micro_size": 8}, 8, 3),
    ({"parallel.tp": 2}, 8, 4),
    ({"parallel.tp": 2}, 7, 3),
    ({"parallel.tp": 2}, 3, 1),
    ({"parallel.pp": 4}, 8, 2),
    ({"parallel.pp": 4}, 15, 3),
    ({"parallel.tp": 2, "parallel.pp": 2}, 11, 2),
    ({"parallel.tp": 2, "parallel.pp": 2}, 16, 4),
    ({"parallel.zero.stage": 1, "parallel.zero.shard_size": 2}, 7, 6),
    ({"parallel.zero.stage": 1, "parallel.zero.shard_size": 4}, 7, 4),
    ({"parallel.zero.stage": 1, "parallel.zero.shard_size": 3}, 8, 6),
    ({"parallel.zero.stage": 3, "parallel.zero.shard_size": 3}, 5, 3),
    ({"parallel.tp": 4, "cluster.ranks_per_node": 4}, 8, 2),
    ({"parallel.pp": 2, "schedule.name": "interleaved", "schedule.chunks": 2}, 9, 4),
]


@pytest.mark.parametrize(("values", "ranks", "dp"), CASES)
def test_the_largest_valid_degree_is_used(base: TrainConfig, values: dict[str, Any], ranks: int, dp: int) -> None:
    fitted = fit_data_parallel(replace_values(base, values), ranks)
    assert fitted.parallel.dp == dp
    assert replace_values(fitted, {"parallel.dp": None}) == replace_values(base, values | {"parallel.dp": None})


@given(
    ranks=st.integers(1, 40),
    most=st.none() | st.integers(1, 12),
    tp=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2, 3]),
    shard=st.none() | st.integers(1, 4),
)
def test_no_larger_degree_is_valid(
    base: TrainConfig, ranks: int, most: int | None, tp: int, micro: int, shard: int | None
) -> None:
    zero = {"parallel.zero.stage": 0 if shard is None else 1, "parallel.zero.shard_size": shard}
    config = replace_values(base, {"parallel.dp": most, "parallel.tp": tp, "batch.micro_size": micro} | zero)

    def valid(dp: int) -> bool:
        return not violations(replace_values(config, {"parallel.dp": dp}), dp * tp)

    fitting = [dp for dp in range(1, ranks // tp + 1) if dp <= (most or ranks) and valid(dp)]
    if fitting:
        assert fit_data_parallel(config, ranks).parallel.dp == fitting[-1]
    else:
        with pytest.raises(ConfigError):
            fit_data_parallel(config, ranks)


def error_of(config: TrainConfig, ranks: int) -> str:
    with pytest.raises(ConfigError) as caught:
        fit_data_parallel(config, ranks)
    return str(caught.value)


def test_too_few_ranks_are_an_error_with_the_numbers(base: TrainConfig) -> None:
    config = replace_values(base, {"parallel.tp": 4, "parallel.pp": 2})
    assert error_of(config, 7) == (
        "launch.elastic=true: the 7 ranks of this start cannot hold pp·cp·tp = 8; use 8 ranks or more or other degrees"
    )


def test_violations_of_every_degree_are_reported_once(base: TrainConfig) -> None:
    config = replace_values(base, {"lr.warmup_steps": 10**6})
    [line] = error_of(config, 4).splitlines()
    assert line.startswith("lr.warmup_steps=1000000: must not be longer than run.steps")
    [line] = error_of(replace_values(base, {"parallel.tp": 0}), 4).splitlines()
    assert line.startswith("parallel.tp=0: must be at least 1")


def test_without_a_valid_degree_the_error_lists_some_reasons(base: TrainConfig) -> None:
    config = replace_values(base, {"parallel.zero.stage": 1, "parallel.zero.shard_size": 4})
    [line] = error_of(config, 3).splitlines()
    assert line.startswith(
        "launch.elastic=true: no dp from 1 to 3 is legal on 3 ranks (dp=3: parallel.zero.shard_size=4"
    )
    assert "dp=1: parallel.zero.shard_size=4 must divide dp·cp = 1" in line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"resume": None},
            "launch.elastic=true: a restart must continue from the newest checkpoint, which resume=null does not do; "
            "use resume=auto with run.dir=FOLDER or false",
        ),
        ({"run.dir": None}, "resume=auto: needs the folder to continue in; use run.dir=FOLDER"),
        (
            {"cluster.nodes": 2},
            "cluster.nodes=2: launch.elastic=true does not fix the number of machines; "
            "use 1 or cluster.ranks_per_node=RANKS",
        ),
    ],
)
def test_an_elastic_job_requires_a_folder_and_one_node(base: TrainConfig, values: dict[str, Any], line: str) -> None:
    assert [str(found) for found in violations(replace_values(base, values), 2)] == [line]


def test_load_weights_is_valid_with_resume_auto(base: TrainConfig) -> None:
    assert not violations(replace_values(base, {"checkpoint.load_weights": "there"}))
