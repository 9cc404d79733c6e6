"""The shares of a step's time: self time in torch's operations by kind, on the first rank, from the profiler.

On a busy machine, self times include preemption, so use them as shares only. The rest of the step is Python, dispatch,
autograd's engine, and waiting for other ranks.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from bench.sides import Megastack
from bench.task import LAYOUTS
from megastack.testing.ranks import run_ranks

# The products of GELU count as other operations.
_KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product"),
    "GELU": ("aten::sigmoid_", "aten::sigmoid_backward", "aten::addcmul", "aten::addcmul_"),
    "norms": ("aten::native_layer_norm", "aten::native_layer_norm_backward"),
    "optimizer": ("aten::_fused_adamw_",),
}
REST, OTHER = "Python, dispatch, waiting", "other operations"


def measure_shares(name: str, steps: int = 3) -> dict[str, float]:
    """The share of megastack's step by kind, on rank 0 of a layout."""
    shares: dict[str, float] = run_ranks(_shares_on_rank, LAYOUTS[name].world_size, name, steps, timeout=900)[0]
    return shares


def _shares_on_rank(name: str, steps: int) -> dict[str, float]:
    side = Megastack(LAYOUTS[name])
    side.step(0)
    if dist.is_initialized() and dist.get_rank() > 0:
        _train(side, steps)
        return {}
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        whole = _train(side, steps)
    seconds = dict.fromkeys([*_KINDS, OTHER], 0.0)
    for event in profiled.key_averages():
        if event.key.startswith("aten::"):
            seconds[_kind(event.key)] += event.self_cpu_time_total / 1e6
    return {kind: spent / whole for kind, spent in seconds.items()} | {REST: 1 - sum(seconds.values()) / whole}


def _train(side: Megastack, steps: int) -> float:
    """The seconds of some steps."""
    start = time.perf_counter()
    for number in range(1, 1 + steps):
        side.step(number)
    return time.perf_counter() - start


def _kind(operation: str) -> str:
    for kind, names in _KINDS.items():
        if operation in names or any(name in operation for name in names if "::" not in name):
            return kind
    return OTHER
