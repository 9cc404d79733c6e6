"""Overrides sorted into groups, keys and faults; sweeps into jobs."""

from __future__ import annotations

import pytest

from megastack.config.hydra_session import session
from megastack.config.overrides import read_overrides, sweep_jobs
from megastack.errors import ConfigError


def test_keys_are_set_whether_or_not_a_file_names_them() -> None:
    given = [
        "parallel.tp=2",
        "+parallel.pp=2",
        "++seed=1",
        "model=llama_tiny",
        "model.mlp={_target_: a.B}",
        "model.mlp.n=3",
    ]
    with session() as hydra:
        result = read_overrides(given, hydra)
    assert result.faults == []
    assert result.legal == [
        "++parallel.tp=2",
        "++parallel.pp=2",
        "++seed=1",
        "model=llama_tiny",
        "++model.mlp={_target_: a.B}",
        "++model.mlp.n=3",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("parallel.tpp=2", "parallel.tpp=2: no such key; use parallel.tp"),
        ("tensor_model_parallel_size=2", "tensor_model_parallel_size=2: no such key; use parallel.tp"),
        ("parallel.tp", "parallel.tp=: cannot be read; use key=value or group=option"),
        ("parallel.tp=[1", "parallel.tp=[1: cannot be read; use key=value or group=option"),
        ("parallel.tp=1,2", "parallel.tp=1,2: has several values; use -m for a sweep or [1,2] for a list"),
        (
            "model=llama_tiny,gpt2_tiny",
            "model=llama_tiny,gpt2_tiny: has several values; use -m for a sweep",
        ),
        ("~optim.clip_norm", "~optim.clip_norm=null: a key cannot be taken away; use optim.clip_norm=null"),
        ("hydra.run.dir=x", "hydra.run.dir=x: settings of Hydra are not used; use run.root, run.dir or -m"),
        ("hydra/launcher=x", "hydra/launcher=x: settings of Hydra are not used; use run.root, run.dir or -m"),
        ("precision=fp31", "precision=fp31: no such file in this config group; use bf16, fp16, fp32 or fp64"),
        (
            "model={layers: 2}",
            "model={layers: 2}: a section is chosen by a file of its group or set key by key",
        ),
        ("models/tiny=x", "models/tiny=x: no such config group; use "),
        ("seed.x=3", "seed.x=3: no such key"),
        ("optim.betas.0=0.8", "optim.betas.0=0.8: no such key"),
    ],
)
def test_an_override_that_is_refused(override: str, line: str) -> None:
    with session() as hydra:
        result = read_overrides(["seed=1", override], hydra)
    assert result.legal == ["++seed=1"]
    [fault] = result.faults
    assert str(fault).startswith(line)


def test_a_sweep_is_the_product_as_written() -> None:
    jobs = sweep_jobs(["model=llama_tiny", "parallel.tp=1,2", "parallel.pp=1,2"])
    assert jobs == [
        ["model=llama_tiny", "parallel.tp=1", "parallel.pp=1"],
        ["model=llama_tiny", "parallel.tp=1", "parallel.pp=2"],
        ["model=llama_tiny", "parallel.tp=2", "parallel.pp=1"],
        ["model=llama_tiny", "parallel.tp=2", "parallel.pp=2"],
    ]


def test_repeated_values_of_a_sweep_are_jobs_of_their_own() -> None:
    assert sweep_jobs(["parallel.tp=1,3,1"]) == [["parallel.tp=1"], ["parallel.tp=3"], ["parallel.tp=1"]]


def test_sweeps_over_ranges_lists_and_files() -> None:
    assert sweep_jobs(["parallel.tp=range(1,4)"]) == [["parallel.tp=1"], ["parallel.tp=2"], ["parallel.tp=3"]]
    assert sweep_jobs(["parallel.layers_per_stage=[1,3],[2,2]"]) == [
        ["parallel.layers_per_stage=[1,3]"],
        ["parallel.layers_per_stage=[2,2]"],
    ]
    assert sweep_jobs(["model=glob(*_tiny)"]) == [["model=gpt2_tiny"], ["model=llama_tiny"]]


def test_without_several_values_there_is_one_job() -> None:
    assert sweep_jobs(["seed=1"]) == [["seed=1"]]
    assert sweep_jobs([]) == [[]]


def test_a_sweep_that_is_no_list_of_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim.lr=interval\(0,1\): cannot be read as a sweep"):
        sweep_jobs(["optim.lr=interval(0,1)"])
