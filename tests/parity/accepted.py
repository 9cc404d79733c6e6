"""Every layout of up to eight ranks for six shapes of model: what the rules say of each, and what it does when it is
run whatever they say.

A layout that is forced to run is built in the order of a run (schedule, stages, loader, the first forward), and after
each part all ranks agree whether it raised. So a fault on one rank alone is a fault of the layout, and nobody waits
for a rank that is gone.
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
"""Of as many layouts one is looked at where time is short. It divides no number of choices, so that all still meet."""
AT_ONCE = 25
"""Layouts that ranks are asked to run in one go."""

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
    """Every layout; sequence parallelism is asked about where tp is more than 1."""
    for (dp, tp, pp), shape, schedule, batch, sequence in product(DEGREES, SHAPES, SCHEDULES, BATCHES, SEQUENCES):
        for split in ("split", "whole") if tp > 1 else ("whole",):
            degrees = {"dp": str(dp), "tp": str(tp), "pp": str(pp)}
            chosen = {"shape": shape, "schedule": schedule, "batch": batch, "sequence": sequence, "between": split}
            yield chosen | degrees


@cache
def _of_shape(shape: str) -> TrainConfig:
    return configured({"model.layers": 4} | SHAPES[shape])


def config_of(row: Row) -> TrainConfig:
    """The configuration of a layout, legal or not."""
    base = _of_shape(row["shape"])
    global_size, micro_size = BATCHES[row["batch"]]
    degrees = {axis: int(row[axis]) for axis in ("dp", "tp", "pp")}
    return replace(
        base,
        parallel=replace(base.parallel, **degrees, sequence_parallel=row["between"] == "split"),
        schedule=SCHEDULES[row["schedule"]],
        batch=replace(base.batch, global_size=global_size, micro_size=micro_size, sequence_length=int(row["sequence"])),
    )


def work_of(row: Row) -> int:
    """What a layout costs to run, roughly: microbatches of one rank, each a few messages a layer under tp."""
    config = config_of(row)
    microbatches = config.batch.global_size // (config.batch.micro_size * config.parallel.dp)
    return microbatches * config.model.layers * config.parallel.tp * config.parallel.pp


def reference_of(config: TrainConfig) -> TrainConfig:
    """The same training on one rank, a sample at a time."""
    return replace(
        config,
        parallel=replace(config.parallel, dp=1, tp=1, pp=1),
        schedule=ScheduleOptions(),
        batch=replace(config.batch, micro_size=1),
    )


@cache
def judged(stride: int = 1) -> list[tuple[Row, tuple[str, ...]]]:
    """Layouts, one of ``stride``, with the rules that they break."""
    return [(row, tuple(map(rule_of, violations(config_of(row))))) for row in islice(rows(), 0, None, stride)]


def rule_of(violation: Violation) -> str:
    """A broken rule without its numbers."""
    return f"{violation.key}: " + re.sub(r"\b\d+\b", "N", violation.rule)


@dataclass(frozen=True)
class Outcome:
    """What a layout did: the first fault of any rank, else the first step's loss and gradient norm."""

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
    """What each of these layouts does; forced ones are not trusted to build. Each mesh has ranks of its own."""
    found: dict[int, Outcome] = {}
    by_mesh: dict[MeshShape, list[int]] = {}
    for at, config in enumerate(configs):
        by_mesh.setdefault(mesh_shape(config), []).append(at)
    for shape, places in by_mesh.items():
        for some in (places[at : at + AT_ONCE] for at in range(0, len(places), AT_ONCE)):
            found |= zip(some, _on_ranks(shape, [configs[at] for at in some], force), strict=True)
    return [found[at] for at in range(len(configs))]


def _on_ranks(shape: MeshShape, configs: Sequence[TrainConfig], force: bool) -> list[Outcome]:
    data = {length: dataset(length) for length in {config.batch.sequence_length for config in configs}}
    ranks = run_ranks(_attempt_all, shape.world_size, shape, configs, data, force, timeout=180)
    for config, told in zip(configs, zip(*ranks, strict=True), strict=True):
        assert len(set(told)) == 1, f"{layout_text(config)}: ranks disagree: {told}"
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
    """The stage that reads tokens, on the ranks that have it."""
    first = training.stages[0]
    if first.has_embedding:
        first({}, training.step.loader.step(0)[0])


def _agreed_error(part: Callable[[], Any], mesh: Mesh) -> str | None:
    own = None
    try:
        part()
    except MegastackError as error:
        own = f"{type(error).__name__}: {error}"
    return next((told for told in all_gather_objects(own, mesh.world) if told is not None), None)
