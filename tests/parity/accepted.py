"""All layouts of up to eight ranks for six model shapes, the rules that each violates, and its outcome when run.

A forced layout is run without the rules. It is built in the order of a run (schedule, stages, loader, first forward),
and after each part the ranks agree whether any of them raised. An error on a single rank thus counts as an error of the
layout, and no rank waits for one that has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from math import prod
from typing import Any

from megastack.assemble.stages import build_stages
from megastack.assemble.training import Training, build_training
from megastack.comm.objects import all_gather_objects
from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import violations
from megastack.config.schema import ScheduleOptions, TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import MegastackError, Violation
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.stages import configured_schedule
from megastack.testing.layouts import layout_text
from megastack.testing.ranks import run_ranks
from tests.parity.cases import FAMILIES, Changes, configured, dataset
from tests.parity.cover import Row

MOST_RANKS = 8
SAMPLE = 7
"""Stride of the sample for quick tests; coprime to every number of choices, so that all combinations occur."""
BATCH_OF_LAYOUTS = 25
"""Layouts per launch of ranks."""

SHAPES: dict[str, Changes] = {
    "multi-head, 8 layers": {"model.layers": 8},
    "grouped-query, 2 of 6 heads": {"model.heads": 6, "model.kv_groups": 2, "model.head_dim": 4},
    "multi-query, 8 heads, 2 layers": {"model.heads": 8, "model.kv_groups": 1, "model.layers": 2},
    "ffn of 21": {"model.heads": 6, "model.kv_groups": 6, "model.head_dim": 4, "model.ffn": 21},
    "vocabulary of 259, unpadded, 2 layers": {
        "model.heads": 14,
        "model.kv_groups": 14,
        "model.head_dim": 2,
        "model.ffn": 28,
        "model.vocab_multiple": 1,
        "model.layers": 2,
    },
    "GPT-2-like, tied": FAMILIES["gpt2"] | {"model.tied": True},
}
SCHEDULES = {
    f"{name}, {chunks} a rank": ScheduleOptions(name=name, chunks=chunks)
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2")
    for chunks in (1, 2)
}
BATCHES = {"2 in 1s": (2, 1), "6 in 2s": (6, 2), "8 in 1s": (8, 1), "10 in 2s": (10, 2)}
SEQUENCES = ("8", "9")
DEGREES = [degrees for degrees in product(range(1, MOST_RANKS + 1), repeat=3) if prod(degrees) <= MOST_RANKS]


def rows() -> Iterator[Row]:
    """Every layout; with and without sequence parallelism if tp is greater than 1."""
    for (dp, tp, pp), shape, schedule, batch, sequence in product(DEGREES, SHAPES, SCHEDULES, BATCHES, SEQUENCES):
        for parallel in ("on", "off") if tp > 1 else ("off",):
            degrees = {"dp": str(dp), "tp": str(tp), "pp": str(pp)}
            chosen = {
                "shape": shape,
                "schedule": schedule,
                "batch": batch,
                "sequence": sequence,
                "sequence parallel": parallel,
            }
            yield chosen | degrees


@cache
def _of_shape(shape: str) -> TrainConfig:
    return configured({"model.layers": 4} | SHAPES[shape])


def config_of(row: Row) -> TrainConfig:
    """The configuration of a layout, valid or not."""
    base = _of_shape(row["shape"])
    global_size, micro_size = BATCHES[row["batch"]]
    degrees = {axis: int(row[axis]) for axis in ("dp", "tp", "pp")}
    return replace(
        base,
        parallel=replace(base.parallel, **degrees, sequence_parallel=row["sequence parallel"] == "on"),
        schedule=SCHEDULES[row["schedule"]],
        batch=replace(base.batch, global_size=global_size, micro_size=micro_size, sequence_length=int(row["sequence"])),
    )


def work_of(row: Row) -> int:
    """Approximate cost of running a layout: microbatches of one rank, with a few messages per layer under tp."""
    config = config_of(row)
    microbatches = config.batch.global_size // (config.batch.micro_size * config.parallel.dp)
    return microbatches * config.model.layers * config.parallel.tp * config.parallel.pp


def reference_of(config: TrainConfig) -> TrainConfig:
    """The same training on one rank with microbatches of one sample."""
    return replace(
        config,
        parallel=replace(config.parallel, dp=1, tp=1, pp=1),
        schedule=ScheduleOptions(),
        batch=replace(config.batch, micro_size=1),
    )


@cache
def layouts_with_rules(stride: int = 1) -> list[tuple[Row, tuple[str, ...]]]:
    """Every ``stride``-th layout with the rules that it violates."""
    return [(row, tuple(map(rule_of, violations(config_of(row))))) for row in islice(rows(), 0, None, stride)]


def rule_of(violation: Violation) -> str:
    """A violated rule without its numbers."""
    return f"{violation.key}: " + re.sub(r"\b\d+\b", "N", violation.rule)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a layout: the first error of any rank, or loss and gradient norm of the first step."""

    error: str | None = None
    loss: float = 0.0
    norm: float = 0.0

    def differs(self, other: Outcome) -> bool:
        """Whether one of the two did not run, or they differ by more than rounding."""
        if self.error or other.error:
            return True
        pairs = ((self.loss, other.loss), (self.norm, other.norm))
        return not all(abs(a - b) <= 1e-10 * abs(b) for a, b in pairs)


def outcomes(configs: Sequence[TrainConfig], *, force: bool = False) -> list[Outcome]:
    """The outcome of each layout; one launch of ranks per mesh shape. Forced layouts may fail to build."""
    found: dict[int, Outcome] = {}
    by_mesh: dict[MeshShape, list[int]] = {}
    for at, config in enumerate(configs):
        by_mesh.setdefault(mesh_shape(config), []).append(at)
    for shape, places in by_mesh.items():
        for some in (places[at : at + BATCH_OF_LAYOUTS] for at in range(0, len(places), BATCH_OF_LAYOUTS)):
            found |= zip(some, _on_ranks(shape, [configs[at] for at in some], force), strict=True)
    return [found[at] for at in range(len(configs))]


def _on_ranks(shape: MeshShape, configs: Sequence[TrainConfig], force: bool) -> list[Outcome]:
    data = {length: dataset(length) for length in {config.batch.sequence_length for config in configs}}
    ranks = run_ranks(_attempt_all, shape.world_size, shape, configs, data, force, timeout=180)
    for config, outcomes_of_ranks in zip(configs, zip(*ranks, strict=True), strict=True):
        assert len(set(outcomes_of_ranks)) == 1, f"{layout_text(config)}: ranks disagree: {outcomes_of_ranks}"
    return list(ranks[0])


def _attempt_all(
    shape: MeshShape, configs: Sequence[TrainConfig], data: Mapping[int, Dataset], force: bool
) -> list[Outcome]:
    mesh = Mesh.from_environment(shape, device="cpu")
    found = []
    for config in configs:
        try:
            found.append((_forced if force else _step)(config, mesh, data[config.batch.sequence_length]))
        except Exception as error:
            error.add_note(f"while running {layout_text(config)}: {config.model}, {config.batch}, {config.schedule}")
            raise
    return found


def _step(config: TrainConfig, mesh: Mesh, data: Dataset) -> Outcome:
    return _stepped(build_training(config, mesh, data))


def _stepped(training: Training) -> Outcome:
    outcome = training.step(0)
    return Outcome(None, float(outcome.loss), float(outcome.grad_norm))


def _forced(config: TrainConfig, mesh: Mesh, data: Dataset) -> Outcome:
    built: list[Training] = []
    for part in (
        lambda: build_stages(config, mesh, configured_schedule(config, mesh.shape)),
        lambda: built.append(build_training(config, mesh, data)),
        lambda: _first_forward(built[0]),
    ):
        if error := _agreed_error(part, mesh):
            return Outcome(error)
    return _stepped(built[0])


def _first_forward(training: Training) -> None:
    """Run the stage with the embedding on the ranks that have it."""
    first = training.stages[0]
    if first.has_embedding:
        first({}, training.step.loader.step(0)[0])


def _agreed_error(part: Callable[[], Any], mesh: Mesh) -> str | None:
    own = None
    try:
        part()
    except MegastackError as error:
        own = f"{type(error).__name__}: {error}"
    return next((error for error in all_gather_objects(own, mesh.world) if error is not None), None)
