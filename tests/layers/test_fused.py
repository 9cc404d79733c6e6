"""Operators that are one kernel on a GPU: fake implementations, equality with the CPU path, number, compilation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megastack.layers import fused
from megastack.layers.attention import ParallelAttention
from megastack.layers.context import Context
from megastack.layers.dropout import dropout
from megastack.layers.kernels import cpu_kernels, kernel_choice
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import LayerNorm, RMSNorm
from megastack.layers.rope import Rope, rotate
from megastack.mesh.mesh import Mesh
from megastack.models.block import Block
from megastack.torch_private import ACCUMULATES
from megastack.weight_gradients import weight_gradient_scope
from scripts.bench_block import Kernels

B, S, D, HEADS = 2, 6, 16, 2
ROPE = Rope(D // HEADS)
MESH = Mesh.single()
HALF = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def block(norm: type = RMSNorm, activation: str = "swiglu", **options: Any) -> Block:
    attention = {"rope": ROPE} | options.pop("attention", {})
    return Block(
        D,
        MESH,
        layer=0,
        attention=lambda: ParallelAttention(D, HEADS, MESH, **attention),
        mlp=lambda: ParallelMLP(D, 24, MESH, activation=activation),
        norm=lambda: norm(D, MESH),
        **options,
    )


def context(dtype: torch.dtype) -> Context:
    positions_BS, samples_B = torch.arange(S).expand(B, S), torch.arange(B)
    return Context.of(positions_BS, samples_B=samples_B, rope=ROPE, dtype=dtype, step=3, seed=5)


X = randn(2, 3, 2, 8, dtype=HALF)[:, :, 0]
WEIGHT, BIAS, SCALE = randn(8, seed=1), randn(8, seed=2), randn(2, 3, 1, seed=3)
HEADS_BSHK, TABLE = randn(2, 3, 2, 2, 8, dtype=HALF)[..., 0, :], randn(1, 3, 4)
MASK = (torch.tensor([4, 5]), 1, 2, "here", 7)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rms_norm": (fused.rms_norm, (X, WEIGHT, 1e-5)),
    "rms_norm_backward": (fused.rms_norm_backward, (X, X, WEIGHT, SCALE)),
    "layer_norm": (fused.layer_norm, (X, WEIGHT, BIAS, 1e-5)),
    "layer_norm_backward": (fused.layer_norm_backward, (X, X, WEIGHT, BIAS, SCALE, SCALE)),
    "rotate": (fused.rotate, (HEADS_BSHK, HEADS_BSHK[:, :, :1], TABLE, TABLE, False)),
    "swiglu": (fused.swiglu, (HEADS_BSHK,)),
    "swiglu_backward": (fused.swiglu_backward, (X[:, :1].expand(2, 3, 8), HEADS_BSHK)),
    "mask": (fused.mask, (*MASK, 3, 8, 0.5)),
    "dropout": (fused.dropout, (X, *MASK, 0.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_have_shape_dtype_and_strides_of_the_result(name: str) -> None:
    operator, arguments = CASES[name]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
@pytest.mark.parametrize("weight_dtype", [HALF, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_computes_what_the_cpu_does(name: str, weight_dtype: torch.dtype) -> None:
    operator, arguments = CASES[name]
    arguments = tuple(x.to(weight_dtype) if x is WEIGHT or x is BIAS else x for x in arguments)
    on_gpu = [x.cuda() if isinstance(x, Tensor) else x for x in arguments]
    expected, found = operator(*arguments), operator(*on_gpu)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        torch.testing.assert_close(one.cpu(), other, rtol=0.02, atol=0.02)


def gradients(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    x_BSD = randn(B, S, D, dtype=dtype).requires_grad_()
    module.zero_grad()
    with torch.random.fork_rng():
        module(x_BSD, context(dtype)).mul(randn(B, S, D, dtype=dtype, seed=1)).sum().backward()
    assert x_BSD.grad is not None
    return [x_BSD.grad, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    "options",
    [
        {"attention": {"qk_norm": True, "attention_dropout": 0.2}, "dropout": 0.3},
        {"norm": LayerNorm, "activation": "gelu"},
    ],
    ids=["llama", "gpt"],
)
def test_the_device_implementations_equal_those_of_the_cpu(options: Any, dtype: torch.dtype, tolerance: float) -> None:
    module = block(**options).to(dtype)
    x_BSD = randn(B, S, D, dtype=dtype)
    results = {}
    for choice in ("cpu", "device"):
        with kernel_choice(choice):
            results[choice] = [module(x_BSD, context(dtype)).detach(), *gradients(module, dtype)]
    assert len(results["cpu"]) == 2 + len(list(module.parameters()))
    for found, expected in zip(results["device"], results["cpu"], strict=True):
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("weight_dtype", [HALF, torch.float32])
def test_norms_of_bf16_on_a_device_round_as_on_the_cpu(kind: type, weight_dtype: torch.dtype) -> None:
    norm = kind(D, MESH).to(weight_dtype)
    x_BSD = randn(B, S, D, dtype=HALF)
    with kernel_choice("device"):
        found = norm(x_BSD)
    assert found.dtype == HALF
    torch.testing.assert_close(found, norm(x_BSD))


@pytest.mark.parametrize(
    ("p", "forward", "backward"),
    [
        (0.0, {}, {}),
        (0.1, {"dropout": 2}, {"dropout": 2}),
    ],
)
def test_a_block_runs_few_kernels(p: float, forward: dict[str, int], backward: dict[str, int]) -> None:
    """One operator for each norm, activation and residual addition, one for the rotation of queries and keys, and no
    cast. The third addition of the backward sums the input gradients of the two projections of the attention."""
    module = block(dropout=p).to(HALF)
    for norm in (module.attention_norm, module.mlp_norm):
        norm.float()
    x_BSD, seen = randn(B, S, D, dtype=HALF).requires_grad_(), context(HALF)
    with kernel_choice("device"):
        with Kernels() as ran:
            out_BSD = module(x_BSD, seen)
        with Kernels() as ran_back:
            out_BSD.backward(torch.ones_like(out_BSD))
    products = {"mm", "addmm", "addmm_", "linear", "attention", "clone", "stack", "ones_like"}
    own = {name: count for name, count in ran.counts.items() if name not in products}
    assert own == {"rms_norm": 2, "rotate": 1, "swiglu": 1, "add": 2} | forward
    own = {name: count for name, count in ran_back.counts.items() if name not in products}
    assert own == {"rms_norm_backward": 2, "rotate": 1, "swiglu_backward": 1, "add": 3} | backward
    assert ran.counts.total() <= 26 and ran_back.counts.total() <= 46


def nodes_of(x: Tensor) -> Counter[str]:
    """The nodes of the graph that computed a tensor, without the ``AccumulateGrad`` nodes."""
    seen, left = set(), [x.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen and node.name() != ACCUMULATES:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return Counter(node.name() for node in seen)


@contextmanager
def python_calls() -> Iterator[Counter[str]]:
    """Counts the calls of the package's Python functions inside."""
    package, calls = str(Path(fused.__file__).parents[1]), Counter[str]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def test_a_block_costs_the_host_few_nodes_and_calls() -> None:
    """In a training step. Host time is about proportional to their number; ``scripts/bench_block.py`` measures it."""
    module = block().to(HALF)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x_BSD, seen = randn(B, S, D, dtype=HALF).requires_grad_(), context(HALF)
    with kernel_choice("device"), weight_gradient_scope():
        module(x_BSD, seen).sum().backward()  # finds the targets of the parameters
        with python_calls() as forward:
            out_BSD = module(x_BSD, seen)
        nodes, grad_BSD = nodes_of(out_BSD), torch.ones_like(out_BSD)
        with python_calls() as backward:
            out_BSD.backward(grad_BSD)
    assert nodes.total() <= 18, nodes
    assert forward.total() <= 135, forward
    assert backward.total() <= 100, backward


def test_the_choice_holds_on_other_threads_and_ends_with_its_block() -> None:
    x, seen = torch.ones(1), []
    with kernel_choice("device"):
        thread = Thread(target=lambda: seen.append(cpu_kernels(x)))
        thread.start()
        thread.join()
    assert (seen, cpu_kernels(x)) == ([False], True)
    with pytest.raises(ZeroDivisionError), kernel_choice("device"):
        raise ZeroDivisionError
    assert cpu_kernels(x)


def test_without_triton_the_eager_implementations_run_and_a_warning_says_why(caplog: pytest.LogCaptureFixture) -> None:
    fused._triton_kernels.cache_clear()
    with patch.dict("sys.modules", {"megastack.layers.triton_kernels": None}):
        for _ in range(2):
            assert torch.equal(fused._rms_norm_cuda(X, WEIGHT, 0.1)[0], fused._rms_norm(X, WEIGHT, 0.1)[0])
    fused._triton_kernels.cache_clear()
    (record,) = caplog.records
    assert "Triton" in record.message


@pytest.mark.parametrize("choice", ["cpu", "device"])
def test_the_layers_compile_without_graph_breaks(choice: Any) -> None:
    norms, mlp = nn.Sequential(RMSNorm(D, MESH), LayerNorm(D, MESH)).bfloat16(), ParallelMLP(D, 4, MESH)
    tables = ROPE.tables(torch.arange(S)[None], torch.float32)

    def parts(x_BSD: Tensor, seen: Context) -> Tensor:
        heads_BSHK = norms(x_BSD).unflatten(-1, (HEADS, D // HEADS))
        q_BSHK, k_BSGK = rotate(heads_BSHK, heads_BSHK[:, :, :1], tables)
        gated_BSF = mlp.activate((q_BSHK * k_BSGK).reshape(B, S, 2, D // 2))
        return dropout(gated_BSF, 0.5, seen, "here")

    def run(function: Callable[[Tensor, Context], Tensor], step: int) -> list[Tensor]:
        x_BSD = randn(B, S, D, dtype=HALF).requires_grad_()
        out = function(x_BSD, Context(samples_B=torch.arange(B), step=step))
        out.sum().backward()
        assert x_BSD.grad is not None
        return [out.detach(), x_BSD.grad]

    with kernel_choice(choice):
        compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")
        for step in (3, 4, 5):
            for found, expected in zip(run(compiled, step), run(parts, step), strict=True):
                torch.testing.assert_close(found, expected)
