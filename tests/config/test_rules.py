"""Each rule with a value that breaks it, its message and the values that would do; and that legal configs pass."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.config.availability import WORKS
from megastack.config.choices import Period
from megastack.config.convert import UNUSABLE, replace_values, to_plain
from megastack.config.fields import keys, without_null
from megastack.config.rules import RULES, out_of_range, require_legal, violations
from megastack.config.schema import BlendSource, DataSource, DataStage, OptimGroup, RopeOptions, TrainConfig
from megastack.errors import ConfigError, Violation
from tests.config.config_cases import a_config

LEARNED = {"model.positions": "learned"}
BIN_37 = {"data.source": "bin", "data.paths": ["a"], "model.vocab": 37}
LLAMA3 = {"model.rope.scaling": "llama3", "model.rope.factor": 8.0}

# Values by key, the world size, and the line of the report that they must give.
BROKEN: list[tuple[dict[str, Any], int | None, str]] = [
    # ranges
    ({"parallel.tp": 0}, None, "parallel.tp=0: must be at least 1 and at most 1048576; use 1 or more"),
    ({"parallel.pp": -1}, None, "parallel.pp=-1: must be at least 1 and at most 10000; use 1 or more"),
    (
        {"model.layers": 10**20},
        None,
        "model.layers=100000000000000000000: must be at least 1 and at most 10000; use 10000 or less",
    ),
    (
        {"parallel.dp": 2**20 + 1},
        None,
        "parallel.dp=1048577: must be at least 1 and at most 1048576; use 1048576 or less",
    ),
    ({"run.steps": 0}, None, "run.steps=0: must be at least 1; use 1 or more"),
    ({"model.dropout": 1.0}, None, "model.dropout=1.0: must be at least 0 and below 1"),
    (
        {"model.attention_dropout": -0.1},
        None,
        "model.attention_dropout=-0.1: must be at least 0 and below 1; use 0 or more",
    ),
    ({"launch.timeout_s": 0.0}, None, "launch.timeout_s=0.0: must be above 0"),
    ({"launch.grace_s": -5.0}, None, "launch.grace_s=-5.0: must be above 0"),
    ({"run.time_limit_s": 0.0}, None, "run.time_limit_s=0.0: must be above 0"),
    ({"lr.floor": 1.5}, None, "lr.floor=1.5: must be at least 0 and at most 1; use 1 or less"),
    ({"optim.lr": float("nan")}, None, "optim.lr=nan: must be a finite number"),
    ({"optim.betas": [0.9, 1.0]}, None, "optim.betas=[0.9, 1.0]: each must be at least 0 and below 1"),
    ({"observe.dump_steps": [0]}, None, "observe.dump_steps=[0]: each must be at least 1; use 1 or more"),
    (
        {"optim.groups": [OptimGroup(pattern="mlp", lr_scale=-1.0)]},
        None,
        "optim.groups[0].lr_scale=-1.0: must be at least 0; use 0 or more",
    ),
    # the grid
    ({"parallel.dp": 4}, 8, "parallel.dp=4: pp·dp·cp·tp = 4 must be the world of 8 ranks; use 8"),
    (
        {"parallel.dp": 1, "parallel.tp": 2},
        5,
        "parallel.dp=1: pp·dp·cp·tp = 2 must be the world of 5 ranks; use other degrees",
    ),
    (
        {"parallel.tp": 2, "parallel.pp": 2},
        6,
        "parallel.dp=null: pp·cp·tp = 4 must divide the world of 6 ranks; "
        "use a world that is a multiple of 4 or other degrees",
    ),
    ({"parallel.ep": 3, "parallel.dp": 4}, None, "parallel.ep=3: must divide dp·cp = 4; use 1, 2 or 4"),
    ({"cluster.nodes": 3}, 4, "cluster.nodes=3: must divide the world of 4 ranks; use 1, 2 or 4"),
    (
        {"cluster.nodes": 2, "cluster.ranks_per_node": 4},
        4,
        "cluster.ranks_per_node=4: cluster.nodes=2 times this must be the world of 4 ranks; use null",
    ),
    (
        {"parallel.tp": 4, "cluster.nodes": 2},
        4,
        "parallel.tp=4: must divide the 2 ranks of a node, so that no tensor-parallel group spans nodes; "
        "use 1, 2 or parallel.allow_tp_across_nodes=true",
    ),
    (
        {"parallel.tp": 4, "parallel.pp": 8, "parallel.dp": 4},
        32,
        "parallel.dp=4: pp·dp·cp·tp = 128 must be the world of 32 ranks; use 1",
    ),
    (
        {"parallel.tp": 4, "parallel.pp": 8, "parallel.dp": 4},
        128,
        "parallel.pp=8: model.layers=2 leaves some of the pp·chunks = 8 stages without a layer; "
        "use at most 2 or parallel.layers_per_stage=[…]",
    ),
    # the model over the grid
    (
        {"model.heads": 6, "model.hidden": 24, "parallel.tp": 4},
        None,
        "parallel.tp=4: must divide model.heads=6; use 1 or 2",
    ),
    ({"parallel.tp": 3}, None, "parallel.tp=3: must divide model.heads=4; use 1, 2 or 4"),
    (
        {"model.heads": 12, "model.hidden": 48, "model.kv_groups": 4, "model.ffn": 36, "parallel.tp": 6},
        None,
        "parallel.tp=6: must divide model.kv_groups=4 or be a multiple of it; use 1, 2 or 4",
    ),
    ({"model.ffn": 30, "parallel.tp": 4}, None, "parallel.tp=4: must divide model.ffn=30; use 1 or 2"),
    (
        {"model.vocab": 258, "model.vocab_multiple": 2, "parallel.tp": 4},
        None,
        "parallel.tp=4: must divide model.vocab=258 padded to 258 by model.vocab_multiple; use 1 or 2",
    ),
    (
        {"batch.sequence_length": 9, "parallel.tp": 2},
        None,
        "parallel.tp=2: must divide batch.sequence_length=9 with parallel.sequence_parallel=true; use 1",
    ),
    ({"model.kv_groups": 3}, None, "model.kv_groups=3: must divide model.heads=4; use 1, 2 or 4"),
    (
        {"model.hidden": 18},
        None,
        "model.heads=4: must divide model.hidden=18 where model.head_dim is null; use 1, 2, 3, 6, 9 or 18",
    ),
    (
        {"model.head_dim": 3},
        None,
        "model.head_dim=3: rotary positions pair components, so the width of a head (3) must be even; use 4",
    ),
    # layers and stages
    (
        {"parallel.pp": 4},
        None,
        "parallel.pp=4: model.layers=2 leaves some of the pp·chunks = 4 stages without a layer; "
        "use at most 2 or parallel.layers_per_stage=[…]",
    ),
    (
        {"parallel.pp": 2, "schedule.name": "interleaved", "schedule.chunks": 2},
        None,
        "parallel.pp=2: model.layers=2 leaves some of the pp·chunks = 4 stages without a layer; "
        "use at most 1 or parallel.layers_per_stage=[…]",
    ),
    (
        {"parallel.pp": 2, "parallel.layers_per_stage": [2]},
        None,
        "parallel.layers_per_stage=[2]: must list the layers of each of the pp·chunks = 2 stages, not of 1; "
        "use 2 numbers with the sum 2 or null",
    ),
    (
        {"parallel.pp": 2, "parallel.layers_per_stage": [2, 1]},
        None,
        "parallel.layers_per_stage=[2, 1]: must sum to model.layers=2, not 3; use 2 numbers with the sum 2 or null",
    ),
    # the batch
    (
        {"batch.global_size": 10, "batch.micro_size": 2, "parallel.dp": 2},
        None,
        "batch.global_size=10: must be a multiple of batch.micro_size=2 times dp=2; use 8 or 12",
    ),
    ({"batch.micro_size": 8}, None, "batch.global_size=4: must be a multiple of batch.micro_size=8 times dp=1; use 8"),
    ({}, 8, "batch.global_size=4: must be a multiple of batch.micro_size=1 times dp=8; use 8"),
    # the schedule
    (
        {"schedule.name": "1f1bb"},
        None,
        "schedule.name=1f1bb: is no schedule; use gpipe, 1f1b, interleaved, zb_h1, zb_h2 or custom",
    ),
    (
        {"schedule.name": "zb_auto"},
        None,
        "schedule.name=zb_auto: is not available yet; use gpipe, 1f1b, interleaved, zb_h1, zb_h2 or custom",
    ),
    (
        {"schedule.chunks": 2},
        None,
        "schedule.chunks=2: 1f1b runs one stage a rank; use 1 or schedule.name=interleaved",
    ),
    (
        {"schedule.round": 2},
        None,
        "schedule.round=2: schedule.name=1f1b takes no such option; use null",
    ),
    ({"schedule.name": "custom"}, None, "schedule.path=null: schedule.name=custom needs it"),
    (
        {"schedule.name": "interleaved", "parallel.pp": 2, "schedule.round": 1},
        None,
        "schedule.round=1: each round of the 4 microbatches, the last one too, must have at least 2; use null, 2 or 4",
    ),
    # positions
    (
        {"model.max_positions": 64},
        None,
        "model.max_positions=64: rotary positions have no table; only for model.positions=learned; use null",
    ),
    (
        LEARNED | {"model.max_positions": 4},
        None,
        "model.max_positions=4: must hold the positions of batch.sequence_length=8; use 8 or more or null",
    ),
    (
        LEARNED | {"model.rope.theta": 5e5},
        None,
        "model.rope.theta=500000.0: only for model.positions=rope; use 10000.0",
    ),
    (
        {"model.rope.factor": 2.0},
        None,
        "model.rope.factor=2.0: model.rope.scaling=none does not use it; use 1.0 or another model.rope.scaling",
    ),
    (
        {"model.rope.scaling": "linear", "model.rope.low_freq_factor": 2.0},
        None,
        "model.rope.low_freq_factor=2.0: model.rope.scaling=linear does not use it; "
        "use 1.0 or another model.rope.scaling",
    ),
    (
        LLAMA3 | {"model.rope.high_freq_factor": 1.0},
        None,
        "model.rope.high_freq_factor=1.0: must exceed model.rope.low_freq_factor=1.0; use 4.0",
    ),
    # layers of the user's
    (
        {"model.mlp": "mine.MLP"},
        None,
        "model.mlp=mine.MLP: must be null or name a class by its module and name under _target_; "
        "use {_target_: my_file.MyMlp} or null",
    ),
    (
        {"model.attention": {"_target_": "Attention"}},
        None,
        "model.attention={_target_: Attention}: must be null or name a class by its module and name under _target_; "
        "use {_target_: my_file.MyAttention} or null",
    ),
    (
        {"model.block": {"target": "a.B"}},
        None,
        "model.block={target: a.B}: must be null or name a class by its module and name under _target_; "
        "use {_target_: my_file.MyBlock} or null",
    ),
    # recompute
    (
        {"recompute.mode": "pattern"},
        None,
        r"recompute.mode=pattern: needs the names of the modules in recompute.pattern; "
        r"use recompute.pattern='blocks\.\d+\.mlp', full or selective",
    ),
    (
        {"recompute.mode": "full", "recompute.pattern": "blocks"},
        None,
        "recompute.pattern=blocks: is read by recompute.mode=pattern, not by full; use null or recompute.mode=pattern",
    ),
    (
        {"recompute.mode": "pattern", "recompute.pattern": "blocks("},
        None,
        r"recompute.pattern=blocks(: is no regular expression (missing ), unterminated subpattern at position 6); "
        r"use blocks\(",
    ),
    # patterns and optimizer
    (
        {"optim.freeze": ["embed", "("]},
        None,
        r"optim.freeze[1]=(: is no regular expression (missing ), unterminated subpattern at position 0); use \(",
    ),
    ({"optim.no_decay": [""]}, None, "optim.no_decay[0]='': an empty pattern matches every parameter; use .*"),
    (
        {"optim.groups": [OptimGroup(pattern="*")]},
        None,
        r"optim.groups[0].pattern=*: is no regular expression (nothing to repeat at position 0); use \*",
    ),
    ({"optim.betas": [0.9]}, None, "optim.betas=[0.9]: must be two numbers; use [0.9, 0.95]"),
    # learning rate
    ({"lr.warmup_steps": 9}, None, "lr.warmup_steps=9: must not be longer than run.steps=3; use 3 or less"),
    (
        {"lr.warmup_steps": 9, "lr.total_steps": 5},
        None,
        "lr.warmup_steps=9: must not be longer than lr.total_steps=5; use 5 or less",
    ),
    (
        {"lr.schedule": "wsd", "lr.warmup_steps": 1, "lr.decay_steps": 3},
        None,
        "lr.decay_steps=3: must fit between lr.warmup_steps=1 and run.steps=3; use 2 or less",
    ),
    (
        {"lr.schedule": "cosine", "lr.decay_steps": 1},
        None,
        "lr.decay_steps=1: lr.schedule=cosine has no decay of its own length; use null or lr.schedule=wsd",
    ),
    # sharing the optimizer's state
    (
        {"parallel.zero.shard_size": 1},
        None,
        "parallel.zero.shard_size=1: parallel.zero.stage=0 shares nothing; use null or parallel.zero.stage=1",
    ),
    (
        {"parallel.zero.stage": 1, "parallel.dp": 4, "batch.global_size": 4, "parallel.zero.shard_size": 3},
        None,
        "parallel.zero.shard_size=3: must divide dp·cp = 4; use 1, 2 or 4",
    ),
    (
        {"parallel.zero.stage": 2, "parallel.zero.gather": Period.microbatch},
        None,
        "parallel.zero.gather=microbatch: parallel.zero.stage=2 keeps parameters whole over a step; use step or "
        "parallel.zero.stage=3",
    ),
    (
        {"parallel.zero.stage": 1, "parallel.zero.reduce": Period.microbatch},
        None,
        "parallel.zero.reduce=microbatch: parallel.zero.stage=1 reduces gradients once a step; use step or "
        "parallel.zero.stage=2",
    ),
    (
        {
            "parallel.zero.stage": 3,
            "model.tied": True,
            "schedule.name": "interleaved",
            "schedule.chunks": 2,
        },
        None,
        "parallel.zero.stage=3: model.tied=true has the first and the last stage share a parameter, and both are on "
        "one rank; use 0, 1, schedule.chunks=1 or model.tied=false",
    ),
    (
        {
            "parallel.zero.stage": 2,
            "parallel.dp": 2,
            "parallel.pp": 2,
            "batch.global_size": 4,
            "schedule.name": "zb_h1",
        },
        None,
        "schedule.name=zb_h1: parallel.zero.stage=2 reduces gradients in I and would miss those of W; use 1f1b or "
        "parallel.zero.stage=1",
    ),
    (
        {"parallel.zero.stage": 2, "run.sample_prompt": "Once"},
        None,
        "run.sample_prompt=Once: a sample between steps needs whole parameters on each rank; use null or "
        "parallel.zero.stage=1",
    ),
    # data, checkpoints, records
    (
        {"data.paths": ["a.txt"]},
        None,
        "data.paths=[a.txt]: data.source=builtin reads no files; "
        "use [], data.source=text, data.source=jsonl or data.source=bin",
    ),
    (
        {"data.source": "text"},
        None,
        "data.paths=[]: data.source=text reads files and none are named; use data.paths=[FILE,…]",
    ),
    (
        {"data.source": "bin", "data.paths": ["a"], "data.pack": False},
        None,
        "data.pack=false: token files are packed, without a list of their documents; use true",
    ),
    (
        {"data.blend": [BlendSource(paths=["a"], weight=0.0)]},
        None,
        "data.blend=[0.0]: no source has a weight above 0; use weights like 0.7 and 0.3",
    ),
    (
        {"data.blend": [BlendSource(paths=["a"], weight=-1.0)]},
        None,
        "data.blend[0].weight=-1.0: must be at least 0; use 0 or more",
    ),
    (
        {"data.blend": [BlendSource(weight=1.0)]},
        None,
        "data.blend[0].paths=[]: data.blend[0].source=bin reads files and none are named; "
        "use data.blend[0].paths=[FILE,…]",
    ),
    (
        {"data.blend": [BlendSource(paths=["a"], weight=1.0)], "data.paths": ["b"]},
        None,
        "data.paths=[b]: data.blend names the paths of each of its sources; use []",
    ),
    # stages of the data
    (
        {"data.stages": [DataStage(from_step=2, sequence_length=4), DataStage(from_step=2, sequence_length=8)]},
        None,
        "data.stages[1].from_step=2: must come after the stage before, which begins at step 2; use 3 or more",
    ),
    (
        {"data.stages": [DataStage(from_step=0, sequence_length=4)]},
        None,
        "data.stages[0].from_step=0: must be at least 1; use 1 or more",
    ),
    (
        {"data.stages": [DataStage(from_step=3, sequence_length=4)]},
        None,
        "data.stages[0].from_step=3: never begins: run.steps=3; use 2 or less or run.steps=4 or more",
    ),
    (
        {"data.stages": [DataStage(from_step=1)]},
        None,
        "data.stages[0]={from_step: 1}: changes neither the data nor the sequence length; "
        "use sequence_length, paths or blend",
    ),
    (
        {"data.stages": [DataStage(from_step=1, paths=["a.txt"])]},
        None,
        "data.stages[0].paths=[a.txt]: data.stages[0].source=builtin reads no files; use [], "
        "data.stages[0].source=text, data.stages[0].source=jsonl or data.stages[0].source=bin",
    ),
    (
        {"data.stages": [DataStage(from_step=1, source=DataSource.text)]},
        None,
        "data.stages[0].paths=[]: data.stages[0].source=text reads files and none are named; "
        "use data.stages[0].paths=[FILE,…]",
    ),
    (
        {"data.stages": [DataStage(from_step=1, paths=["b"], blend=[BlendSource(paths=["a"], weight=1.0)])]},
        None,
        "data.stages[0].blend=[[a]]: the stage names one source as well; use null or no source and paths",
    ),
    (
        {"data.stages": [DataStage(from_step=1, blend=[])]},
        None,
        "data.stages[0].blend=[]: has no source; "
        "use data.stages[0].paths=[FILE,…], data.stages[0].source=builtin or null",
    ),
    (
        {"data.stages": [DataStage(from_step=1, blend=[BlendSource(paths=["a"], weight=-2.0)])]},
        None,
        "data.stages[0].blend[0].weight=-2.0: must be at least 0; use 0 or more",
    ),
    (
        BIN_37 | {"data.stages": [DataStage(from_step=1, source=DataSource.text, paths=["a.txt"])]},
        None,
        "data.stages[0].source=text: data.tokenizer=byte has 256 ids and model.vocab=37 does not hold them; "
        "use bin or model.vocab=256 or more",
    ),
    (
        {"data.pack": False, "data.stages": [DataStage(from_step=1, source=DataSource.bin, paths=["a"])]},
        None,
        "data.stages[0].source=bin: token files are packed, and data.pack=false; use text, jsonl or data.pack=true",
    ),
    (
        LEARNED | {"data.stages": [DataStage(from_step=1, sequence_length=16)]},
        None,
        "data.stages[0].sequence_length=16: the model has 8 learned positions; "
        "use 8 or less or model.max_positions=16 or more",
    ),
    (
        {"parallel.tp": 4, "data.stages": [DataStage(from_step=1, sequence_length=10)]},
        None,
        "data.stages[0].sequence_length=10: must be a multiple of parallel.tp=4 with parallel.sequence_parallel=true; "
        "use 8, 12 or parallel.sequence_parallel=false",
    ),
    ({"model.vocab": 255}, None, "model.vocab=255: must hold the 256 ids of data.tokenizer=byte; use 256 or more"),
    ({"resume": "auto"}, None, "resume=auto: needs the folder to continue in; use run.dir=FOLDER, last or null"),
    (
        {"resume": "last", "run.dir": "here"},
        None,
        "resume=last: continues the newest run under run.root, so run.dir=here would be ignored; "
        "use auto or run.dir=null",
    ),
    (
        {"resume": "here", "checkpoint.load_weights": "there"},
        None,
        "checkpoint.load_weights=there: resume already brings weights; use null, resume=null or resume=auto",
    ),
    (
        {"launch.elastic": True},
        None,
        "launch.elastic=true: a restart goes on in its folder from the newest checkpoint, resume=null does not; "
        "use resume=auto with run.dir=FOLDER or false",
    ),
    (
        {"observe.dump_steps": [2, 9]},
        None,
        "observe.dump_steps=[2, 9]: has steps beyond run.steps=3; use steps from 1 to 3",
    ),
]


@pytest.mark.parametrize(("values", "world_size", "line"), BROKEN, ids=[line.partition(":")[0] for *_, line in BROKEN])
def test_a_broken_rule_says_what_would_do(values: dict[str, Any], world_size: int | None, line: str) -> None:
    found = violations(replace_values(a_config(), values), world_size)
    assert line in [str(violation) for violation in found]


def test_every_rule_is_among_those_broken_here() -> None:
    bad = [(replace_values(a_config(), values), world) for values, world, _ in BROKEN]
    bad = [(config, world) for config, world in bad if not any(True for _ in out_of_range(config))]
    assert [rule.__name__ for rule in RULES if not any(list(rule(config, world)) for config, world in bad)] == []


LEGAL: list[tuple[dict[str, Any], int | None]] = [
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
    ({"data.stages": [DataStage(from_step=1, sequence_length=9), DataStage(from_step=2, sequence_length=8)]}, None),
    (BIN_37 | {"data.stages": [DataStage(from_step=2, paths=["b"])]}, None),
    (LEARNED | {"model.max_positions": 16, "data.stages": [DataStage(from_step=1, sequence_length=16)]}, None),
    ({"resume": "auto", "run.dir": "here"}, None),
    ({"resume": "last"}, None),
    ({"optim.freeze": [r"^blocks\.0\."], "optim.groups": [OptimGroup(pattern="mlp", lr_scale=0.0)]}, None),
    ({"observe.dump_steps": [1, 3]}, None),
]


@pytest.mark.parametrize(("values", "world_size"), LEGAL)
def test_legal_configurations_pass(values: dict[str, Any], world_size: int | None) -> None:
    config = replace_values(a_config(), values)
    assert violations(config, world_size) == []
    require_legal(config, world_size)


def _another_value(key: str) -> Any:
    kind, _ = without_null({known.name: known.type for known in keys(TrainConfig)}[key])
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return next(choice for choice in kind if choice not in WORKS[key])
    return {bool: True, int: 2, float: 2.0, str: "x"}.get(kind, ["1"] if kind == list[str] else [1])


@pytest.mark.parametrize("key", WORKS)
def test_a_feature_that_is_not_built_is_refused(key: str) -> None:
    found = violations(replace_values(a_config(), {key: _another_value(key)}))
    [said] = [violation for violation in found if violation.rule == "not available yet"]
    assert (said.key, said.legal) == (key, WORKS[key])


def test_defaults_are_available() -> None:
    by_name = {key.name: to_plain(key.default) for key in keys(TrainConfig) if not key.is_section}
    assert {key: by_name[key] for key, works in WORKS.items() if by_name[key] not in works} == {}


@pytest.mark.parametrize("name", ["zb_auto", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_schedules_to_come_are_known_and_refused(name: str) -> None:
    [found] = violations(replace_values(a_config(), {"schedule.name": name}))
    assert found.key == "schedule.name"
    assert "not available yet" in found.rule
    assert {"gpipe", "1f1b", "interleaved", "custom"} <= set(found.legal)


def test_a_schedule_and_what_it_takes_come_in_one_report() -> None:
    values = {"schedule.chunks": 2, "schedule.round": 2, "schedule.path": "mine.csv", "parallel.tp": 3}
    found = [violation.key for violation in violations(replace_values(a_config(), values))]
    assert {"schedule.round", "schedule.path", "parallel.tp"} <= set(found)


def test_all_violations_come_in_one_report_in_the_order_of_the_schema() -> None:
    config = replace_values(a_config(), {"parallel.tp": 3, "parallel.cp": 2, "lr.warmup_steps": 9, "seed": -1})
    with pytest.raises(ConfigError) as refused:
        require_legal(config, 12)
    order = [violation.key for violation in refused.value.violations]
    assert order == sorted(order, key=[key.name for key in keys(TrainConfig)].index)
    assert {"seed", "parallel.tp", "parallel.cp", "lr.warmup_steps"} <= set(order)
    assert str(refused.value).splitlines() == [str(violation) for violation in refused.value.violations]


def test_what_cannot_be_told_is_left_out_and_the_rest_is_said() -> None:
    config = replace_values(a_config(), {"model.heads": UNUSABLE, "model.layers": UNUSABLE, "lr.warmup_steps": 9})
    assert [violation.key for violation in violations(config)] == ["lr.warmup_steps"]


def test_the_ranks_that_a_launcher_put_on_a_node_count() -> None:
    config = replace_values(a_config(), {"parallel.tp": 4})
    assert violations(config, 4, ranks_per_node=4) == []
    assert [violation.key for violation in violations(config, 4, ranks_per_node=2)] == ["parallel.tp"]
    named = replace_values(config, {"cluster.ranks_per_node": 4})
    assert violations(named, 4, ranks_per_node=2) == []


def test_a_violation_is_a_value() -> None:
    [found] = violations(replace_values(a_config(), {"lr.floor": 2.0}))
    assert found == Violation("lr.floor", 2.0, "must be at least 0 and at most 1", ("1 or less",))


def test_defaults_of_rope_break_no_rule_of_learned_positions() -> None:
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
def test_a_degree_offered_for_tp_breaks_no_rule_about_tp(**sizes: int) -> None:
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
            mended = violations(replace_values(config, {found.key: legal}))
            assert found.key not in [violation.key for violation in mended]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0F0,0B0\n", None),
        (b"", "is empty; use one line of actions for each rank"),
        (b"\x80\xff\x00", "cannot be read"),
        (b"0F0,junk\n", "line 1, column 2: 'junk' is not an action"),
        (b"0F0,0B0,0F1,0B1\n", "its lists are for pp=1, chunks=1, microbatches=2 and 1 stages, not for"),
        (b"0B0,0F0\n", "rank 0, step 0: 0B0 stands before 0F0"),
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
