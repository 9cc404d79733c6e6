"""One denominator: the loss is the sum over all tokens over their number, for any division of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastack.batch import IGNORED_LABEL, Microbatch, StageLoss
from megastack.comm.collectives import all_reduce
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedules.registry import build_schedule
from megastack.testing.ranks import run_ranks
from tests.pipeline.chain import Link, distance, gradients, plain

ROWS, LENGTH = 8, 9


class LabelLoss(nn.Module):
    """The loss of a token is its label times one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, carry: Mapping[str, Any], microbatch: Microbatch) -> StageLoss:
        labels = microbatch.labels_BS
        loss = (labels[labels != IGNORED_LABEL] * self.weight).sum()
        return StageLoss(loss, loss.detach())


def sequence(labels: list[int]) -> Microbatch:
    labels_BS = torch.tensor([labels])
    return Microbatch(torch.zeros_like(labels_BS), labels_BS, torch.zeros_like(labels_BS), None, torch.zeros(1).long())


SHORT, LONG = [4, *[IGNORED_LABEL] * 3], [1, 1, IGNORED_LABEL, 1]


def two_ranks() -> tuple[float, float]:
    mesh, module = Mesh.from_environment(MeshShape(dp=2)), LabelLoss()
    pipeline = Pipeline([module], build_schedule("1f1b", 1, 1, 1), mesh)
    loss = pipeline.run([sequence(SHORT if mesh.rank == 0 else LONG)], 4)
    assert module.weight.grad is not None
    return float(loss), float(all_reduce(module.weight.grad, mesh[Axis.DP]))


def test_one_token_of_loss_4_and_three_of_loss_1_are_1_75() -> None:
    assert run_ranks(two_ranks, 2) == [(1.75, 1.75)] * 2, "over two ranks"
    module = LabelLoss()
    pipeline = Pipeline([module], build_schedule("1f1b", 1, 1, 2), Mesh.single())
    assert float(pipeline.run([sequence(SHORT), sequence(LONG)], 4)) == 1.75, "over two microbatches"
    assert module.weight.grad == 1.75


def test_the_denominator_may_be_a_tensor_and_no_token_at_all_gives_zero() -> None:
    module = LabelLoss()
    pipeline = Pipeline([module], build_schedule("1f1b", 1, 1, 1), Mesh.single())
    assert float(pipeline.run([sequence(LONG)], torch.tensor(3))) == 1
    assert float(pipeline.run([sequence([IGNORED_LABEL] * 4)], 0)) == 0
    assert module.weight.grad == 1


def global_batch() -> Microbatch:
    """Row i has i + 1 valid labels."""
    draw = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, 7, (2, ROWS, LENGTH), generator=draw)
    labels[torch.arange(LENGTH)[None] > torch.arange(ROWS)[:, None]] = IGNORED_LABEL
    return Microbatch(tokens, labels, torch.zeros_like(tokens), None, samples_B=torch.arange(ROWS))


def part(first: int, rows: int) -> Microbatch:
    whole, cut = global_batch(), slice(first, first + rows)
    positions = whole.positions_BS[cut]
    return Microbatch(whole.tokens_BS[cut], whole.labels_BS[cut], positions, None, samples_B=whole.samples_B[cut])


def every_cut(shape: MeshShape) -> dict[int, tuple[float, float]]:
    """By number of microbatches: the loss, and the difference of the gradients from those of the whole batch."""
    mesh, found = Mesh.from_environment(shape), {}
    _, reference = plain(shape.pp, [global_batch()])
    count = ROWS // shape.dp
    while count:
        rows = ROWS // (shape.dp * count)
        schedule = build_schedule("1f1b", shape.pp, 1, count)
        link = Link(mesh.coordinates[Axis.PP], shape.pp)
        batches = [part((m * shape.dp + mesh.coordinates[Axis.DP]) * rows, rows) for m in range(count)]
        loss = Pipeline([link], schedule, mesh).run(batches, 36)
        summed: list[Tensor] = [all_reduce(gradient, mesh[Axis.DP]) for gradient in gradients(link)]
        found[count] = (float(loss), distance(summed, reference[mesh.coordinates[Axis.PP]]))
        count //= 2
    return found


@pytest.mark.parametrize("shape", [MeshShape(pp=pp, dp=dp) for pp in (1, 2) for dp in (1, 2, 4)], ids=str)
def test_loss_and_gradients_are_the_same_for_every_division_of_uneven_sequences(shape: MeshShape) -> None:
    expected = plain(shape.pp, [global_batch()])[0]
    for found in run_ranks(every_cut, shape.world_size, shape):
        assert len(found) == {1: 4, 2: 3, 4: 2}[shape.dp]
        for count, (loss, worst) in found.items():
            assert loss == pytest.approx(expected, rel=1e-13), f"M={count}"
            assert worst < 1e-12, f"M={count}"
