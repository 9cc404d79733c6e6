"""Packed documents: every way to compute them against explicit sums, its work, and the choice of a kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megastack import attention_mask
from megastack.layers import attention_spec
from megastack.layers.attention import ParallelAttention
from megastack.layers.attention_kernels import AttentionCase, Kernel, KernelChoice, attention, choose_kernel
from megastack.layers.context import Context
from megastack.layers.rope import Rope
from megastack.mesh.mesh import Mesh
from megastack.placement.placement import Normal

DOCUMENTS = {
    "typical": [[5, 3, 4], [2, 10]],
    "one token": [[1, 1, 10], [11, 1]],
    "equal lengths": [[4, 4, 4], [4, 4, 4]],
    "equal lengths over rows": [[6, 6], [6, 3, 3]],
    "one for each row": [[12], [12]],
    "padding": [[7, 5], [12]],
}


@pytest.fixture(params=["documents", "several in a call", "dense"])
def way(request, monkeypatch) -> str:
    """Forces one of the ways to compute documents on a CPU, whatever the size."""
    monkeypatch.setattr(attention_spec, "DENSE_BELOW", 10**9 if request.param == "dense" else 0)
    monkeypatch.setattr(attention_mask, "CALL", 10**9 if request.param == "several in a call" else 0)
    return request.param


def numbers(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def positions(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def operands(groups: int, *, heads: int = 4, layout: str = "contiguous", dtype=torch.float64) -> list[Tensor]:
    generator, shapes = torch.Generator().manual_seed(1), [(2, 12, h, 6) for h in (heads, groups, groups)]
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    if layout == "heads first":
        found = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found]
    if layout == "columns":
        found = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in found]
    return [x.requires_grad_() for x in found]


def explicit(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, documents_BS: Tensor) -> Tensor:
    """Attention within documents, with all scores."""
    repeats = q_BSHK.shape[2] // k_BSGK.shape[2]
    k, v = (x.repeat_interleave(repeats, 2) for x in (k_BSGK, v_BSGK))
    scores = q_BSHK.transpose(1, 2) @ k.permute(0, 2, 3, 1) / q_BSHK.shape[3] ** 0.5
    same = documents_BS[:, None, :, None] == documents_BS[:, None, None, :]
    hidden = ~(same & torch.ones(scores.shape[-2:], dtype=torch.bool).tril())
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_equal_explicit_sums(way, name, groups):
    documents_BS = numbers(DOCUMENTS[name])
    x, context = operands(groups), Context.of(None, documents_BS, dtype=torch.float64)
    found, expected = attention(*x, context), explicit(*x, documents_BS)
    grad = torch.randn_like(found)
    close(found, expected)
    close(torch.autograd.grad(found, x, grad), torch.autograd.grad(expected, x, grad))


@pytest.mark.parametrize("layout", ["heads first", "columns"])
def test_operands_and_gradients_may_have_any_strides(way, layout):
    documents_BS = numbers(DOCUMENTS["typical"])
    x, context = operands(2, layout=layout), Context.of(None, documents_BS, dtype=torch.float64)
    found, expected = attention(*x, context), explicit(*x, documents_BS)
    close(found, expected)
    close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_values_may_be_narrower_than_keys(way):
    documents_BS, (q, k, v) = numbers(DOCUMENTS["typical"]), operands(2)
    v = v[..., :4]
    close(attention(q, k, v, Context.of(None, documents_BS, dtype=torch.float64)), explicit(q, k, v, documents_BS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precisions_round_as_a_dense_mask_does(monkeypatch, dtype):
    monkeypatch.setattr(attention_spec, "DENSE_BELOW", 0)
    documents_BS = numbers(DOCUMENTS["typical"])
    x, exact = operands(2, dtype=dtype), operands(2)
    found = attention(*x, Context.of(None, documents_BS, dtype=dtype))
    assert found.dtype == dtype
    expected = explicit(*exact, documents_BS)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 4 * torch.finfo(dtype).eps
    grads = torch.autograd.grad(found.double().square().sum(), x)
    for grad, wanted in zip(grads, torch.autograd.grad(expected.square().sum(), exact), strict=True):
        assert (grad - wanted).abs().max() / wanted.abs().max() < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("options", [{}, {"kv_groups": 2, "qk_norm": True}, {"kv_groups": 1, "bias": True}])
def test_a_layer_computes_the_same_in_every_way(monkeypatch, options):
    torch.set_default_dtype(torch.float64)
    try:
        layer = ParallelAttention(8, 4, Mesh.single(), rope=Rope(2), init=Normal(0.5), **options)
    finally:
        torch.set_default_dtype(torch.float32)
    x_BSD = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    lengths, found = DOCUMENTS["typical"], []
    for below, call in ((10**9, 0), (0, 0), (0, 10**9)):
        monkeypatch.setattr(attention_spec, "DENSE_BELOW", below)
        monkeypatch.setattr(attention_mask, "CALL", call)
        context = Context.of(positions(lengths), numbers(lengths), rope=Rope(2), dtype=torch.float64)
        out_BSD = layer(x_BSD, context)
        grads = torch.autograd.grad(out_BSD.square().sum(), [x_BSD, *layer.parameters()])
        found.append((out_BSD, *grads))
    close(found[1], found[0])
    close(found[2], found[0])


class Dense(ParallelAttention):
    """An attention of one's own, which asks the context for a dense mask."""

    def attend(self, q_BSHK, k_BSGK, v_BSGK, context):
        q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
        mask = None if context is None else context.mask_for(q.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return attended.transpose(1, 2)


@pytest.mark.parametrize("documents", [False, True])
def test_a_layer_that_asks_for_a_dense_mask_gets_one_and_shares_it(way, documents):
    options = {"kv_groups": 2, "rope": Rope(2), "init": Normal(0.5)}
    layers = [kind(8, 4, Mesh.single(), **options) for kind in (Dense, ParallelAttention)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers = [layer.double() for layer in layers]
    lengths = DOCUMENTS["typical"]
    context = Context.of(positions(lengths), numbers(lengths) if documents else None, rope=Rope(2), dtype=torch.float64)
    x_BSD = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    close(layers[0](x_BSD, context.within("blocks.0")), layers[1](x_BSD, context))
    shared = context.mask_for(torch.float64)
    assert shared is context.within("blocks.1").mask_for(torch.float64)
    assert (shared is not None) is documents


class Pairs(TorchDispatchMode):
    """Counts the pairs of a query and a key that fused attention computes for each head, in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = self.square = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if "flash_attention_for_cpu" in name:
            q, k = args[1:3] if "backward" in name else args[:2]
            pairs = q.shape[0] * q.shape[2] * k.shape[2]
            self.forward += 0 if "backward" in name else pairs
            self.backward += pairs if "backward" in name else 0
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[-1] == x.shape[-2]:
                self.square = max(self.square, x.shape[-1])
        return out


def test_the_work_follows_the_documents_and_no_mask_of_the_row_is_formed():
    lengths = [[100, 28, 128], [64, 192]]
    x = [torch.randn(2, 256, heads, 64, requires_grad=True) for heads in (4, 1, 1)]
    context = Context.of(None, numbers(lengths))
    with Pairs() as pairs:
        attention(*x, context).sum().backward()
    assert pairs.forward == pairs.backward == sum(n * n for row in lengths for n in row)
    assert pairs.square < 256 and not context._dense


def test_a_row_with_one_document_is_computed_without_a_mask():
    x = operands(2)
    context = Context.of(None, numbers(DOCUMENTS["one for each row"]), dtype=torch.float64)
    assert torch.equal(attention(*x, context), attention(*x)) and not context._dense


BF16 = AttentionCase("cuda", (9, 0), torch.bfloat16, 128, grouped=True)


@pytest.mark.parametrize(
    ("changes", "kernel", "by_document", "says"),
    [
        ({}, Kernel.FLASH, False, None),
        ({"documents": True}, Kernel.VARLEN, False, None),
        ({"documents": True, "device": "gpu"}, Kernel.VARLEN, False, None),
        ({"documents": True, "small": True}, Kernel.VARLEN, False, None),
        ({"documents": True, "head_dim": 60}, Kernel.FLASH, True, "multiple of 8"),
        ({"documents": True, "varlen": False}, Kernel.FLASH, True, "torch"),
        ({"documents": True, "dtype": torch.float32}, Kernel.EFFICIENT, True, "fp16 or bf16, not float32"),
        ({"documents": True, "dtype": torch.float64}, Kernel.MATH, True, "fp16 or bf16, not float64"),
        ({"dtype": torch.float32}, Kernel.EFFICIENT, False, "fp16 or bf16"),
        ({"dtype": torch.float32, "head_dim": 126}, Kernel.MATH, False, "fp16 or bf16"),
        ({"capability": (7, 0), "dtype": torch.float16}, Kernel.EFFICIENT, False, "8.0, this GPU has 7.0"),
        ({"capability": (7, 0)}, Kernel.MATH, False, "8.0, this GPU has 7.0"),
        ({"head_dim": 512}, Kernel.EFFICIENT, False, "at most 256, not 512"),
        ({"head_dim": 208, "capability": (8, 9)}, Kernel.EFFICIENT, False, "no backward"),
        ({"head_dim": 208}, Kernel.FLASH, False, None),
        ({"device": "cpu", "dtype": torch.float64, "documents": True}, Kernel.CPU, True, None),
        ({"device": "cpu", "documents": True, "small": True}, Kernel.CPU, False, None),
    ],
)
def test_the_kernel_is_a_function_of_the_case(changes, kernel, by_document, says):
    choice = choose_kernel(replace(BF16, **changes))
    assert (choice.kernel, choice.by_document) == (kernel, by_document)
    assert choice.repeats is (kernel is Kernel.EFFICIENT)
    assert choice.because is None if says is None else says in str(choice)


def test_a_choice_prints_as_a_phrase():
    assert str(KernelChoice(Kernel.VARLEN)) == "variable-length FlashAttention"
    found = str(choose_kernel(replace(BF16, dtype=torch.float32, documents=True)))
    assert found == (
        "memory-efficient attention, one call for each document, keys and values repeated for each head "
        "(FlashAttention requires fp16 or bf16, not float32)"
    )


@pytest.mark.full
def test_a_gpu_runs_whole_kernels_on_grouped_queries_and_reads_nothing_on_the_host():
    command = [sys.executable, "-m", "tests.layers.gpu_attention_calls"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    flash, efficient = (
        [f"_scaled_dot_product_{name}_attention", f"_scaled_dot_product_{name}_attention_backward"]
        for name in ("flash", "efficient")
    )
    varlen = ["_varlen_attn", "_varlen_attn_backward"]
    assert json.loads(run.stdout) == [flash, varlen, efficient, [name for name in efficient for _ in range(5)]]
