"""Each rule with an invalid value, its message and the valid values it suggests; valid configurations pass."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.config.convert import INVALID, replace_values, to_plain
from megastack.config.data_schema import BlendSource, DataPhaseOptions
from megastack.config.fields import keys, without_null
from megastack.config.layout_rules import LAYOUT_RULES, Degrees, degrees_fit_world
from megastack.config.phases import PHASE_RULES
from megastack.config.rules import WORKS, not_available, out_of_range, violations
from megastack.config.schema import OptimGroupOptions, RopeOptions, TrainConfig
from megastack.config.value_rules import VALUE_RULES
from megastack.errors import Violation
from tests.config.config_cases import BIN_37, LEARNED, LLAMA3, a_config
from tests.config.invalid_layouts import LAYOUTS
from tests.config.invalid_phases import PHASES
from tests.config.invalid_values import VALUES

INVALID_CASES = [*LAYOUTS, *VALUES, *PHASES]


@pytest.mark.parametrize(
    ("values", "world_size", "line"), INVALID_CASES, ids=[line.partition(":")[0] for *_, line in INVALID_CASES]
)
def test_a_violation_suggests_valid_values(values: dict[str, Any], world_size: int | None, line: str) -> None:
    found = violations(replace_values(a_config(), values), world_size)
    assert line in [str(violation) for violation in found]


def rules_violated(config: TrainConfig, world_size: int | None) -> set[str]:
    degrees = Degrees(config, world_size)
    violated = {rule.__name__ for rule in LAYOUT_RULES if list(rule(config, degrees))}
    return violated | {rule.__name__ for rule in (not_available, *VALUE_RULES, *PHASE_RULES) if list(rule(config))}


def test_the_invalid_cases_violate_every_rule() -> None:
    invalid = [(replace_values(a_config(), values), world) for values, world, _ in INVALID_CASES]
    in_range = [(config, world) for config, world in invalid if not any(True for _ in out_of_range(config))]
    violated = set().union(*(rules_violated(config, world) for config, world in in_range))
    assert violated == {rule.__name__ for rule in (not_available, *LAYOUT_RULES, *VALUE_RULES, *PHASE_RULES)}


VALID: list[tuple[dict[str, Any], int | None]] = [
    ({}, None),
    ({}, 4),
    ({"parallel.tp": 4, "model.kv_groups": 2}, None),
    ({"parallel.tp": 4, "model.kv_groups": 1}, 4),
    ({"parallel.pp": 4, "parallel.layers_per_stage": [0, 1, 1, 0]}, None),
    ({"batch.sequence_length": 9, "parallel.tp": 2, "parallel.sequence_parallel": False}, None),
    ({"batch.sequence_length": 9}, None),
    ({"parallel.tp": 4, "cluster.nodes": 2, "parallel.allow_tp_across_nodes": True}, 4),
    ({"parallel.tp": 2, "cluster.nodes": 2}, 4),
    ({"schedule.name": "interleaved", "schedule.chunks": 1}, None),
    ({"schedule.name": "interleaved", "schedule.chunks": 2}, None),
    ({"schedule.name": "gpipe", "parallel.pp": 2}, None),
    (LEARNED | {"model.max_positions": 8}, None),
    (LLAMA3 | {"model.rope.original_max_positions": 4096}, None),
    ({"model.mlp": {"_target_": "my.file.MyMLP", "width": 3}}, None),
    ({"lr.warmup_steps": 3}, None),
    ({"lr.schedule": "wsd", "lr.decay_steps": 2, "lr.warmup_steps": 1}, None),
    ({"precision.compute": "fp64", "precision.reduce": "fp64"}, None),
    ({"model.vocab": 37, "data.tokenizer": "tokenizer.json", "data.source": "text", "data.paths": ["a.txt"]}, None),
    ({"model.vocab": 37, "data.source": "bin", "data.paths": ["a"]}, None),
    ({"model.vocab": 37, "data.blend": [BlendSource(paths=["a"], weight=1.0)]}, None),
    (
        {
            "data.phases": [
                DataPhaseOptions(from_step=1, sequence_length=9),
                DataPhaseOptions(from_step=2, sequence_length=8),
            ]
        },
        None,
    ),
    (BIN_37 | {"data.phases": [DataPhaseOptions(from_step=2, paths=["b"])]}, None),
    (LEARNED | {"model.max_positions": 16, "data.phases": [DataPhaseOptions(from_step=1, sequence_length=16)]}, None),
    ({"resume": "auto", "run.dir": "here"}, None),
    ({"resume": "last"}, None),
    ({"optim.freeze": [r"^blocks\.0\."], "optim.groups": [OptimGroupOptions(pattern="mlp", lr_scale=0.0)]}, None),
    ({"observe.dump_steps": [1, 3]}, None),
]


@pytest.mark.parametrize(("values", "world_size"), VALID)
def test_valid_configurations_pass(values: dict[str, Any], world_size: int | None) -> None:
    config = replace_values(a_config(), values)
    assert violations(config, world_size) == []


def _another_value(key: str) -> Any:
    kind, _ = without_null({known.name: known.type for known in keys(TrainConfig)}[key])
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return next(choice for choice in kind if choice not in WORKS[key])
    return {bool: True, int: 2, float: 2.0, str: "x"}.get(kind, ["1"] if kind == list[str] else [1])


@pytest.mark.parametrize("key", WORKS)
def test_a_feature_that_is_not_available_is_an_error(key: str) -> None:
    found = violations(replace_values(a_config(), {key: _another_value(key)}))
    [error] = [violation for violation in found if violation.rule == "not available yet"]
    assert (error.key, error.legal) == (key, WORKS[key])


def test_a_value_that_is_not_available_is_one_error() -> None:
    config = replace_values(a_config(), {"parallel.ep": 3, "parallel.dp": 4, "batch.global_size": 4})
    assert [str(found) for found in violations(config)] == ["parallel.ep=3: not available yet; use 1"]
    [later] = degrees_fit_world(config, Degrees(config, None))
    assert str(later) == "parallel.ep=3: must divide dp·cp = 4; use 1, 2 or 4"


def test_defaults_are_available() -> None:
    by_name = {key.name: to_plain(key.default) for key in keys(TrainConfig) if not key.is_section}
    assert {key: by_name[key] for key, works in WORKS.items() if by_name[key] not in works} == {}


@pytest.mark.parametrize("name", ["zb_auto", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_planned_schedules_are_not_available_yet(name: str) -> None:
    [found] = violations(replace_values(a_config(), {"schedule.name": name}))
    assert found.key == "schedule.name"
    assert "not available yet" in found.rule
    assert {"gpipe", "1f1b", "interleaved", "custom"} <= set(found.legal)


def test_errors_of_schedule_and_layout_come_in_one_report() -> None:
    values = {"schedule.chunks": 2, "schedule.round": 2, "schedule.path": "mine.csv", "parallel.tp": 3}
    found = [violation.key for violation in violations(replace_values(a_config(), values))]
    assert {"schedule.round", "schedule.path", "parallel.tp"} <= set(found)


def test_all_violations_are_reported_in_the_order_of_the_schema() -> None:
    config = replace_values(a_config(), {"parallel.tp": 3, "parallel.cp": 2, "lr.warmup_steps": 9, "seed": -1})
    order = [violation.key for violation in violations(config, 12)]
    assert order == sorted(order, key=[key.name for key in keys(TrainConfig)].index)
    assert {"seed", "parallel.tp", "parallel.cp", "lr.warmup_steps"} <= set(order)


def test_checks_of_invalid_values_are_skipped_and_all_others_run() -> None:
    config = replace_values(a_config(), {"model.heads": INVALID, "model.layers": INVALID, "lr.warmup_steps": 9})
    assert [violation.key for violation in violations(config)] == ["lr.warmup_steps"]


def test_ranks_per_node_of_the_launcher_apply_unless_configured() -> None:
    config = replace_values(a_config(), {"parallel.tp": 4})
    assert violations(config, 4, ranks_per_node=4) == []
    assert [violation.key for violation in violations(config, 4, ranks_per_node=2)] == ["parallel.tp"]
    named = replace_values(config, {"cluster.ranks_per_node": 4})
    assert violations(named, 4, ranks_per_node=2) == []


def test_a_violation_is_a_value() -> None:
    [found] = violations(replace_values(a_config(), {"lr.floor": 2.0}))
    assert found == Violation("lr.floor", 2.0, "must be at least 0 and at most 1", ("1 or less",))


def test_rope_defaults_are_valid_with_learned_positions() -> None:
    assert violations(replace_values(a_config(), LEARNED | {"model.rope": RopeOptions()})) == []


@settings(max_examples=200, deadline=None)
@given(
    heads=st.integers(1, 12),
    groups=st.integers(1, 12),
    ffn=st.integers(1, 40),
    sequence=st.integers(1, 16),
    tp=st.integers(1, 8),
    pp=st.integers(1, 6),
    layers=st.integers(1, 6),
    micro=st.integers(1, 4),
    dp=st.integers(1, 4),
)
def test_a_suggested_tp_or_batch_size_is_valid(**sizes: int) -> None:
    values = {
        "model.heads": sizes["heads"],
        "model.kv_groups": sizes["groups"],
        "model.hidden": sizes["heads"] * 4,
        "model.ffn": sizes["ffn"],
        "model.layers": sizes["layers"],
        "batch.sequence_length": sizes["sequence"],
        "batch.micro_size": sizes["micro"],
        "batch.global_size": 24,
        "parallel.tp": sizes["tp"],
        "parallel.pp": sizes["pp"],
        "parallel.dp": sizes["dp"],
    }
    config = replace_values(a_config(), values)
    for found in violations(config):
        for legal in found.legal if found.key in ("parallel.tp", "batch.global_size") else ():
            corrected = violations(replace_values(config, {found.key: legal}))
            assert found.key not in [violation.key for violation in corrected]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0F0,0B0\n", None),
        (b"", "is empty; use one line of actions for each rank"),
        (b"\x80\xff\x00", "cannot be read"),
        (b"0F0,junk\n", "line 1, column 2: 'junk' is not an action"),
        (b"0F0,0B0,0F1,0B1\n", "its lists are for pp=1, chunks=1, microbatches=2 and 1 stage, not for"),
        (b"0B0,0F0\n", "rank 0, step 0: 0B0 comes before 0F0"),
        (b"999999999999F0\n", "no rank runs stages"),
        (b"9" * 5000 + b"F0\n", "cannot be read"),
    ],
)
def test_the_file_of_a_custom_schedule_is_read(tmp_path: Path, content: bytes, words: str | None) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    sizes = {"batch.global_size": 1, "batch.micro_size": 1, "parallel.dp": 1, "parallel.pp": 1}
    config = replace_values(a_config(), sizes | {"schedule.name": "custom", "schedule.path": str(path)})
    lines = [str(violation) for violation in violations(config)]
    assert [line.startswith(f"schedule.path={path}: {words}") for line in lines] == [True] * (words is not None)
