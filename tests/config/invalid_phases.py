"""Values that break a rule about the stages of the data: ``config.stage_rules``."""

from __future__ import annotations

from megastack.config.schema import BlendSource, DataPhaseOptions, DataSource
from tests.config.config_cases import BIN_37, LEARNED, Broken

STAGES: list[Broken] = [
    (
        {
            "data.stages": [
                DataPhaseOptions(from_step=2, sequence_length=4),
                DataPhaseOptions(from_step=2, sequence_length=8),
            ]
        },
        None,
        "data.stages[1].from_step=2: must come after the stage before, which begins at step 2; use 3 or more",
    ),
    (
        {"data.stages": [DataPhaseOptions(from_step=0, sequence_length=4)]},
        None,
        "data.stages[0].from_step=0: must be at least 1; use 1 or more",
    ),
    (
        {"data.stages": [DataPhaseOptions(from_step=3, sequence_length=4)]},
        None,
        "data.stages[0].from_step=3: never begins: run.steps=3; use 2 or less or run.steps=4 or more",
    ),
    (
        {"data.stages": [DataPhaseOptions(from_step=1)]},
        None,
        "data.stages[0]={from_step: 1}: changes neither the data nor the sequence length; "
        "use sequence_length, paths or blend",
    ),
    (
        {"data.stages": [DataPhaseOptions(from_step=1, paths=["a.txt"])]},
        None,
        "data.stages[0].paths=[a.txt]: data.stages[0].source=builtin reads no files; use [], "
        "data.stages[0].source=text, data.stages[0].source=jsonl or data.stages[0].source=bin",
    ),
    (
        {"data.stages": [DataPhaseOptions(from_step=1, source=DataSource.text)]},
        None,
        "data.stages[0].paths=[]: data.stages[0].source=text reads files and none are named; "
        "use data.stages[0].paths=[FILE,…]",
    ),
    (
        {"data.stages": [DataPhaseOptions(from_step=1, paths=["b"], blend=[BlendSource(paths=["a"], weight=1.0)])]},
        None,
        "data.stages[0].blend=[[a]]: the stage names one source as well; use null or no source and paths",
    ),
    (
        {"data.stages": [DataPhaseOptions(from_step=1, blend=[])]},
        None,
        "data.stages[0].blend=[]: has no source; "
        "use data.stages[0].paths=[FILE,…], data.stages[0].source=builtin or null",
    ),
    (
        {"data.stages": [DataPhaseOptions(from_step=1, blend=[BlendSource(paths=["a"], weight=-2.0)])]},
        None,
        "data.stages[0].blend[0].weight=-2.0: must be at least 0; use 0 or more",
    ),
    (
        BIN_37 | {"data.stages": [DataPhaseOptions(from_step=1, source=DataSource.text, paths=["a.txt"])]},
        None,
        "data.stages[0].source=text: data.tokenizer=byte has 256 ids and model.vocab=37 does not hold them; "
        "use bin or model.vocab=256 or more",
    ),
    (
        {"data.pack": False, "data.stages": [DataPhaseOptions(from_step=1, source=DataSource.bin, paths=["a"])]},
        None,
        "data.stages[0].source=bin: token files are packed, and data.pack=false; use text, jsonl or data.pack=true",
    ),
    (
        LEARNED | {"data.stages": [DataPhaseOptions(from_step=1, sequence_length=16)]},
        None,
        "data.stages[0].sequence_length=16: the model has 8 learned positions; "
        "use 8 or less or model.max_positions=16 or more",
    ),
    (
        {"parallel.tp": 4, "data.stages": [DataPhaseOptions(from_step=1, sequence_length=10)]},
        None,
        "data.stages[0].sequence_length=10: must be a multiple of parallel.tp=4 with parallel.sequence_parallel=true; "
        "use 8, 12 or parallel.sequence_parallel=false",
    ),
]
