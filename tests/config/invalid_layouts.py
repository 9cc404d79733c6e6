"""Values that violate a rule of ``config.layout_rules``."""

from __future__ import annotations

from tests.config.config_cases import InvalidCase

LAYOUTS: list[InvalidCase] = [
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
    ({"parallel.ep": 3, "parallel.dp": 4}, None, "parallel.ep=3: not available yet; use 1"),
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
        "schedule.name=1f1bb: is not a schedule; use gpipe, 1f1b, interleaved, zb_h1, zb_h2 or custom",
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
]
