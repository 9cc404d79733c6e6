"""The Triton kernels against the eager implementations: on a GPU, by Triton's interpreter, or by a stand-in for it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megastack.layers import fused
from megastack.random import dropout_key, dropout_threshold
from tests.layers import plain_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    found = importlib.util.find_spec("triton") is not None
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    with nullcontext() if found else plain_triton.installed():
        spec = importlib.util.find_spec("megastack.layers.triton_kernels")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)  # not as a module of the package, which would keep the stand-in
        spec.loader.exec_module(module)
        yield module
    os.environ.pop("TRITON_INTERPRET", None)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal to the rounding of one operation; in bf16 the eager implementations round more than once."""
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(HALF, torch.float32), (torch.float32, HALF)])
def test_rms_norm(kernels: ModuleType, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, grad = randn(3, 2, 2, 21, dtype=dtype)[:, :, 0], randn(3, 2, 21, dtype=dtype, seed=1)
    weight = randn(21, dtype=weight_dtype, seed=2)
    found, scale = kernels.rms_norm(x, weight, 0.1)
    expected, expected_scale = fused._rms_norm(x, weight, 0.1)
    close(found, expected)
    close(scale, expected_scale)
    found_grads = kernels.rms_norm_backward(grad, x, weight, scale)
    for one, other in zip(found_grads, fused._rms_norm_backward(grad, x, weight, scale), strict=True):
        close(one, other)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(HALF, torch.float32), (torch.float32, HALF)])
def test_layer_norm(kernels: ModuleType, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, grad = 2 + randn(3, 2, 2, 21, dtype=dtype)[:, :, 0], randn(3, 2, 21, dtype=dtype, seed=1)
    weight, bias = (randn(21, dtype=weight_dtype, seed=seed) for seed in (2, 3))
    found, expected = kernels.layer_norm(x, weight, bias, 0.1), fused._layer_norm(x, weight, bias, 0.1)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    found = kernels.layer_norm_backward(grad, x, weight, bias, *found[1:])
    for one, other in zip(found, fused._layer_norm_backward(grad, x, weight, bias, *expected[1:]), strict=True):
        close(one, other)


@pytest.mark.parametrize("rows", [1, 5])
def test_the_gradients_of_parameters_are_sums_over_all_programs(kernels: ModuleType, rows: int) -> None:
    x, weight, bias = randn(rows, 8, dtype=HALF), randn(8), randn(8, seed=1)
    _, scale = kernels.rms_norm(x, weight, 1e-5)
    _, found = kernels.rms_norm_backward(x, x, weight, scale)
    close(found, fused._rms_norm_backward(x, x, weight, scale)[1])
    _, mean, scale = kernels.layer_norm(x, weight, bias, 1e-5)
    sums = kernels.layer_norm_backward(x, x, weight, bias, mean, scale)[1:]
    for one, other in zip(sums, fused._layer_norm_backward(x, x, weight, bias, mean, scale)[1:], strict=True):
        close(one, other)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_rotation(kernels: ModuleType, dtype: torch.dtype, backward: bool) -> None:
    batch, length, heads, pairs = 2, 3, 3, 6
    tables = [randn(batch, length, pairs, seed=seed) for seed in (1, 2)]
    whole = randn(batch, length, heads, 2, 2 * pairs, dtype=dtype)
    by_head = whole[..., 0, :].transpose(1, 2).contiguous().transpose(1, 2)
    many = randn(batch, length, 1300, 2 * pairs, dtype=dtype, seed=3)  # more than a program rotates
    for q, (cos, sin) in ((whole[..., 1, :], tables), (by_head, tables), (by_head, [t[:1] for t in tables])):
        for k in (whole[:, :, :1, 0], many):
            for pair in ((q, k), (k, q)):
                for found, expected in zip(
                    kernels.rotate(*pair, cos, sin, backward), fused._rotate(*pair, cos, sin, backward), strict=True
                ):
                    close(found, expected)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_swiglu(kernels: ModuleType, dtype: torch.dtype) -> None:
    up, grad = randn(2, 2, 2, 5, dtype=dtype), randn(2, 2, 5, dtype=dtype, seed=1)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == HALF else {}
    torch.testing.assert_close(kernels.swiglu(up), fused._swiglu(up), **tolerance)
    torch.testing.assert_close(kernels.swiglu_backward(grad, up), fused._swiglu_backward(grad, up), **tolerance)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("start", [0, 2**33])
def test_dropout_has_the_bits_of_the_reference(kernels: ModuleType, start: int, p: float) -> None:
    x, samples = randn(3, 2, 1030), torch.tensor([3, 10**12, -5], device=DEVICE)
    key, threshold = dropout_key(1, 2, "here"), dropout_threshold(p)
    found = kernels.dropout(x, samples, key, start, threshold, 1 / (1 - p))
    assert torch.equal(found, fused._dropout(x, samples, 1, 2, "here", start, p))


def test_only_dtypes_that_are_computed_in_fp32_are_accepted(kernels: ModuleType) -> None:
    assert kernels.supports(randn(1), randn(1, dtype=HALF), randn(1).half())
    assert not kernels.supports(randn(1), randn(1).double())
    assert kernels.supports_row(randn(1, 8)) and not kernels.supports_row(torch.empty(1, 1 << 16, device="meta"))
