"""Rank variables become one value, or one error that lists every invalid variable."""

from __future__ import annotations

import pytest

from megastack.errors import RankEnvironmentError
from megastack.mesh.environment import PORTS, RankEnvironment, local_rank, local_world_size, read_environment

WORKER = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def changed(environment: dict[str, str], change: dict[str, str | None]) -> dict[str, str]:
    """The environment with some variables set or, where ``None``, unset."""
    return {name: value for name, value in (environment | change).items() if value is not None}


def test_the_variables_of_both_launchers() -> None:
    assert read_environment(WORKER) == RankEnvironment(3, 8, 1, 2, "n1", 29500)
    found = read_environment(STEP)
    assert found == RankEnvironment(3, 8, 1, 4, "n1", found.port if found else None)
    assert read_environment({}) is None
    assert read_environment({"LOCAL_RANK": "1", "MASTER_PORT": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("value", ["", "abc", "0", "70000", "-1", "1.5", "٣", "9" * 5000, "0x10"])
def test_an_invalid_port(value: str) -> None:
    for environment in (WORKER, STEP):
        with pytest.raises(RankEnvironmentError) as caught:
            read_environment(changed(environment, {"MASTER_PORT": value}))
        assert str(caught.value) == (
            f"MASTER_PORT={value}: must be a whole number from 1 to 65535; use a number from 1 to 65535"
        )


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        ({"RANK": "x"}, ["RANK=x: must be a whole number of at least 0"]),
        ({"RANK": ""}, ["RANK=: must be a whole number"]),
        ({"RANK": "-1"}, ["RANK=-1: must be a whole number"]),
        ({"RANK": "8"}, ["RANK=8: must be less than WORLD_SIZE=8; use 0 to 7"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE=: must be a whole number of at least 1"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0: must be a whole number of at least 1"]),
        ({"WORLD_SIZE": None}, ["RANK=3: WORLD_SIZE is not set"]),
        ({"RANK": None}, ["WORLD_SIZE=8: RANK is not set"]),
        ({"LOCAL_RANK": "one"}, ["LOCAL_RANK=one: must be a whole number"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK=2: must be less than LOCAL_WORLD_SIZE=2; use 0 to 1"]),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": None}, ["LOCAL_RANK=8: must be less than WORLD_SIZE=8"]),
        ({"LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0: must be a whole number of at least 1"]),
        ({"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9: must not exceed WORLD_SIZE=8"]),
        ({"MASTER_ADDR": " "}, ["MASTER_ADDR= : must name the machine of rank 0"]),
        (
            {"RANK": "x", "WORLD_SIZE": "y", "LOCAL_RANK": "z", "MASTER_PORT": "p"},
            ["RANK=x: ", "WORLD_SIZE=y: ", "LOCAL_RANK=z: ", "MASTER_PORT=p: "],
        ),
    ],
)
def test_invalid_variables_of_torch(change: dict[str, str | None], starts: list[str]) -> None:
    with pytest.raises(RankEnvironmentError) as caught:
        read_environment(changed(WORKER, change))
    lines = str(caught.value).splitlines()
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"SLURM_NTASKS": None}, "SLURM_NTASKS: is not set"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS=many: must be a whole number"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x: must be a whole number"),
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID=8: must be less than SLURM_NTASKS=8"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID=x: must be a whole number"),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID=x: must be a whole number"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID=x: must be a whole number"),
        ({"SLURM_STEP_TASKS_PER_NODE": "four"}, "SLURM_STEP_TASKS_PER_NODE=four: must be counts of tasks"),
        ({"SLURM_STEP_NODELIST": "n[1"}, "SLURM_STEP_NODELIST=n[1: 'n[1' is not a Slurm host list"),
    ],
)
def test_invalid_variables_of_slurm(change: dict[str, str | None], start: str) -> None:
    with pytest.raises(RankEnvironmentError) as caught:
        read_environment(changed(STEP, change))
    assert str(caught.value).startswith(start) and "\n" not in str(caught.value)


@pytest.mark.parametrize("step", ["", "batch", "interactive", "4294967290", "4294967291"])
def test_a_batch_script_and_an_interactive_step_are_not_tasks(step: str) -> None:
    assert read_environment(changed(STEP, {"SLURM_STEP_ID": step})) is None


def test_each_node_has_its_own_count_of_tasks() -> None:
    for node, tasks in enumerate((4, 4, 2)):
        step = STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_NODEID": str(node)}
        found = read_environment(step)
        assert found is not None and found.local_world_size == tasks


def test_derived_ports_avoid_well_known_and_ephemeral_ones_and_differ_between_steps() -> None:
    found = {}
    for job in (0, 1, 77, 4_000_000_000):
        for step in range(20):
            read = read_environment(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            assert read is not None and read.port is not None
            found[job, step] = read.port
    assert all(1024 <= port < 29500 < 32768 for port in found.values()) and len(PORTS) > 9000
    assert len(set(found.values())) == len(found)


def test_the_port_does_not_depend_on_the_task() -> None:
    ports = {
        found.port if (found := read_environment(STEP | {"SLURM_PROCID": str(rank)})) else None for rank in range(8)
    }
    assert len(ports) == 1


@pytest.mark.parametrize("missing", [("MASTER_ADDR",), ("MASTER_PORT",), ("MASTER_ADDR", "MASTER_PORT")])
def test_remaining_variables_of_a_launcher_are_named(missing: tuple[str, ...]) -> None:
    found = read_environment(changed(WORKER, dict.fromkeys(missing)))
    assert found is not None and found.missing == missing
    with pytest.raises(RankEnvironmentError, match=rf"^RANK=3, WORLD_SIZE=8: {' and '.join(missing)} (is|are) not set"):
        found.require_endpoint()


def test_local_ranks_without_a_launcher() -> None:
    assert local_rank({}) is None and local_world_size({}) is None
    assert local_rank({"LOCAL_RANK": "2"}) == 2 and local_world_size({"LOCAL_WORLD_SIZE": "2"}) == 2
    with pytest.raises(RankEnvironmentError, match=r"^LOCAL_RANK=x: must be a whole number"):
        local_rank({"LOCAL_RANK": "x"})
