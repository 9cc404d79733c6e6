"""Kernels give what torch's plain functions do, with their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megastack.layers.kernels import KernelChoice, add_product_, add_rows_, exp_, gelu, kernel_choice, sum_rows
from tests.layers.layer_parity import randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_is_exp(dtype: torch.dtype) -> None:
    x = (randn(64) * 10).to(dtype)
    found = exp_(x.clone())
    torch.testing.assert_close(found, x.exp(), rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_is_the_tanh_form(dtype: torch.dtype) -> None:
    plain, ours = ((randn(3, 50) * 4).to(dtype).requires_grad_() for _ in range(2))
    F.gelu(plain, approximate="tanh").square().sum().backward()
    gelu(ours).square().sum().backward()
    torch.testing.assert_close(gelu(ours), F.gelu(plain, approximate="tanh"))
    torch.testing.assert_close(ours.grad, plain.grad)


def test_rows_are_added_where_the_index_says() -> None:
    index_T, rows_TD = torch.tensor([2, 0, 2, 2]), randn(4, 3)
    expected = torch.stack([rows_TD[1], torch.zeros(3, dtype=rows_TD.dtype), rows_TD[[0, 2, 3]].sum(0)])
    torch.testing.assert_close(sum_rows(index_T, rows_TD, 3), expected)
    torch.testing.assert_close(add_rows_(torch.ones(3, 3, dtype=rows_TD.dtype), index_T, rows_TD), expected + 1)


def test_a_product_is_added_to_a_wider_sum_without_rounding() -> None:
    a, b = randn(5, 300).bfloat16(), randn(300, 7, seed=1).bfloat16()
    total = torch.ones(5, 7)
    exact = 1 + a.double() @ b.double()
    assert add_product_(total, a, b) is total
    assert (total - exact).abs().max() < 1e-4
    assert ((1 + a @ b) - exact).abs().max() > 1e-2


@pytest.mark.parametrize("choice", ["cpu", "device"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("autocast", [False, True])
def test_products_are_added_on_a_cpu_as_on_a_device_and_autocast_does_not_round_them(
    dtypes: tuple[torch.dtype, torch.dtype], choice: KernelChoice, autocast: bool
) -> None:
    total, (a, b) = torch.ones(5, 7, dtype=dtypes[0]), (randn(5, 30).to(dtypes[1]), randn(30, 7, seed=1).to(dtypes[1]))
    exact = 1 + a.double() @ b.double()
    with kernel_choice(choice), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        add_product_(total, a, b)
    rounding = torch.finfo(dtypes[0]).eps * exact.abs().max()
    assert (total - exact).abs().max() < 2 * rounding
