"""Threads of a rank: what decides their number."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastack.cli.main import main
from megastack.config.compose import compose
from megastack.launch.environment import Cpus, choose_threads, cpu_quota, let_threads_sleep, lets_threads_sleep
from tests.tiny_runs import train

SLEEPS = {"OMP_WAIT_POLICY": "passive"}
WIDE = ("model.hidden=1024",)


def _chosen(*overrides: str, cpus: Cpus | None = None, **environment: str) -> str:
    return str(choose_threads(compose(overrides), SLEEPS | environment, cpus or Cpus(8)))


@pytest.mark.parametrize(("value", "count"), [("3", 3), ("5,2", 5), (" 4 ", 4)])
def test_openmps_variable_is_honoured(value: str, count: int) -> None:
    assert _chosen(OMP_NUM_THREADS=value) == f"{count} threads (OMP_NUM_THREADS)"


@pytest.mark.parametrize("value", ["", "0", "-1", "many", ","])
def test_an_invalid_value_is_ignored(value: str) -> None:
    assert _chosen(*WIDE, OMP_NUM_THREADS=value) == "8 threads (8 CPUs, 1 rank here)"


def test_the_key_takes_precedence_over_the_variable() -> None:
    assert _chosen("launch.threads_per_rank=2", OMP_NUM_THREADS="3") == "2 threads (launch.threads_per_rank)"


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        (["model=llama_tiny"], "1 thread (hidden 32 and 256 tokens a microbatch are too small for more)"),
        ([], "1 thread (hidden 64 and 256 tokens a microbatch are too small for more)"),
        (["model.hidden=256"], "4 threads (hidden 256 and 256 tokens a microbatch are too small for more)"),
        (["model.hidden=256", "parallel.tp=2"], "2 threads (hidden 256 and 256 tokens"),
        (["model.hidden=256", "parallel.cp=2"], "2 threads (hidden 256 and 128 tokens"),
        (WIDE, "8 threads (8 CPUs, 1 rank here)"),
    ],
)
def test_the_default_depends_on_the_work(overrides: list[str], chosen: str) -> None:
    assert _chosen(*overrides).startswith(chosen)


@pytest.mark.parametrize(
    ("cpus", "ranks", "chosen"),
    [
        (Cpus(64, quota=1.5), 1, "1 thread (64 CPUs, by quota 1.5, 1 rank here)"),
        (Cpus(64, quota=0.5), 1, "1 thread (64 CPUs, by quota 0.5, 1 rank here)"),
        (Cpus(64, quota=6), 2, "3 threads (64 CPUs, by quota 6, 2 ranks here)"),
        (Cpus(4, quota=16), 1, "4 threads (4 CPUs, 1 rank here)"),
        (Cpus(4), 8, "1 thread (4 CPUs, 8 ranks here)"),
    ],
)
def test_ranks_share_what_the_machine_allows(cpus: Cpus, ranks: int, chosen: str) -> None:
    assert _chosen(*WIDE, cpus=cpus, LOCAL_WORLD_SIZE=str(ranks)) == chosen


def test_the_cpus_of_a_task_of_slurm_are_not_shared() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "LOCAL_WORLD_SIZE": "4"}
    assert _chosen(*WIDE, cpus=Cpus(4), SLURM_CPUS_PER_TASK="4", **step) == "4 threads (SLURM_CPUS_PER_TASK)"
    assert _chosen(*WIDE, cpus=Cpus(2), SLURM_CPUS_PER_TASK="4", **step).startswith("2 threads")
    assert _chosen(*WIDE, cpus=Cpus(4), **step) == "1 thread (4 CPUs, 4 ranks here)"


@pytest.mark.parametrize(("load", "count"), [(0.3, 7), (6.5, 1), (30.0, 1)])
def test_threads_that_spin_leave_busy_cpus_alone(load: float, count: int) -> None:
    cpus = Cpus(8, load=load, installed=8)
    assert choose_threads(compose(WIDE), {}, cpus).count == count
    assert choose_threads(compose(WIDE), {"OMP_WAIT_POLICY": "active"}, cpus).count == count


def test_waiting_threads_sleep_unless_torch_is_loaded_or_the_user_wants_otherwise(monkeypatch) -> None:
    for torch_is_loaded, before, after in (
        (True, {}, {}),
        (False, {}, SLEEPS),
        (False, {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ):
        environment = dict(before)
        with monkeypatch.context() as patch:
            if not torch_is_loaded:
                patch.setattr("sys.modules", {})
            let_threads_sleep(environment)
        assert environment == after
        assert lets_threads_sleep(environment) is (after == SLEEPS)


def test_the_command_line_lets_threads_sleep_before_anything_loads_torch(monkeypatch, capsys) -> None:
    called = list[str]()
    monkeypatch.setattr("megastack.cli.main.let_threads_sleep", lambda: called.append("sleep"))
    assert main(["show", "seed"]) == 0
    assert called == ["sleep"]


def _files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1, V2 = "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n", "0::/a/b\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),  # of the group above
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),  # a namespace of its own
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (  # mounted inside a container, where the path is the host's
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_quota_of_control_groups(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(_files(tmp_path, files)) == quota


def test_the_log_of_a_rank_has_the_choice_and_its_reason(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert train(tmp_path, "run.steps=1", "launch.threads_per_rank=null") == 0
    assert "2 threads (OMP_NUM_THREADS)" in (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
