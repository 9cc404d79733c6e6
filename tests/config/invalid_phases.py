"""Values that violate a rule about data phases."""

from __future__ import annotations

from megastack.config.choices import DataSource
from megastack.config.data_schema import BlendSource, DataPhaseOptions
from tests.config.config_cases import BIN_37, LEARNED, InvalidCase

PHASES: list[InvalidCase] = [
    (
        {
            "data.phases": [
                DataPhaseOptions(from_step=2, sequence_length=4),
                DataPhaseOptions(from_step=2, sequence_length=8),
            ]
        },
        None,
        "data.phases[1].from_step=2: must come after the previous phase, which begins at step 2; use 3 or more",
    ),
    (
        {"data.phases": [DataPhaseOptions(from_step=0, sequence_length=4)]},
        None,
        "data.phases[0].from_step=0: must be at least 1; use 1 or more",
    ),
    (
        {"data.phases": [DataPhaseOptions(from_step=3, sequence_length=4)]},
        None,
        "data.phases[0].from_step=3: never begins: run.steps=3; use 2 or less or run.steps=4 or more",
    ),
    (
        {"data.phases": [DataPhaseOptions(from_step=1)]},
        None,
        "data.phases[0]={from_step: 1}: changes neither the data nor the sequence length; "
        "use sequence_length, paths or blend",
    ),
    (
        {"data.phases": [DataPhaseOptions(from_step=1, paths=["a.txt"])]},
        None,
        "data.phases[0].paths=[a.txt]: data.phases[0].source=builtin reads no files; use [], "
        "data.phases[0].source=text, data.phases[0].source=jsonl or data.phases[0].source=bin",
    ),
    (
        {"data.phases": [DataPhaseOptions(from_step=1, source=DataSource.text)]},
        None,
        "data.phases[0].paths=[]: data.phases[0].source=text needs at least one path; "
        "use data.phases[0].paths=[FILE,…]",
    ),
    (
        {"data.phases": [DataPhaseOptions(from_step=1, paths=["b"], blend=[BlendSource(paths=["a"], weight=1.0)])]},
        None,
        "data.phases[0].blend=[[a]]: the phase also sets a single source; use null or no source and paths",
    ),
    (
        {"data.phases": [DataPhaseOptions(from_step=1, blend=[])]},
        None,
        "data.phases[0].blend=[]: has no source; "
        "use data.phases[0].paths=[FILE,…], data.phases[0].source=builtin or null",
    ),
    (
        {"data.phases": [DataPhaseOptions(from_step=1, blend=[BlendSource(paths=["a"], weight=-2.0)])]},
        None,
        "data.phases[0].blend[0].weight=-2.0: must be at least 0; use 0 or more",
    ),
    (
        BIN_37 | {"data.phases": [DataPhaseOptions(from_step=1, source=DataSource.text, paths=["a.txt"])]},
        None,
        "data.phases[0].source=text: data.tokenizer=byte has 256 ids, more than model.vocab=37; "
        "use bin or model.vocab=256 or more",
    ),
    (
        {"data.pack": False, "data.phases": [DataPhaseOptions(from_step=1, source=DataSource.bin, paths=["a"])]},
        None,
        "data.phases[0].source=bin: token files are packed, and data.pack=false; use text, jsonl or data.pack=true",
    ),
    (
        LEARNED | {"data.phases": [DataPhaseOptions(from_step=1, sequence_length=16)]},
        None,
        "data.phases[0].sequence_length=16: the model has 8 learned positions; "
        "use 8 or less or model.max_positions=16 or more",
    ),
    (
        {"parallel.tp": 4, "data.phases": [DataPhaseOptions(from_step=1, sequence_length=10)]},
        None,
        "data.phases[0].sequence_length=10: must be a multiple of parallel.tp=4 with parallel.sequence_parallel=true; "
        "use 8, 12 or parallel.sequence_parallel=false",
    ),
]
