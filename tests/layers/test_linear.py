"""The split linear layers against plain torch: outputs, all gradients, what they send and when."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megastack.errors import PlacementError
from megastack.layers import linear_ops, weight_products
from megastack.layers.attention import ParallelAttention
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import RMSNorm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.placement import Shard
from megastack.testing.ranks import run_ranks
from tests.layers.layer_parity import assert_close, assert_same_gradients, piece, randn, randomised, split_like

B, S, D = 2, 4, 6
LAYOUTS = [(1, False), (1, True), (2, False), (2, True), (4, False), (4, True)]


def column_parity(tp: int, sequence_parallel: bool) -> None:
    """Three layers that share an input, split at different dims."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    cuts: list[tuple[Any, int]] = [((8, 3), 0), ((2, 4), 1), (12, 0)]
    options: dict[str, Any] = {"bias": True, "sequence_parallel": sequence_parallel}
    wholes = [randomised(ColumnParallelLinear(D, out, Mesh.single(), shard_dim=dim, **options)) for out, dim in cuts]
    layers = [
        split_like(ColumnParallelLinear(D, out, mesh, shard_dim=dim, **options), whole)
        for (out, dim), whole in zip(cuts, wholes, strict=True)
    ]
    x = randn(B, S, D).requires_grad_()
    local_x = piece(x, mesh, 1) if sequence_parallel else x.detach().clone().requires_grad_()
    losses = []
    for seed, (whole, (_, dim), out) in enumerate(zip(wholes, cuts, column_parallel(local_x, *layers), strict=True)):
        expected = F.linear(x, whole.weight.flatten(0, -2), whole.bias.flatten()).unflatten(-1, whole.out_shape)
        assert_close(out, piece(expected, mesh, 2 + dim))
        probe = randn(*expected.shape, seed=seed)
        (expected * probe).sum().backward()
        losses.append((out * piece(probe, mesh, 2 + dim).detach()).sum())
    torch.stack(losses).sum().backward()
    assert_close(local_x.grad, piece(x.grad, mesh, 1) if sequence_parallel else x.grad)
    for whole, layer in zip(wholes, layers, strict=True):
        assert_same_gradients(layer, whole)


def row_parity(tp: int, sequence_parallel: bool) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    whole = randomised(RowParallelLinear(8, D, Mesh.single(), bias=True))
    layer = split_like(RowParallelLinear(8, D, mesh, bias=True, sequence_parallel=sequence_parallel), whole)
    x, probe = randn(B, S, 8).requires_grad_(), randn(B, S, D, seed=1)
    expected = F.linear(x, whole.weight, whole.bias)
    (expected * probe).sum().backward()
    local_x = piece(x, mesh, 2)
    out = layer(local_x)
    assert_close(out, piece(expected, mesh, 1) if sequence_parallel else expected)
    (out * (piece(probe, mesh, 1).detach() if sequence_parallel else probe)).sum().backward()
    assert_close(local_x.grad, piece(x.grad, mesh, 2))
    assert_same_gradients(layer, whole)


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("parity", [column_parity, row_parity])
def test_outputs_and_gradients_equal_plain_torch(parity: Callable[..., None], tp: int, sequence_parallel: bool) -> None:
    run_ranks(parity, tp, tp, sequence_parallel)


def copies_parity(tp: int, sequence_parallel: bool) -> tuple[int, ...]:
    """Two kv groups on more ranks: adjacent ranks hold copies, and each copy's gradient is its own heads' part."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "bias": True}
    whole = randomised(ColumnParallelLinear(D, (2, 2, 3), Mesh.single(), **options))
    layer = split_like(ColumnParallelLinear(D, (2, 2, 3), mesh, copies=tp // 2, **options), whole)
    x = randn(B, S, D).requires_grad_()
    probes = randn(tp, B, S, 1, 2, 3, seed=1)  # what each rank's heads ask of its group
    expected = F.linear(x, whole.weight.flatten(0, -2), whole.bias.flatten()).unflatten(-1, (2, 2, 3))
    (expected * probes.view(2, tp // 2, B, S, 2, 3).sum(1).permute(1, 2, 0, 3, 4)).sum().backward()
    local_x = piece(x, mesh, 1) if sequence_parallel else x.detach().clone().requires_grad_()
    out = layer(local_x)
    group = mesh[Axis.TP].rank // (tp // 2)
    assert_close(out, expected[:, :, group : group + 1])
    (out * probes[mesh[Axis.TP].rank]).sum().backward()
    assert_close(local_x.grad, piece(x.grad, mesh, 1) if sequence_parallel else x.grad)
    assert_same_gradients(layer, whole)
    return tuple(layer.weight.shape)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fewer_groups_than_ranks_are_held_as_copies(sequence_parallel: bool) -> None:
    assert run_ranks(copies_parity, 4, 4, sequence_parallel) == [(1, 2, 3, D)] * 4


def bias_alone(tp: int, sequence_parallel: bool, length: int) -> tuple[list[list[float]], list[float]]:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    layer = RowParallelLinear(4, 2, mesh, bias=True, sequence_parallel=sequence_parallel)
    torch.nn.init.zeros_(layer.weight)
    layer.bias.data.copy_(torch.tensor([1.0, 2.0]))
    out = layer(torch.ones(3, length, 4 // tp))
    out.sum().backward()
    if Axis.TP in layer.placements()["bias"].partial and tp > 1:
        torch.distributed.all_reduce(layer.bias.grad)
    return out.flatten(0, 1).unique(dim=0).tolist(), layer.bias.grad.tolist()


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_a_row_parallel_bias_is_added_once(tp: int, sequence_parallel: bool) -> None:
    length = 4 if sequence_parallel else 1
    for out, gradient in run_ranks(bias_alone, tp, tp, sequence_parallel, length):
        assert out == [[1.0, 2.0]]
        assert gradient == [3.0 * length, 3.0 * length]


def block_traffic(tp: int, sequence_parallel: bool) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and wire bytes of a Transformer block, forward and backward."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    norms = [RMSNorm(D, mesh, **options) for _ in range(2)]
    attention = ParallelAttention(D, 4, mesh, kv_groups=2, head_dim=2, **options)
    mlp = ParallelMLP(D, 8, mesh, **options)
    hidden = torch.randn(B, S // tp if sequence_parallel else S, D, requires_grad=True)
    hidden = hidden + attention(norms[0](hidden))
    hidden = hidden + mlp(norms[1](hidden))
    hidden.sum().backward()
    return {key: (traffic.calls, traffic.wire_bytes) for key, traffic in mesh.ledger.records().items()}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_block_sends_as_much_as_the_closed_forms(tp: int) -> None:
    whole = B * S * D * 4  # bytes of one hidden state in fp32
    once = whole * (tp - 1) // tp
    plain = {("tp", "all_reduce"): (4, 8 * once)}
    split = {("tp", "all_gather"): (6, 6 * once), ("tp", "reduce_scatter"): (4, 4 * once)}
    assert run_ranks(block_traffic, tp, tp, False) == [plain if tp > 1 else {}] * tp
    assert run_ranks(block_traffic, tp, tp, True) == [split if tp > 1 else {}] * tp


class Products(TorchDispatchMode):
    """Appends the name of each matrix product to a list."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.events.append("weight" if args[0].shape[0] == 8 // 2 else "input")
        return func(*args, **(kwargs or {}))


def frozen(tp: int, sequence_parallel: bool, train: str) -> tuple[dict[tuple[str, str], int], list[str]]:
    """Calls and products of a backward in which some gradients are not wanted, never those of the second layer."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    layers = [ColumnParallelLinear(D, 8, mesh, bias=True, sequence_parallel=sequence_parallel) for _ in range(2)]
    layers[1].requires_grad_(False)
    layers[0].weight.requires_grad_(train in ("weight", "both"))
    x = torch.randn(B, S // tp if sequence_parallel else S, D, requires_grad=train in ("input", "both"))
    first, second = column_parallel(x, *layers)
    mesh.ledger.reset()
    products: list[str] = []
    with Products(products):
        (first.sum() + second.sum()).backward()
    assert (x.grad is not None) == x.requires_grad
    assert (layers[0].weight.grad is not None) == layers[0].weight.requires_grad
    assert torch.equal(layers[0].bias.grad, torch.full((8 // tp,), float(B * S)))
    assert all(parameter.grad is None for parameter in layers[1].parameters())
    return {key: traffic.calls for key, traffic in mesh.ledger.records().items()}, products


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("train", ["bias", "input", "weight", "both"])
def test_gradients_that_are_not_needed_cost_neither_products_nor_messages(train: str, sequence_parallel: bool) -> None:
    calls = {}
    if train in ("input", "both"):
        calls["tp", "reduce_scatter" if sequence_parallel else "all_reduce"] = 1
    if train in ("weight", "both") and sequence_parallel:
        calls["tp", "all_gather"] = 1
    products = {"bias": [], "input": ["input"] * 2, "weight": ["weight"], "both": ["input", "input", "weight"]}[train]
    assert run_ranks(frozen, 2, 2, sequence_parallel, train) == [(calls, products)] * 2


def backward_order(sequence_parallel: bool) -> list[str]:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    events: list[str] = []
    patch = pytest.MonkeyPatch()
    starts = {"start_all_reduce_": linear_ops, "start_reduce_scatter": linear_ops, "start_all_gather": weight_products}
    for name, module in starts.items():
        watched = _watched(getattr(module, name), name.removeprefix("start_").rstrip("_"), events)
        patch.setattr(module, name, watched)
    try:
        layer = ColumnParallelLinear(D, 8, mesh, sequence_parallel=sequence_parallel)
        out = layer(torch.randn(B, S // 2 if sequence_parallel else S, D, requires_grad=True))
        with Products(events):
            out.sum().backward()
    finally:
        patch.undo()
    return events


def _watched(start: Callable[..., Any], name: str, events: list[str]) -> Callable[..., Any]:
    class Watched:
        def __init__(self, pending: Any) -> None:
            self.pending = pending

        def wait(self) -> Any:
            events.append(f"{name} done")
            return self.pending.wait()

    def started(*args: Any) -> Watched:
        events.append(name)
        return Watched(start(*args))

    return started


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        (False, "input, all_reduce, weight, all_reduce done"),
        (True, "all_gather, input, reduce_scatter, all_gather done, weight, reduce_scatter done"),
    ],
)
def test_collectives_of_the_backward_run_under_its_products(sequence_parallel: bool, expected: str) -> None:
    assert run_ranks(backward_order, 2, sequence_parallel) == [expected.split(", ")] * 2


def saved_bytes(sequence_parallel: bool) -> int:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    layer = ColumnParallelLinear(D, 8, mesh, sequence_parallel=sequence_parallel)
    x = torch.randn(B, S // 2 if sequence_parallel else S, D, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    return sum(t.nbytes for t in saved if t.data_ptr() != layer.weight.data_ptr())


def test_under_sequence_parallelism_only_the_split_input_is_saved() -> None:
    assert run_ranks(saved_bytes, 2, False) == [B * S * D * 4] * 2
    assert run_ranks(saved_bytes, 2, True) == [B * S * D * 4 // 2] * 2


def uneven(length: int) -> str:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    with pytest.raises(PlacementError) as caught:
        RowParallelLinear(4, D, mesh, sequence_parallel=True)(torch.ones(B, length, 2))
    return str(caught.value)


def test_a_sequence_that_cannot_be_split_is_rejected() -> None:
    for message in run_ranks(uneven, 2, 9):
        assert "length 9" in message
        assert "tp=2" in message
        assert "use 8" in message


def test_features_that_cannot_be_split_are_rejected() -> None:
    mesh = Mesh(MeshShape(tp=4), 0, torch.device("cpu"), None)
    with pytest.raises(PlacementError, match="6"):
        ColumnParallelLinear(D, 6, mesh)
    with pytest.raises(PlacementError, match="6"):
        RowParallelLinear(6, D, mesh)


def test_one_rank_is_plain_torch_without_a_process_group() -> None:
    column = ColumnParallelLinear(D, (2, 4), Mesh.single(), bias=True, sequence_parallel=True)
    row = RowParallelLinear(8, D, Mesh.single(), bias=True, sequence_parallel=True)
    x = torch.randn(B, S, D)
    out = row(column(x).flatten(-2))
    expected = F.linear(F.linear(x, column.weight.view(8, D), column.bias.view(8)), row.weight, row.bias)
    assert torch.equal(out, expected)
    assert out.grad_fn is not None
    assert "Product" not in out.grad_fn.name()


def test_placements_declare_the_shards_and_the_partial_bias() -> None:
    mesh = Mesh.single()
    column = ColumnParallelLinear(D, (2, 4), mesh, bias=True, shard_dim=1).placements()
    assert (column["weight"].shape, column["weight"].shards) == ((2, 4, D), {Axis.TP: Shard(1)})
    assert (column["bias"].shape, column["bias"].shards) == ((2, 4), {Axis.TP: Shard(1)})
    assert not column["bias"].decay
    for sequence_parallel in (False, True):
        row = RowParallelLinear(8, D, mesh, bias=True, sequence_parallel=sequence_parallel).placements()
        assert (row["weight"].shape, row["weight"].shards) == ((D, 8), {Axis.TP: Shard(1)})
        assert (row["bias"].shards, row["bias"].partial) == ({}, {Axis.TP} if sequence_parallel else frozenset())
