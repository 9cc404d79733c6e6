"""The number of kernels of a step after the backward does not grow with the number of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megastack.gradients import norm
from megastack.gradients.buckets import GradientBuckets
from megastack.mesh.mesh import Mesh
from megastack.optim.loss_scale import LossScale
from megastack.optim.optimizer import build_optimizer
from megastack.optim.update_rules import OptimizerOptions
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement

BUCKETS = 160


class Wide(ParallelModule):
    """As many small parameters as there are buckets; a quarter of them do not decay."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(Mesh.single())
        self.create_parameters()
        self.to(dtype)

    def placements(self) -> dict[str, Placement]:
        return {f"w{at}": Placement((2,), init=Ones(), decay=at % 4 > 0) for at in range(BUCKETS)}


class Kernels(TorchDispatchMode):
    """Counts the operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def count(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """The number of kernels of a call, and its result."""
    with Kernels() as kernels:
        result = function(*args, **kwargs)
    return kernels.count, result


@pytest.mark.parametrize(
    ("dtype", "update"), [(torch.float32, 11), (torch.bfloat16, 13), (torch.float64, 11)], ids=["fp32", "bf16", "fp64"]
)
def test_kernels_of_a_step(dtype: torch.dtype, update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizer groups; the norm as on a GPU."""
    monkeypatch.setattr(norm, "_norms_by_row", norm._norms_at_once)
    model = Wide(dtype)
    buckets = GradientBuckets([model], model.mesh, bucket_size=1)
    assert len(buckets.buckets) == BUCKETS
    optimizer = build_optimizer(buckets, OptimizerOptions("adamw", weight_decay=0.1))
    for bucket in buckets.buckets:
        bucket.gradients.fill_(1.0)
    unscale, _ = count(LossScale(2.0).unscale_, buckets)
    measured, total = count(norm.grad_norm, buckets, model.mesh)
    divided, scale = count(norm.clip_divisor, total, 1.0)
    found_inf = norm.is_nonfinite(total)
    updated, _ = count(optimizer.step, 0.1, found_inf=found_inf, grad_scale=scale)
    clipped, _ = count(norm.clip_gradients_, buckets, 0.1, model.mesh)
    zeroed, _ = count(buckets.zero_)
    assert zeroed == 1
    assert unscale <= 3
    assert measured + divided <= 9
    assert clipped <= 10
    assert updated == update
