"""Layers under torch.autocast: the same dtypes and, to the rounding of bf16, values on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.layers.attention import ParallelAttention
from megastack.layers.context import Context
from megastack.layers.embedding import LearnedPositions, VocabParallelEmbedding, VocabParallelHead
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear
from megastack.layers.loss import vocab_parallel_cross_entropy
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import LayerNorm, RMSNorm
from megastack.layers.rope import Rope
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.block import Block
from megastack.models.recompute import recompute
from megastack.placement.module import ParallelModule
from megastack.testing.ranks import run_ranks
from megastack.weight_gradients import deferring, weight_gradient_scope
from tests.layers.layer_parity import assert_close, assert_same_gradients, piece, randn, randomised, split_like

B, S, D = 2, 4, 8
ROUNDING = 0.04
"""Of the largest element: several roundings to bf16, one after another."""
IDS = torch.tensor([[1, 3, 3, 8], [0, 7, 1, 2]])


class Scored(ParallelModule):
    """A head and the loss behind it."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool) -> None:
        super().__init__(mesh)
        self.head = VocabParallelHead(9, D, mesh, vocab_multiple=4, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        options = {"vocab": 9, "label_smoothing": 0.1, "z_loss": 0.1}
        return vocab_parallel_cross_entropy(self.head(x), IDS, self.mesh, **options)[0]  # type: ignore[arg-type]


class Dropped(ParallelAttention):
    """Attention with dropout of its weights, which has its own matrix products."""

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        return super().forward(x, Context.of(samples_B=torch.arange(B)))


def block(mesh: Mesh, sp: bool) -> Block:
    return Block(
        D,
        mesh,
        layer=0,
        attention=lambda: ParallelAttention(D, 4, mesh, sequence_parallel=sp, qk_norm=True),
        mlp=lambda: ParallelMLP(D, 8, mesh, sequence_parallel=sp, bias=True),
        norm=lambda: LayerNorm(D, mesh, sequence_parallel=sp),
        sequence_parallel=sp,
    )


LAYERS: dict[str, Callable[[Mesh, bool], ParallelModule]] = {
    "column": lambda mesh, sp: ColumnParallelLinear(D, (2, 6), mesh, bias=True, sequence_parallel=sp, shard_dim=1),
    "row": lambda mesh, sp: RowParallelLinear(D, 6, mesh, bias=True, sequence_parallel=sp),
    "swiglu": lambda mesh, sp: ParallelMLP(D, 6, mesh, bias=True, sequence_parallel=sp),
    "gelu": lambda mesh, sp: ParallelMLP(D, 6, mesh, activation="gelu", sequence_parallel=sp),
    "rms": lambda mesh, sp: RMSNorm(D, mesh, sequence_parallel=sp),
    "layer": lambda mesh, sp: LayerNorm(D, mesh, sequence_parallel=sp),
    "attention": lambda mesh, sp: ParallelAttention(
        D, 4, mesh, kv_groups=2, rope=Rope(2), qk_norm=True, bias=True, sequence_parallel=sp
    ),
    "dropout": lambda mesh, sp: Dropped(D, 4, mesh, attention_dropout=0.3, sequence_parallel=sp),
    "loss": Scored,
    "block": block,
    "embedding": lambda mesh, sp: VocabParallelEmbedding(9, D, mesh, vocab_multiple=4, sequence_parallel=sp),
    "positions": lambda mesh, sp: LearnedPositions(9, D, mesh, sequence_parallel=sp),
}
SPLIT_INPUT, SPLIT_OUTPUT = {"row": 2}, {"column": 3}
LOCAL = ("rms", "layer")


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def step(mesh: Mesh, how: str) -> Iterator[Callable[[Tensor], None]]:
    """A function for the backward: plain, as in a step, or in the two parts of a schedule that splits backwards."""
    with nullcontext() if how == "plain" else weight_gradient_scope():
        if how != "split":
            yield Tensor.backward
            return

        def backward(loss: Tensor) -> None:
            with deferring() as deferred:
                loss.backward()
            deferred.accumulate()

        yield backward


def trained(mesh: Mesh, layer: nn.Module, x: Tensor, probe: Tensor | None, how: str, where: str, again: bool) -> Tensor:
    """The output; gradients are where backward leaves them."""
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter) if how != "plain" else None
    with step(mesh, how) as backward:
        with autocast() if where != "backward" else nullcontext():
            out = recompute(layer, x) if again else layer(x)
        loss = (out.float() * probe).sum() if probe is not None else out
        with autocast() if where != "forward" else nullcontext():
            backward(loss)
    return out


def case(mesh: Mesh, name: str, sp: bool, how: str, where: str, again: bool) -> None:
    whole = randomised(LAYERS[name](Mesh.single(), sp)).float()
    layer = split_like(LAYERS[name](mesh, sp), randomised(LAYERS[name](Mesh.single(), sp))).float()
    ids = name in ("embedding", "positions")
    x = IDS if ids else randn(B, S, D).float().requires_grad_()
    with torch.no_grad():
        shape = whole(x).shape
    probe = randn(*shape, seed=1).float() if shape else None
    expected = trained(Mesh.single(), whole, x, probe, "plain", where, again=False)
    split = sp and name not in ("row",)
    here = x if ids else piece(x, mesh, SPLIT_INPUT[name]) if name in SPLIT_INPUT else x.detach().clone()
    if not ids:
        here = piece(x, mesh, 1) if split else here.detach().requires_grad_()
    dim = SPLIT_OUTPUT.get(name, 1 if sp else None)
    local_probe = probe if dim is None or probe is None else piece(probe, mesh, dim).detach()
    out = trained(mesh, layer, here, local_probe, how, where, again)
    assert out.dtype == expected.dtype
    wanted = expected if dim is None or not shape else piece(expected, mesh, dim)
    assert_close(out, wanted, ROUNDING * float(expected.abs().max()))
    if not ids:
        dim = SPLIT_INPUT.get(name, 1 if split else None)
        assert here.grad is not None and x.grad is not None and here.grad.dtype == torch.float32
        assert_close(
            here.grad, x.grad if dim is None else piece(x.grad, mesh, dim), ROUNDING * float(x.grad.abs().max())
        )
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    largest = max(float(parameter.grad.abs().max()) for parameter in whole.parameters() if parameter.grad is not None)
    assert_same_gradients(layer, whole, ROUNDING * largest)


def cases(tp: int, sp: bool, where: str) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    for name in LAYERS:
        for how in ("plain", "step", "split"):
            for again in (False, True):
                try:
                    case(mesh, name, sp, how, where, again)
                except Exception as error:
                    error.add_note(f"{name}, {how}, {'recomputed' if again else 'once'}")
                    raise


@pytest.mark.parametrize("where", ["forward", "both", "backward"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_every_layer_computes_the_same_under_autocast_on_every_layout(tp: int, sp: bool, where: str) -> None:
    run_ranks(cases, tp, tp, sp, where)


@pytest.mark.parametrize("how", ["plain", "step", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_has_the_dtypes_and_values_of_torchs_own(dtype: torch.dtype, how: str) -> None:
    mesh = Mesh.single()
    layer = ColumnParallelLinear(D, 6, mesh, bias=True).to(dtype)
    own = nn.Linear(D, 6, dtype=dtype)
    own.load_state_dict(layer.state_dict())
    found: dict[nn.Module, list[Any]] = {}
    for module in (layer, own):
        x = randn(B, S, D).to(dtype).requires_grad_()
        out = trained(mesh, module, x, randn(B, S, 6).float(), how, "forward", again=False)
        found[module] = [out, x.grad, module.weight.grad, module.bias.grad]
    for actual, expected in zip(found[layer], found[own], strict=True):
        torch.testing.assert_close(actual, expected)


def test_autocast_that_is_off_inside_changes_nothing() -> None:
    layer, x = ColumnParallelLinear(D, 6, Mesh.single()), randn(B, S, D).float()
    with autocast(), torch.autocast("cpu", enabled=False):
        assert torch.equal(layer(x), F.linear(x, layer.weight))
    with torch.autocast("cpu", torch.float16):
        assert layer(x).dtype == torch.float16


def test_a_transform_of_an_autograd_function_is_an_error() -> None:
    norm = RMSNorm(D, Mesh.single())
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: norm(x).sum())(torch.ones(D))
