"""What one training step sends, on every rank and axis, against the closed forms of the pages of the axes.

The forms are computed here from sizes alone; the only thing taken from the package is how layers are cut into stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest

from megastack.assemble.training import build_training
from megastack.comm.traffic import Traffic
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.mesh.mesh import Mesh
from megastack.models.stages import StageSlice, stage_slices
from megastack.testing.ranks import run_ranks
from tests.parity.cases import FAMILIES, LAYOUTS, configured, dataset

BYTES = 8
RING = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
}
Records = Mapping[tuple[str, str], Traffic]
Kinds = Counter[tuple[bool, int, bool, bool]]
"""Elements by (decays, ranks of tp to sum over, is tied, is whole on each rank of tp)."""


class ClosedForm:
    """The traffic of one rank, added up from the tables of the pages."""

    def __init__(self, config: TrainConfig, rank: int) -> None:
        self.config, self.model = config, config.model
        self.shape = mesh_shape(config)
        self.at = self.shape.coordinates(rank)
        self.split = config.parallel.sequence_parallel and self.shape.tp > 1
        self.rows = config.batch.micro_size * config.batch.sequence_length
        self.hidden = self.rows * self.model.hidden  # N = B·S·D
        self.count = config.batch.global_size // (config.batch.micro_size * self.shape.dp)
        stages = stage_slices(config, self.shape.pp * config.schedule.chunks)
        self.stages = list(enumerate(stages))
        self.own = [stage for index, stage in self.stages if index % self.shape.pp == self.at["pp"]]  # type: ignore[index]
        self.found: dict[tuple[str, str], Traffic] = defaultdict(Traffic)

    def add(self, axis: str, op: str, size: int, elements: int, calls: int = 1) -> None:
        """``calls`` operations over ``size`` ranks; ``elements`` of one of them."""
        if size > 1 and calls:
            payload = calls * elements * BYTES
            self.found[axis, op] += Traffic(calls, payload, int(RING[op](size) * payload))

    def records(self) -> Records:
        for stage in self.own:
            self.tensor_axis(stage)
        self.pipeline_axis()
        self.gradients()
        self.scalars()
        return dict(self.found)

    def tensor_axis(self, stage: StageSlice) -> None:
        """docs/tensor_parallel.md, the table of what each layer sends; times the microbatches."""
        blocks, t, times = len(stage.layers), self.shape.tp, self.count
        if self.split:
            gathers = 6 * blocks + stage.embedding + 2 * stage.head
            scatters = 4 * blocks + stage.embedding + stage.head
            self.add("tp", "all_gather", t, self.hidden, times * gathers)
            self.add("tp", "reduce_scatter", t, self.hidden, times * scatters)
        else:
            self.add("tp", "all_reduce", t, self.hidden, times * (4 * blocks + stage.embedding + stage.head))
        numbers = 3 if self.config.loss.label_smoothing else 2
        self.add("tp", "all_gather", t, numbers * self.rows * t, times * stage.head)

    def pipeline_axis(self) -> None:
        """docs/pipeline.md: a stage's output forwards, the gradient of its input backwards, unless both are here."""
        pp = self.shape.pp
        for index, _ in self.stages[:-1]:
            for sender in (index, index + 1):
                if pp > 1 and sender % pp == self.at["pp"]:  # type: ignore[index]
                    self.add("pp", "send", 2, self.hidden // (self.shape.tp if self.split else 1), self.count)

    def gradients(self) -> None:
        """docs/data_parallel.md: one bucket for each kind here, for all are small; shards for stages 2 and 3."""
        zero, dp = self.config.parallel.zero, self.shape.dp
        if zero.stage >= 2 and dp > 1:
            self.shards()
            return
        for (_, reduced, tied, _), elements in self.kinds(self.own).items():
            slices = dp if zero.stage == 1 else 1
            whole = -(-elements // (2 * slices)) * 2 * slices if slices > 1 else elements  # slices begin at 16 bytes
            for op in ("reduce_scatter", "all_gather") if slices > 1 else ("all_reduce",):
                self.add("dp", op, dp, whole)
            if reduced:
                self.add("tp", "all_reduce", reduced, whole // slices)
            if tied:
                self.add("pp", "all_reduce", 2, whole // slices)

    def shards(self) -> None:
        """Gathers and reductions unit by unit, then sums of shards, all of one group at once."""
        zero, dp = self.config.parallel.zero, self.shape.dp
        reductions = self.count if zero.reduce == "microbatch" else 1
        for elements, gathers in (unit for stage in self.own for unit in self.units(stage)):
            times = gathers * self.count if zero.gather == "microbatch" else 1
            self.add("dp", "all_gather", dp, elements, times)
            self.add("dp", "reduce_scatter", dp, elements, reductions)
        summed: Counter[tuple[str, int]] = Counter()
        for (_, reduced, tied, _), elements in self.kinds(self.own).items():
            summed["tp", reduced] += elements // dp
            summed["pp", 2 if tied else 0] += elements // dp
        for (axis, size), elements in summed.items():
            self.add(axis, "all_reduce", size, elements)

    def units(self, stage: StageSlice) -> Iterator[tuple[int, int]]:
        """Elements of each unit of a stage with parameters, and its gathers for a microbatch where it lets go."""
        model, t = self.model, self.shape.tp
        last = stage.layers[-1] if stage.head else None
        yield from ((sum(self.block().values()), 1 if layer == last else 2) for layer in stage.layers)
        projects = stage.head and model.tied
        if stage.embedding and not projects:
            yield 264 * model.hidden // t, 1
        if stage.embedding and model.positions == "learned":
            yield self.config.batch.sequence_length * model.hidden, 1
        if stage.head:
            yield 264 * model.hidden // t + self.norm, 1

    def kinds(self, stages: Sequence[StageSlice]) -> Kinds:
        """The parameters of some stages together."""
        ends = (any(getattr(stage, end) for stage in stages) for end in ("embedding", "head"))
        kinds = self.ends(*ends)
        for _ in (layer for stage in stages for layer in stage.layers):
            kinds.update(self.block())
        return kinds

    def cut(self, kinds: Kinds, elements: int, *, decays: bool = True, reduced: int = 0, tied: bool = False) -> None:
        """Add a parameter that is cut over tp."""
        kinds[decays, reduced, tied, False] += elements // self.shape.tp

    @property
    def vector(self) -> tuple[bool, int, bool, bool]:
        """The kind of norms and row-parallel biases."""
        return False, self.shape.tp if self.split else 0, False, self.shape.tp > 1

    def block(self) -> Kinds:
        """A block's parameters."""
        model, t = self.model, self.shape.tp
        kinds: Kinds = Counter()
        head_dim = model.hidden // model.heads
        groups = model.kv_groups or model.heads
        copies = max(1, t // groups)
        shared = copies if copies > 1 else 0
        gated = 2 if model.activation == "swiglu" else 1
        self.cut(kinds, 2 * model.heads * head_dim * model.hidden + (gated + 1) * model.ffn * model.hidden)
        self.cut(kinds, 2 * groups * head_dim * model.hidden * copies, reduced=shared)
        kinds[self.vector] += 2 * self.norm
        if model.bias:
            self.cut(kinds, model.heads * head_dim + gated * model.ffn, decays=False)
            self.cut(kinds, 2 * groups * head_dim * copies, decays=False, reduced=shared)
            kinds[self.vector] += 2 * model.hidden
        if model.qk_norm:
            kinds[False, t if t > 1 else 0, False, t > 1] += 2 * head_dim
        return kinds

    def ends(self, first: bool, last: bool) -> Kinds:
        """What belongs to no block on ranks that hold the embedding, or the head."""
        model, t = self.model, self.shape.tp
        kinds: Kinds = Counter()
        rows = 264 * model.hidden  # the padded vocabulary
        if first or (last and model.tied):
            self.cut(kinds, rows, tied=model.tied and self.shape.pp > 1)
        if first and model.positions == "learned":
            kinds[True, t if self.split else 0, False, t > 1] += self.config.batch.sequence_length * model.hidden
        if last:
            kinds[self.vector] += self.norm
            if not model.tied:
                self.cut(kinds, rows)
        return kinds

    @property
    def norm(self) -> int:
        """A norm's elements."""
        return self.model.hidden * (2 if self.model.norm == "layer" else 1)

    def scalars(self) -> None:
        """One number for the norm over pp·tp, or all ranks where slices are shared, and one for the loss over pp·dp."""
        shares = self.config.parallel.zero.stage > 0 and self.shape.dp > 1
        for axes in (("pp", "dp", "tp") if shares else ("pp", "tp"), ("pp", "dp")):
            there = {axis: getattr(self.shape, axis) for axis in axes if getattr(self.shape, axis) > 1}
            size = 1
            for degree in there.values():
                size *= degree
            self.add("_".join(there), "all_reduce", size, 1)


def counted(config: TrainConfig, data: Dataset) -> Records:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh, data)
    mesh.ledger.reset()
    training.step(0)
    return mesh.ledger.records()


def zero(stage: int, **choices: str) -> Mapping[str, Any]:
    return {f"parallel.zero.{key}": value for key, value in {"stage": stage, **choices}.items()}


GPT2 = FAMILIES["gpt2"]
DECAY = {"optim.weight_decay": 0.1}  # so that vectors and matrices have buckets of their own
WHOLE_SEQUENCE = {"parallel.sequence_parallel": False}
TIED, SMOOTH, QK = {"model.tied": True}, {"loss.label_smoothing": 0.1}, {"model.qk_norm": True}
CASES: dict[str, tuple[str, list[Mapping[str, Any]]]] = {
    "data": ("dp4", [{"batch.micro_size": 1}]),
    "data_tied": ("dp2", [TIED, GPT2]),
    "tensor": ("tp2", [WHOLE_SEQUENCE, SMOOTH]),
    "tensor_split_sequence": ("tp2", [GPT2]),
    "tensor_qk_norm": ("tp2", [WHOLE_SEQUENCE, QK]),
    "copies_split_sequence": ("tp4", [{"model.kv_groups": 1}, QK, SMOOTH]),
    "copies": ("tp4", [{"model.kv_groups": 2}, GPT2, WHOLE_SEQUENCE]),
    "pipeline": ("pp4", []),
    "tied_pair": ("pp4", [TIED]),
    "interleaved": ("pp4x2", [{"model.layers": 8}]),
    "interleaved_tied": ("pp2x2", [TIED]),
    "all": ("dp2.tp2.pp2", [QK, SMOOTH, {"model.kv_groups": 1}]),
    "all_tied": ("dp2.tp2.pp2", [TIED, GPT2, WHOLE_SEQUENCE]),
    "zero1": ("dp4", [zero(1), QK]),
    "zero1_all_tied": ("dp2.tp2.pp2", [zero(1), TIED, GPT2]),
    "zero2": ("dp2.tp2.pp2", [zero(2), QK, {"model.kv_groups": 1}]),
    "zero2_tied": ("dp2.pp2", [zero(2, reduce="microbatch"), TIED, GPT2]),
    "zero3": ("dp2", [zero(3, gather="microbatch"), QK]),
    "zero3_tensor": ("dp2.tp2", [zero(3, gather="microbatch", reduce="microbatch"), TIED, GPT2]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_step_sends_what_the_pages_say(case: str) -> None:
    layout, changes = CASES[case]
    config = configured(LAYOUTS[layout], DECAY, *changes)
    for rank, found in enumerate(run_ranks(counted, mesh_shape(config).world_size, config, dataset())):
        expected = ClosedForm(config, rank).records()
        assert found == expected, f"rank {rank}"
        assert found


def test_the_closed_forms_of_a_block_are_those_of_the_page() -> None:
    """8·B·S·D·(t−1)/t elements a block and microbatch, 10 with a split sequence."""
    for changes, factor in ((WHOLE_SEQUENCE, 8), ({}, 10)):
        sent = []
        for layers in (4, 5):
            form = ClosedForm(configured({"parallel.tp": 4, "model.layers": layers}, changes), 0)
            form.tensor_axis(form.own[0])
            sent.append(sum(traffic.wire_bytes for traffic in form.found.values()))
        assert sent[1] - sent[0] == factor * form.hidden * 3 // 4 * BYTES * form.count


def test_messages_of_a_pipeline_are_those_of_the_page() -> None:
    """2·M·(p·v − 1)·B·S·D elements in all."""
    config = configured(LAYOUTS["pp4x2"], {"model.layers": 8})
    forms = [ClosedForm(config, rank) for rank in range(4)]
    for form in forms:
        form.pipeline_axis()
    total = sum(form.found["pp", "send"].wire_bytes for form in forms)
    assert total == 2 * forms[0].count * (4 * 2 - 1) * forms[0].hidden * BYTES
