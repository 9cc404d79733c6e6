"""Which processes a launcher has started as ranks, and their place in the world."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastack.config.compose import compose
from megastack.launch.environment import (
    NCCL_DEFAULTS,
    adopt_slurm,
    environment_warnings,
    first_node,
    is_first_rank,
    is_worker,
    nodes,
    set_nccl_defaults,
    world_size,
)
from megastack.mesh.environment import has_agent

STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}


@pytest.mark.parametrize(
    ("environment", "worker", "world", "first"),
    [
        ({}, False, None, True),
        (TORCHRUN, True, 4, False),
        (TORCHRUN | {"RANK": "0"}, True, 4, True),
        (STEP, True, 8, False),
        (STEP | {"SLURM_PROCID": "0"}, True, 8, True),
        (STEP | {"SLURM_STEP_ID": "batch"}, False, None, True),  # the batch script itself
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, False, None, True),
    ],
)
def test_a_process_is_a_rank_under_torchrun_and_in_a_numbered_slurm_step(environment, worker, world, first):
    assert is_worker(environment) is worker
    assert world_size(environment) == world
    assert is_first_rank(environment) is first


def test_slurm_variables_become_torchs():
    environment = STEP | {"SLURM_STEP_NODELIST": "gpu[003-005,9],cpu1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    adopt_slurm(environment)
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert environment["MASTER_ADDR"] == "gpu003" and 20000 <= int(environment["MASTER_PORT"]) < 40000


def test_two_steps_of_a_job_use_two_ports_and_what_is_set_stays():
    first, second, given = dict(STEP), STEP | {"SLURM_STEP_ID": "1"}, STEP | {"MASTER_PORT": "1234"}
    for environment in (first, second, given):
        adopt_slurm(environment)
    assert first["MASTER_PORT"] != second["MASTER_PORT"] and given["MASTER_PORT"] == "1234"
    torchrun = dict(TORCHRUN)
    adopt_slurm(torchrun)
    assert torchrun == TORCHRUN


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[3-5]", "gpu3"),
        ("gpu[003,007]-ib,x", "gpu003-ib"),
        ("127.0.0.1", "127.0.0.1"),
        ("a-b-c[01-02]", "a-b-c01"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("environment", "count", "agent"),
    [
        ({}, None, False),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "none"}, 3, True),
        (STEP | {"SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4"}, 2, False),
        (STEP | {"SLURM_NNODES": "4"}, 4, False),
        (STEP, None, False),
    ],
)
def test_how_many_machines_there_are_and_who_started_this_process(environment, count, agent):
    assert nodes(environment) == count
    assert has_agent(environment) is agent


def test_nccl_reports_into_the_run_folder_unless_the_user_has_other_settings():
    env: dict[str, str] = {"TORCH_NCCL_PROPAGATE_ERROR": "0"}
    set_nccl_defaults(Path("run/watch/nccl_"), env)
    assert env == NCCL_DEFAULTS | {"TORCH_NCCL_PROPAGATE_ERROR": "0", "TORCH_FR_DUMP_TEMP_FILE": "run/watch/nccl_"}
    env = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "elsewhere"}
    set_nccl_defaults(Path("run/watch/nccl_"), env)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in env


def test_a_single_hardware_queue_is_warned_about_where_messages_may_block_kernels():
    single = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    pipeline = compose(["experiment=parity", "parallel.pp=2", "device=cuda"])
    (warning,) = environment_warnings(pipeline, single)
    assert warning.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1: ") and "parallel.pp > 1" in warning
    sharded = compose(["experiment=parity", "parallel.dp=2", "parallel.zero.stage=3", "device=auto"])
    assert "parallel.zero.stage=3" in environment_warnings(sharded, single)[0]
    for config in (compose(["experiment=parity", "device=cuda"]), compose(["experiment=parity", "device=cpu"])):
        assert environment_warnings(config, single) == []
    assert environment_warnings(pipeline, {}) == environment_warnings(pipeline, {single.popitem()[0]: "8"}) == []
