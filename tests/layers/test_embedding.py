"""The vocabulary-parallel embedding and head against plain torch, alone and tied, with padded rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megastack.errors import PlacementError
from megastack.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.module import initialise_, placements_of
from megastack.testing.ranks import run_ranks
from tests.layers.layer_parity import assert_close, assert_same_gradients, piece, randn, randomised, split_like

B, S, D, V = 2, 4, 6, 5
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]
TOKENS = torch.tensor([[0, 4, 2, 2], [1, 3, 4, 0]])


def embedding_parity(tp: int, sequence_parallel: bool) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    whole = randomised(VocabParallelEmbedding(V, D, Mesh.single(), vocab_multiple=8))
    layer = VocabParallelEmbedding(V, D, mesh, vocab_multiple=8, sequence_parallel=sequence_parallel)
    split_like(layer, whole)
    expected, probe = F.embedding(TOKENS, whole.weight), randn(B, S, D, seed=1)
    (expected * probe).sum().backward()
    out = layer(TOKENS)
    assert_close(out, piece(expected, mesh, 1) if sequence_parallel else expected)
    (out * (piece(probe, mesh, 1).detach() if sequence_parallel else probe)).sum().backward()
    assert_same_gradients(layer, whole)


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_the_embedding_equals_plain_torch(tp: int, sequence_parallel: bool) -> None:
    run_ranks(embedding_parity, tp, tp, sequence_parallel)


def head_parity(tp: int, sequence_parallel: bool) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    whole = randomised(VocabParallelHead(V, D, Mesh.single(), vocab_multiple=8))
    layer = VocabParallelHead(V, D, mesh, vocab_multiple=8, sequence_parallel=sequence_parallel)
    split_like(layer, whole)
    x, probe = randn(B, S, D).requires_grad_(), randn(B, S, 8, seed=1)
    probe[..., V:] = 0  # what the loss sends back for columns that are no tokens
    expected = F.linear(x, whole.weight)
    (expected * probe).sum().backward()
    local_x = piece(x, mesh, 1) if sequence_parallel else x.detach().clone().requires_grad_()
    logits = layer(local_x)
    assert logits.shape == (B, S, 8 // tp)
    assert_close(logits, piece(expected, mesh, 2))
    (logits * piece(probe, mesh, 2).detach()).sum().backward()
    assert_close(local_x.grad, piece(x.grad, mesh, 1) if sequence_parallel else x.grad)
    assert_same_gradients(layer, whole)


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_the_head_equals_plain_torch(tp: int, sequence_parallel: bool) -> None:
    run_ranks(head_parity, tp, tp, sequence_parallel)


class Tied(nn.Module):
    """Embedding and head around nothing, with one weight."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool) -> None:
        super().__init__()
        options = {"vocab_multiple": 8, "sequence_parallel": sequence_parallel}
        self.embedding = VocabParallelEmbedding(V, D, mesh, **options)
        self.head = VocabParallelHead(V, D, mesh, weight=self.embedding.weight, **options)


def tied_parity(tp: int, sequence_parallel: bool) -> list[str]:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    weight, probe = randn(8, D).requires_grad_(), randn(B, S, 8, seed=1)
    (F.linear(F.embedding(TOKENS, weight), weight) * probe).sum().backward()
    model = Tied(mesh, sequence_parallel).double()
    model.embedding.weight.data.copy_(piece(weight, mesh, 0))
    (model.head(model.embedding(TOKENS)) * piece(probe, mesh, 2).detach()).sum().backward()
    assert_close(model.embedding.weight.grad, piece(weight.grad, mesh, 0))
    return list(placements_of(model))


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_a_tied_weight_gets_both_gradients_and_is_one_parameter(tp: int, sequence_parallel: bool) -> None:
    assert run_ranks(tied_parity, tp, tp, sequence_parallel) == [["embedding.weight"]] * tp


def test_a_tied_weight_stays_tied_when_it_leaves_the_meta_device() -> None:
    with torch.device("meta"):
        model = Tied(Mesh.single(), False)
    initialise_(model, Mesh.single(), 0)
    assert model.head.weight is model.embedding.weight
    assert not model.head.weight.is_meta


def test_a_tied_weight_of_another_shape_is_rejected() -> None:
    with pytest.raises(PlacementError, match=r"\(8, 7\).*use \(8, 6\)"):
        VocabParallelHead(V, D, Mesh.single(), vocab_multiple=8, weight=nn.Parameter(torch.zeros(8, 7)))


def traffic(tp: int, sequence_parallel: bool) -> dict[tuple[str, str], tuple[int, int]]:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    options = {"vocab_multiple": 8, "sequence_parallel": sequence_parallel}
    head = VocabParallelHead(V, D, mesh, **options)
    head(VocabParallelEmbedding(V, D, mesh, **options)(TOKENS)).sum().backward()
    return {key: (traffic.calls, traffic.wire_bytes) for key, traffic in mesh.ledger.records().items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_embedding_and_head_send_as_much_as_the_closed_forms(tp: int) -> None:
    once = B * S * D * 4 * (tp - 1) // tp
    plain = {("tp", "all_reduce"): (2, 4 * once)}
    split = {("tp", "reduce_scatter"): (2, 2 * once), ("tp", "all_gather"): (3, 3 * once)}
    assert run_ranks(traffic, tp, tp, False) == [plain] * tp
    assert run_ranks(traffic, tp, tp, True) == [split] * tp


def test_padding_depends_on_the_multiple_alone() -> None:
    for tp in (1, 2, 4):
        layer = VocabParallelEmbedding(37, D, Mesh(MeshShape(tp=tp), 0, torch.device("cpu"), None), vocab_multiple=16)
        placement = layer.placements()["weight"]
        assert (placement.shape, placement.allocated_shape) == ((37, D), (48, D))
        assert layer.weight.shape == (48 // tp, D)


def test_a_padded_vocabulary_that_cannot_be_split_is_rejected() -> None:
    with pytest.raises(PlacementError, match="8"):
        VocabParallelEmbedding(V, D, Mesh(MeshShape(tp=3), 0, torch.device("cpu"), None), vocab_multiple=8)


def test_padded_rows_start_at_zero_and_both_ends_have_the_same_initial_values() -> None:
    embedding = VocabParallelEmbedding(V, D, Mesh.single(), vocab_multiple=8)
    head = VocabParallelHead(V, D, Mesh.single(), vocab_multiple=8)
    assert not embedding.weight[V:].any()
    assert embedding.weight[:V].all()
    assert embedding.placements() == head.placements()
    assert Axis.TP in head.placements()["weight"].shards
