"""Overrides are sorted into groups, keys and errors; sweeps are expanded to jobs."""

from __future__ import annotations

import pytest

from megastack.config.hydra_session import session
from megastack.config.overrides import read_overrides, sweep_jobs
from megastack.errors import ConfigError


def test_keys_can_be_set_even_if_no_file_sets_them() -> None:
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
    assert result.errors == []
    assert result.valid == [
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
        ("run.name=☃", "run.name=☃: cannot be read; use quotes within quotes: key='\"text\"'"),
        ("parallel.tp=1,2", "parallel.tp=1,2: has several values; use -m for a sweep or [1,2] for a list"),
        ("seed=choice(1,2)", "seed=choice(1,2): has several values; use -m for a sweep"),
        (
            "model=llama_tiny,gpt2_tiny",
            "model=llama_tiny,gpt2_tiny: has several values; use -m for a sweep",
        ),
        ("~optim.clip_norm", "~optim.clip_norm=null: a key cannot be removed; use optim.clip_norm=null"),
        ("hydra.run.dir=x", "hydra.run.dir=x: settings of Hydra are not used; use run.root, run.dir or -m"),
        ("hydra/launcher=x", "hydra/launcher=x: settings of Hydra are not used; use run.root, run.dir or -m"),
        ("precision=fp31", "precision=fp31: no such file in this config group; use bf16, fp16, fp32 or fp64"),
        (
            "model={layers: 2}",
            "model={layers: 2}: must be the name of a file in this config group; use model.KEY=VALUE",
        ),
        ("models/tiny=x", "models/tiny=x: no such config group; use "),
        ("seed.x=3", "seed.x=3: no such key"),
        ("optim.betas.0=0.8", "optim.betas.0=0.8: no such key"),
    ],
)
def test_an_invalid_override(override: str, line: str) -> None:
    with session() as hydra:
        result = read_overrides(["seed=1", override], hydra)
    assert result.valid == ["++seed=1"]
    [error] = result.errors
    assert str(error).startswith(line)


def test_a_sweep_is_a_product_in_order() -> None:
    jobs = sweep_jobs(["model=llama_tiny", "parallel.tp=1,2", "parallel.pp=1,2"])
    assert jobs == [
        ["model=llama_tiny", "parallel.tp=1", "parallel.pp=1"],
        ["model=llama_tiny", "parallel.tp=1", "parallel.pp=2"],
        ["model=llama_tiny", "parallel.tp=2", "parallel.pp=1"],
        ["model=llama_tiny", "parallel.tp=2", "parallel.pp=2"],
    ]


def test_repeated_values_of_a_sweep_are_separate_jobs() -> None:
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


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("seed=choice(3,1)", ["3", "1"]),
        ("seed=sort(3,1,2)", ["1", "2", "3"]),
        ("seed=sort(3,1,2,reverse=true)", ["3", "2", "1"]),
        ("seed=tag(x,choice(1,2))", ["1", "2"]),
        ("seed=int(1,2)", ["1", "2"]),
        ("optim.lr=range(1,2,0.5)", ["1.0", "1.5"]),
        ("model=glob([*_tiny,llama_*],exclude=[gpt*,*byte])", ["llama_tiny"]),
    ],
)
def test_every_kind_of_sweep(override: str, values: list[str]) -> None:
    key = override.partition("=")[0]
    assert sweep_jobs([override]) == [[f"{key}={value}"] for value in values]


def test_a_shuffle_has_all_values() -> None:
    assert sorted(sweep_jobs(["seed=shuffle(range(1,4))"])) == [["seed=1"], ["seed=2"], ["seed=3"]]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.lr=interval(0,1)", "optim.lr=interval(0,1): cannot be read as a sweep; use key=1,2 or group=a,b"),
        ("optim.lr=tag(x,interval(0,1))", "optim.lr=tag(x,interval(0,1)): cannot be read as a sweep; use "),
        (
            "optim.lr=glob(*)",
            "optim.lr=glob(*): glob selects files of a config group, and this is not one; use optim.lr=1,2",
        ),
        (
            "nothing=glob(*)",
            "nothing=glob(*): glob selects files of a config group, and this is not one; use nothing=1,2",
        ),
        (
            "precision=glob(x*)",
            "precision=glob(x*): no file of this config group matches; use bf16, fp16, fp32 or fp64",
        ),
        ("seed=range(3,0)", "seed=range(3,0): has no values; use key=1,2 or group=a,b"),
        ("seed=range(0,1,0)", "seed=range(0,1,0): cannot be read as a sweep; use "),
        ("seed=range(0,inf)", "seed=range(0,inf): has more than 10,000 values"),
        ("seed=range(a)", "seed=range(a): cannot be read as a sweep; use "),
        ("seed=choice()", "seed=choice(): cannot be read as a sweep; use "),
        ("seed=choice(1,2", "seed=choice(1,2: cannot be read as a sweep; use "),
        ("seed=sort(1,a)", "seed=sort(1,a): cannot be read as a sweep; use "),
        ("seed=1,,2", "seed=1,,2: cannot be read as a sweep; use "),
        ("seed=1,", "seed=1,: cannot be read as a sweep; use "),
    ],
)
def test_a_sweep_without_a_list_of_values_is_an_error(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_jobs(["parallel.tp=1,2", override])
    assert str(caught.value).startswith(line)


def test_too_many_jobs_are_an_error() -> None:
    with pytest.raises(ConfigError, match="-m: the product has 100,000,000 jobs; use at most 10,000"):
        sweep_jobs(["seed=range(10000)", "run.steps=range(10000)"])
