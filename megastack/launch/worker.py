"""What a rank does: find its place on the mesh, build the run, train, and say how it ended.

The same code serves ranks that megastack's launcher forked, ranks of torchrun and ranks of srun. A rank that fails
writes its own account before it raises, since whoever notices a failure first is seldom who failed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastack.build import Training, build_loop, build_training
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.mesh.mesh import Mesh
from megastack.observe.failure import write_failure
from megastack.observe.folder import RunFolder
from megastack.observe.logging import set_up_logging
from megastack.training.loop import Loop
from megastack.training.signals import StopRequest
from megastack.training.state import RunResult


@dataclass(frozen=True)
class Assignment:
    """What the launcher decided once for all ranks.

    Attributes:
        config: a legal configuration.
        folder: the run folder, which exists.
        resume: the checkpoint to continue from.
    """

    config: TrainConfig
    folder: Path
    resume: Path | None = None


def work(assignment: Assignment, dataset: Dataset | None = None) -> RunResult:
    """Train on this rank; to be called on every rank of the world, with rank variables in the environment."""
    config, folder = assignment.config, RunFolder(assignment.folder)
    torch.set_num_threads(threads_per_rank(config))
    stop = StopRequest(config.run.time_limit_s)
    stop.install()
    shape = mesh_shape(config, int(os.environ.get("WORLD_SIZE", "1")))
    place = {"rank": int(os.environ.get("RANK", "0")), "loop": None}
    try:
        mesh = Mesh.from_environment(shape, device=config.device.value, timeout_s=config.launch.timeout_s)
        log = set_up_logging(folder.log(mesh.rank), mesh.rank, mesh.coordinates)
        log.info("started with pid %d on %s", os.getpid(), mesh.device)
        loop = place["loop"] = build_loop(_prepare(assignment, mesh, dataset), folder, stop)
        result = loop.run()
        log.info("%s after step %d", result.status, result.step)
    except BaseException as error:
        _account(folder, error, shape.coordinates(int(place["rank"])), place)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _prepare(assignment: Assignment, mesh: Mesh, dataset: Dataset | None) -> Training:
    training = build_training(assignment.config, mesh, dataset)
    if assignment.resume is not None:
        training.restore(assignment.resume)
    elif assignment.config.checkpoint.load_weights is not None:
        training.load_weights(Path(assignment.config.checkpoint.load_weights))
    return training


def _account(folder: RunFolder, error: BaseException, coordinates: Any, place: dict[str, Any]) -> None:
    loop: Loop | None = place["loop"]
    step = loop.progress.step if loop else 0
    action = loop.step.pipeline.current if loop else None
    doing = (loop.doing if loop else "starting") + (f", action {action}" if action else "")
    write_failure(folder.failure(place["rank"]), error, place["rank"], coordinates, step, doing)


def threads_per_rank(config: TrainConfig) -> int:
    """CPU threads of each rank: as configured, else this machine's divided among its ranks."""
    if config.launch.threads_per_rank is not None:
        return config.launch.threads_per_rank
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    return max(1, len(os.sched_getaffinity(0)) // local)
