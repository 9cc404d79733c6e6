"""Layouts of one configuration: the one-rank reference, and every valid layout of N ranks.

The layouts differ only in settings that must not change the mathematics: parallel degrees, sequence parallelism,
pipeline schedule and chunks. They are ordinary configurations, so every layout listed here can be trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megastack.config.choices import ComputeDtype, Device, OptimizerName
from megastack.config.convert import replace_values
from megastack.config.layout_rules import data_parallel_degree, mesh_shape
from megastack.config.rules import violations
from megastack.config.schema import (
    ClusterOptions,
    ParallelOptions,
    RecomputeOptions,
    ScheduleOptions,
    TrainConfig,
)
from megastack.errors import counted
from megastack.layers.spec import divisors
from megastack.pipeline.schedules.registry import schedule_names


def in_double(config: TrainConfig) -> TrainConfig:
    """The same training in fp64 on the CPUs of this machine, not compiled, so that its modules can be traced."""
    precise = {"precision.compute": ComputeDtype.fp64, "precision.reduce": None, "precision.loss_scale": None}
    return replace_values(config, precise | {"compile": False, "device": Device.cpu, "cluster": ClusterOptions()})


def reference_of(config: TrainConfig) -> TrainConfig:
    """The same training on one rank, without sharding, pipeline schedule or recomputation."""
    return replace(
        config,
        parallel=ParallelOptions(dp=1),
        schedule=ScheduleOptions(),
        recompute=RecomputeOptions(),
        compile=False,
    )


def with_sgd(config: TrainConfig) -> TrainConfig:
    """The same training with plain SGD and no clipping, which would hide a constant factor on a gradient."""
    return replace_values(config, {"optim.name": OptimizerName.sgd, "optim.clip_norm": None})


def valid_layouts(config: TrainConfig, ranks: int) -> list[TrainConfig]:
    """Every valid layout of ``ranks`` ranks, with few pipeline stages and low tp first."""
    found = [candidate for candidate in _candidates(config, ranks) if not violations(candidate)]
    return sorted(found, key=lambda c: (c.parallel.pp, c.parallel.tp, c.schedule.chunks))


def _candidates(config: TrainConfig, ranks: int) -> Iterator[TrainConfig]:
    for pp in divisors(ranks):
        for cp in divisors(ranks // pp):
            for tp in divisors(ranks // pp // cp):
                degrees = {"parallel.pp": pp, "parallel.cp": cp, "parallel.tp": tp}
                degrees["parallel.dp"] = ranks // (pp * cp * tp)
                for options in _pipelines(config, pp):
                    for sequence_parallel in (True, False) if tp > 1 else (config.parallel.sequence_parallel,):
                        values = degrees | options | {"parallel.sequence_parallel": sequence_parallel}
                        yield replace_values(config, values)


def _pipelines(config: TrainConfig, pp: int) -> Iterator[dict[str, object]]:
    """Schedules with their chunks; only one schedule for a single stage, since all are the same then."""
    for chunks in range(1, max(1, config.model.layers // pp) + 1):
        stages = pp * chunks
        for name in schedule_names() if stages > 1 else ("1f1b",):
            if name != "custom":
                yield {
                    "schedule": ScheduleOptions(name=name, chunks=chunks, memory_limit=config.schedule.memory_limit),
                    "parallel.layers_per_stage": _layers_per_stage(config, stages),
                }


def _layers_per_stage(config: TrainConfig, stages: int) -> list[int] | None:
    counts = config.parallel.layers_per_stage
    return counts if counts is not None and len(counts) == stages else None


def layout_text(config: TrainConfig) -> str:
    """A short description, for example ``dp2 × tp2 × pp2, sequence parallel, interleaved of 2 chunks``."""
    grid, schedule = config.parallel, config.schedule
    sizes = {"dp": data_parallel_degree(config), "cp": grid.cp, "tp": grid.tp, "pp": grid.pp, "ep": grid.ep}
    words = [" × ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank"]
    if grid.zero.stage:
        shared = f" of {counted(grid.zero.shard_size, 'rank')}" if grid.zero.shard_size else ""
        words.append(f"ZeRO {grid.zero.stage}{shared}")
    if grid.tp > 1:
        words.append("sequence parallel" if grid.sequence_parallel else "no sequence parallelism")
    if grid.pp * schedule.chunks > 1:
        words.append(schedule.name + (f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""))
    return ", ".join(words)


def layout_overrides(config: TrainConfig) -> list[str]:
    """The command-line overrides that select this layout."""
    shape, grid, schedule = mesh_shape(config), config.parallel, config.schedule
    degrees = {"dp": shape.dp, "tp": shape.tp, "pp": shape.pp, "cp": shape.cp}
    found = [f"parallel.{axis}={size}" for axis, size in degrees.items() if size > 1 or axis in ("dp", "tp", "pp")]
    if grid.zero.stage:
        found.append(f"parallel.zero.stage={grid.zero.stage}")
    if grid.zero.shard_size:
        found.append(f"parallel.zero.shard_size={grid.zero.shard_size}")
    if shape.tp > 1:
        found.append(f"parallel.sequence_parallel={str(grid.sequence_parallel).lower()}")
    if shape.pp * schedule.chunks > 1:
        found += [f"schedule={schedule.name}", f"schedule.chunks={schedule.chunks}"]
    return found
