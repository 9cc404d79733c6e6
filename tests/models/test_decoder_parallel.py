"""The decoder split over tensor-parallel ranks against the same decoder on one rank: loss, every gradient, dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megastack.comm.collectives import all_gather, all_reduce
from megastack.errors import PlacementError
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import local_box
from megastack.placement.module import placements_of
from megastack.placement.placement import Ones, Placement
from megastack.testing.ranks import run_ranks
from tests.models.model_cases import GPT2, LLAMA, QWEN, build, microbatch, tiny

DROPS = {"dropout": 0.1, "attention_dropout": 0.1}
MODELS = {
    "llama": (LLAMA, False),
    "llama_docs_dropout": (LLAMA | DROPS, True),
    "mqa": (LLAMA | {"kv_groups": 1}, True),
    "qwen": (QWEN, False),
    "qwen_bias_dropout": (QWEN | DROPS | {"bias": True, "tied": True}, False),
    "gpt2": (GPT2, False),
    "gpt2_docs_dropout": (GPT2 | DROPS, True),
}
SLOPED = {"_target_": f"{__name__}.SlopedMLP"}


class SlopedMLP(ParallelMLP):
    """A user's layer with a replicated parameter on a split tensor, and another non-linearity."""

    slope: nn.Parameter

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"slope": Placement((2,), partial=frozenset({Axis.TP}), init=Ones(), decay=False)}

    def activate(self, up: Tensor) -> Tensor:
        gate, value = up.unbind(-2)
        return torch.sigmoid(gate * self.slope[0]) * value * self.slope[1]


def whole_gradient(gradient: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    """What the gradient of this rank's shard becomes once the sums that its placement declares are made."""
    group, shard = mesh[Axis.TP], placement.shards.get(Axis.TP)
    if Axis.TP in placement.partial:
        return all_reduce(gradient, group)
    if shard is not None and shard.copies > 1:
        first = group.rank // shard.copies * shard.copies
        return all_reduce(gradient, mesh.subgroup(Axis.TP, range(first, first + shard.copies)))
    return gradient


def differences(model, documents: bool, shape: MeshShape, sequence_parallel: bool) -> dict[str, float]:
    """How far loss, gradients and initial weights of this rank are from those of one rank, the largest by name."""
    mesh = Mesh.from_environment(shape)
    config = tiny(model, tp=shape.tp, sequence_parallel=sequence_parallel, label_smoothing=0.1, z_loss=0.01)
    single, split = build(config, Mesh.single()), build(config, mesh)
    batch = microbatch(documents=documents)
    expected, found = single({}, batch), split({}, batch)
    expected.objective.backward()
    found.objective.backward()
    result = {"loss": abs((found.report - expected.report).item() / expected.report.item())}
    references = dict(single.named_parameters())
    for name, placement in placements_of(split).items():
        parameter = dict(split.named_parameters())[name]
        box = local_box(placement, shape, mesh.coordinates)
        here = tuple(slice(size) for size in box.size)
        gradient = whole_gradient(parameter.grad, placement, mesh)
        result[name] = (gradient[here] - references[name].grad[box.slices]).abs().max().item()
        assert torch.equal(parameter[here], references[name][box.slices]), name
        padding = gradient.clone()
        padding[here] = 0
        assert not padding.any(), f"{name}: a gradient in the padding"
        if Axis.TP not in placement.shards:
            everyone = all_gather(gradient[None], mesh[Axis.TP])
            assert all(torch.equal(other, gradient) for other in everyone), f"{name}: replicas differ"
    return result


def every_model(tp: int) -> dict[str, float]:
    found = {}
    for name, (model, documents) in MODELS.items():
        for sequence_parallel in (False, True):
            for part, value in differences(model, documents, MeshShape(tp=tp), sequence_parallel).items():
                found[f"{name} sp={sequence_parallel} {part}"] = value
    return found


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_loss_and_every_gradient_equal_one_rank(tp):
    for rank in run_ranks(every_model, tp, tp):
        worst = max(rank, key=lambda name: rank[name])
        assert rank[worst] < 1e-11, f"{worst}: {rank[worst]}"
        assert len(rank) > 2 * len(MODELS) * 15


def user_layers() -> list[dict[str, float]]:
    return [differences(LLAMA | {"mlp": SLOPED}, True, MeshShape(tp=2), sp) for sp in (False, True)]


def test_a_users_layer_with_a_replicated_parameter_equals_one_rank():
    for rank in run_ranks(user_layers, 2):
        for found in rank:
            assert "blocks.1.mlp.slope" in found
            assert max(found.values()) < 1e-11, found


def leak() -> list[bool]:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    decoder, batch = build(tiny(LLAMA, tp=2), mesh), microbatch(documents=True)
    before = decoder.logits({}, batch)
    batch.tokens_BS[0, 2] = (batch.tokens_BS[0, 2] + 1) % 37
    after = decoder.logits({}, batch)
    return [torch.equal(before[0, 5:], after[0, 5:]), torch.equal(before[0, 2:5], after[0, 2:5])]


def test_documents_stay_apart_on_two_ranks():
    assert run_ranks(leak, 2) == [[True, False]] * 2


def traffic(model, sequence_parallel: bool) -> tuple[int, int]:
    """Bytes that one block sends in a forward and backward, and how many operations."""
    mesh = Mesh.from_environment(MeshShape(tp=2))
    config = tiny(model, tp=2, sequence_parallel=sequence_parallel)
    sent = []
    for layers in (1, 2):
        decoder = build(config, mesh, layers=range(layers), head=False)
        mesh.ledger.reset()
        decoder({}, microbatch())["hidden"].sum().backward()
        total = mesh.ledger.total("tp")
        sent.append((total.wire_bytes, total.calls))
    return sent[1][0] - sent[0][0], sent[1][1] - sent[0][1]


@pytest.mark.parametrize("model", [LLAMA, QWEN, GPT2], ids=["llama", "qwen", "gpt2"])
def test_a_block_sends_what_its_four_products_need(model):
    elements = 2 * 8 * 16  # B S D
    for sequence_parallel, factor, calls in ((False, 8, 4), (True, 10, 10)):
        for bytes_, operations in run_ranks(traffic, 2, model, sequence_parallel):
            assert bytes_ == factor * elements * 8 // 2, f"sp={sequence_parallel}"
            assert operations == calls


def too_many_ranks() -> str:
    mesh = Mesh.from_environment(MeshShape(tp=4))
    with pytest.raises(PlacementError) as error:
        build(tiny(LLAMA | {"heads": 6, "head_dim": 4}, tp=4), mesh)
    return str(error.value)


def test_heads_that_do_not_divide_are_rejected_by_name():
    message = run_ranks(too_many_ranks, 4)[0]
    assert "tp=4" in message and "heads=6" in message and "use 1, 2 or 6" in message
