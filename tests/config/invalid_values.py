"""Values that break a rule about anything but the grid and the stages of the data: ``config.value_rules``, ranges."""

from __future__ import annotations

from megastack.config.choices import Period
from megastack.config.data_schema import BlendSource
from megastack.config.schema import OptimGroupOptions
from tests.config.config_cases import LEARNED, LLAMA3, InvalidCase

FINITE = "must be a finite number or null"

VALUES: list[InvalidCase] = [
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
    ({"run.time_limit_s": 0.0}, None, "run.time_limit_s=0.0: must be above 0; use null for no limit"),
    ({"optim.clip_norm": 0.0}, None, "optim.clip_norm=0.0: must be above 0; use null for no clipping"),
    ({"checkpoint.every": 0}, None, "checkpoint.every=0: must be at least 1; use 1 or more or null for none"),
    ({"checkpoint.keep_last": -1}, None, "checkpoint.keep_last=-1: must be at least 1; use 1 or more or null for all"),
    ({"checkpoint.keep_every": 0}, None, "checkpoint.keep_every=0: must be at least 1; use 1 or more or null for none"),
    (
        {"run.validate_samples": 0},
        None,
        "run.validate_samples=0: must be at least 1; use 1 or more or null for the whole split",
    ),
    (
        {"precision.loss_scale": 0.0},
        None,
        "precision.loss_scale=0.0: must be above 0; use null for a dynamic one with fp16 and none otherwise",
    ),
    ({"launch.timeout_s": 1e300}, None, "launch.timeout_s=1e+300: must be at most 2000000.0; use 2000000.0 or less"),
    (
        {"run.steps": 2**63},
        None,
        "run.steps=9223372036854775808: must be at most 100000000000; use 100000000000 or less",
    ),
    (
        {"optim.clip_norm": float("inf")},
        None,
        "optim.clip_norm=inf: must be a finite number or null; use null for no clipping",
    ),
    ({"optim.betas": [0.9, float("nan")]}, None, "optim.betas[1]=nan: must be a finite number"),
    ({"lr.floor": 1.5}, None, "lr.floor=1.5: must be at least 0 and at most 1; use 1 or less"),
    ({"optim.lr": float("nan")}, None, "optim.lr=nan: must be a finite number"),
    ({"optim.betas": [0.9, 1.0]}, None, "optim.betas=[0.9, 1.0]: each must be at least 0 and below 1"),
    ({"observe.dump_steps": [0]}, None, "observe.dump_steps=[0]: each must be at least 1; use 1 or more"),
    (
        {"optim.groups": [OptimGroupOptions(pattern="mlp", lr_scale=-1.0)]},
        None,
        "optim.groups[0].lr_scale=-1.0: must be at least 0; use 0 or more",
    ),
    # positions
    (
        {"model.max_positions": 64},
        None,
        "model.max_positions=64: only for model.positions=learned; rotary embeddings have no table; use null",
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
        "model.mlp=mine.MLP: must be null or a mapping whose _target_ is module.Class; "
        "use {_target_: my_file.MyMlp} or null",
    ),
    (
        {"model.attention": {"_target_": "Attention"}},
        None,
        "model.attention={_target_: Attention}: must be null or a mapping whose _target_ is module.Class; "
        "use {_target_: my_file.MyAttention} or null",
    ),
    (
        {"model.block": {"target": "a.B"}},
        None,
        "model.block={target: a.B}: must be null or a mapping whose _target_ is module.Class; "
        "use {_target_: my_file.MyBlock} or null",
    ),
    # recompute
    (
        {"recompute.mode": "pattern"},
        None,
        r"recompute.mode=pattern: requires recompute.pattern, the names of the modules; "
        r"use recompute.pattern='blocks\.\d+\.mlp', full or selective",
    ),
    (
        {"recompute.mode": "full", "recompute.pattern": "blocks"},
        None,
        "recompute.pattern=blocks: only for recompute.mode=pattern, not full; use null or recompute.mode=pattern",
    ),
    (
        {"recompute.mode": "pattern", "recompute.pattern": "blocks("},
        None,
        r"recompute.pattern=blocks(: is not a regular expression (missing ), unterminated subpattern at position 6); "
        r"use blocks\(",
    ),
    # patterns and optimizer
    (
        {"optim.freeze": ["embed", "("]},
        None,
        r"optim.freeze[1]=(: is not a regular expression (missing ), unterminated subpattern at position 0); use \(",
    ),
    ({"optim.no_decay": [""]}, None, "optim.no_decay[0]='': an empty pattern matches every parameter; use .*"),
    (
        {"optim.groups": [OptimGroupOptions(pattern="*")]},
        None,
        r"optim.groups[0].pattern=*: is not a regular expression (nothing to repeat at position 0); use \*",
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
        "lr.decay_steps=1: lr.schedule=cosine has no separate decay; use null or lr.schedule=wsd",
    ),
    # sharing the optimizer's state
    (
        {"parallel.zero.shard_size": 1},
        None,
        "parallel.zero.shard_size=1: parallel.zero.stage=0 shards nothing; use null or parallel.zero.stage=1",
    ),
    (
        {"parallel.zero.stage": 1, "parallel.dp": 4, "batch.global_size": 4, "parallel.zero.shard_size": 3},
        None,
        "parallel.zero.shard_size=3: must divide dp·cp = 4; use 1, 2 or 4",
    ),
    (
        {"parallel.zero.stage": 2, "parallel.zero.gather": Period.microbatch},
        None,
        "parallel.zero.gather=microbatch: parallel.zero.stage=2 does not shard parameters; use step or "
        "parallel.zero.stage=3",
    ),
    (
        {"parallel.zero.stage": 2, "parallel.dp": 2, "parallel.bucket_size": 1000},
        None,
        "parallel.bucket_size=1000: parallel.zero.stage=2 reduces gradients by unit; use null or parallel.zero.stage=1",
    ),
    (
        {"parallel.zero.stage": 1, "parallel.zero.reduce": Period.microbatch},
        None,
        "parallel.zero.reduce=microbatch: parallel.zero.stage=1 reduces gradients once per step; use step or "
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
        "parallel.zero.stage=3: with model.tied=true the first and last stages share a parameter, and both are on "
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
        "schedule.name=zb_h1: parallel.zero.stage=2 reduces gradients after I and misses the weight gradients of W; "
        "use 1f1b or parallel.zero.stage=1",
    ),
    (
        {"parallel.zero.stage": 2, "run.sample_prompt": "Once"},
        None,
        "run.sample_prompt=Once: sampling between steps needs full parameters on each rank; use null or "
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
        "data.paths=[]: data.source=text needs at least one path; use data.paths=[FILE,…]",
    ),
    (
        {"data.allow_special_tokens": True},
        None,
        "data.allow_special_tokens=true: data.tokenizer=byte has no special tokens; use false or data.tokenizer=PATH",
    ),
    (
        {"data.source": "bin", "data.paths": ["a"], "data.pack": False},
        None,
        "data.pack=false: token files are packed and do not list their documents; use true",
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
        "data.blend[0].paths=[]: data.blend[0].source=bin needs at least one path; use data.blend[0].paths=[FILE,…]",
    ),
    (
        {"data.blend": [BlendSource(paths=["a"], weight=1.0)], "data.paths": ["b"]},
        None,
        "data.paths=[b]: data.blend lists the paths of each source; use []",
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
        "checkpoint.load_weights=there: resume loads weights as well; use null, resume=null or resume=auto",
    ),
    (
        {"launch.elastic": True},
        None,
        "launch.elastic=true: a restart must continue from the newest checkpoint, which resume=null does not do; "
        "use resume=auto with run.dir=FOLDER or false",
    ),
    (
        {"observe.dump_steps": [2, 9]},
        None,
        "observe.dump_steps=[2, 9]: contains steps beyond run.steps=3; use steps from 1 to 3",
    ),
    (
        {"observe.profile_steps": [4]},
        None,
        "observe.profile_steps=[4]: contains steps beyond run.steps=3; use steps from 1 to 3",
    ),
    (
        {"device": "cpu", "launch.numa_binding": "node"},
        None,
        "launch.numa_binding=node: needs ranks on GPUs; use none or device=cuda",
    ),
    (
        {"device": "cuda", "launch.cpu_transport": "shared_memory"},
        None,
        "launch.cpu_transport=shared_memory: needs ranks on the CPU; use auto or device=cpu",
    ),
    (
        {"device": "cpu", "launch.cpu_transport": "shared_memory", "cluster.nodes": 2},
        None,
        "launch.cpu_transport=shared_memory: needs one host, not cluster.nodes=2; use auto or gloo",
    ),
]
