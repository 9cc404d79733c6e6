"""Host time and kernels of one Llama block in a training step, beside the same block in plain torch.

    python scripts/bench_block.py            # a minute on an idle machine

The tensors are tiny, so only Python and torch's dispatcher take time: the CPU time of the thread, the minimum
of many repetitions. The blocks take turns, so that other load on the machine affects both. Both are bf16 and run on the
CPU. The package's block uses the implementations for a GPU, with fused operators that only allocate their outputs. The
time of a kernel launch on a GPU is not included. Plain torch has LayerNorms instead of RMSNorms, because they are one
kernel on every device.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megastack.layers.attention import ParallelAttention
from megastack.layers.context import Context
from megastack.layers.kernels import kernel_choice
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import RMSNorm
from megastack.layers.rope import Rope
from megastack.mesh.mesh import Mesh
from megastack.models.block import Block
from megastack.weight_gradients import weight_gradient_scope

HIDDEN, HEADS, FFN, LENGTH = 64, 4, 96, 4
WIDTH = HIDDEN // HEADS
DTYPE = torch.bfloat16
FREE = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "unsqueeze",
    "squeeze",
    "unbind",
    "select",
    "slice",
    "split",
    "detach",
}
FREE |= {"expand", "alias", "permute", "as_strided", "empty", "empty_like", "new_empty"}


class PlainBlock(nn.Module):
    """The block as one would write it in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(HIDDEN, bias=False) for _ in range(2))
        self.q, self.kv = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, hidden_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed_BSD = self.attention_norm(hidden_BSD)
        q_BSHK = self.q(normed_BSD).unflatten(-1, (HEADS, WIDTH))
        k_BSHK, v_BSHK = self.kv(normed_BSD).unflatten(-1, (HEADS, 2, WIDTH)).unbind(-2)
        heads = (plain_rotation(q_BSHK, cos, sin), plain_rotation(k_BSHK, cos, sin), v_BSHK)
        attended_BHSK = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in heads), is_causal=True)
        hidden_BSD = hidden_BSD + self.out(attended_BHSK.transpose(1, 2).flatten(-2))
        gate_BSF, value_BSF = self.up(self.mlp_norm(hidden_BSD)).unflatten(-1, (2, FFN)).unbind(-2)
        return hidden_BSD + self.down(F.silu(gate_BSF) * value_BSF)


def plain_rotation(heads_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = heads_BSHK.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads_BSHK.dtype)


def parallel_block() -> Block:
    mesh = Mesh.single()
    block = Block(
        HIDDEN,
        mesh,
        layer=0,
        attention=lambda: ParallelAttention(HIDDEN, HEADS, mesh, rope=Rope(WIDTH)),
        mlp=lambda: ParallelMLP(HIDDEN, FFN, mesh),
        norm=lambda: RMSNorm(HIDDEN, mesh),
    ).to(DTYPE)
    for norm in (block.attention_norm, block.mlp_norm):
        norm.float()
    return block


def allocating_operators() -> torch.library.Library:
    """Implementations of the fused operators for the CPU that only allocate their outputs."""
    library = torch.library.Library("megastack", "IMPL")
    implementations: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda x, weight, eps: (torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)),
        "rms_norm_backward": lambda grad, x, weight, scale: (torch.empty_like(x), torch.empty_like(weight)),
        "rotate": lambda q, k, cos, sin, backward: (q.new_empty(q.shape), k.new_empty(k.shape)),
        "swiglu": lambda up: up.new_empty((*up.shape[:-2], up.shape[-1])),
        "swiglu_backward": lambda grad, up: torch.empty_like(up),
    }
    for name, implementation in implementations.items():
        library.impl(name, implementation, "CPU")
    return library


class Kernels(TorchDispatchMode):
    """Counts operators without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.split("::")[1]
        if name not in FREE:
            self.counts["attention" if "att" in name else name] += 1
        return operator(*args, **(kwargs or {}))


class Measured:
    """A block with the best times of its forward and backward, in us."""

    def __init__(self, block: nn.Module, *arguments: Any) -> None:
        self.block, self.arguments = block, arguments
        self.input_BSD = torch.randn(1, LENGTH, HIDDEN, dtype=DTYPE, requires_grad=True)
        self.grad_BSD = torch.randn(1, LENGTH, HIDDEN, dtype=DTYPE)
        self.times = [float("inf")] * 2
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def run(self) -> None:
        start = time.thread_time_ns()
        out_BSD = self.block(self.input_BSD, *self.arguments)
        middle = time.thread_time_ns()
        out_BSD.backward(self.grad_BSD)
        end = time.thread_time_ns()
        self.times = [min(self.times[0], (middle - start) / 1e3), min(self.times[1], (end - middle) / 1e3)]

    def kernels(self) -> list[int]:
        with Kernels() as forward:
            out_BSD = self.block(self.input_BSD, *self.arguments)
        with Kernels() as backward:
            out_BSD.backward(self.grad_BSD)
        return [forward.counts.total(), backward.counts.total()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=800)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    context = Context.of(torch.arange(LENGTH)[None], rope=Rope(WIDTH), dtype=DTYPE)
    assert context.rotary is not None
    plain = Measured(PlainBlock().to(DTYPE), context.rotary.cos, context.rotary.sin)
    ours = Measured(parallel_block(), context)
    library = allocating_operators()
    with kernel_choice("device"), weight_gradient_scope():
        for _ in range(repetitions):
            plain.run()
            ours.run()
        rows = {"plain torch": plain, "megastack": ours}
        print(f"{'':14}{'forward us':>12}{'backward us':>13}{'kernels':>12}")
        for name, block in rows.items():
            forward, backward = block.times
            print(f"{name:14}{forward:12.0f}{backward:13.0f}{'{} + {}'.format(*block.kernels()):>12}")
    print(f"megastack / plain torch: {sum(ours.times) / sum(plain.times):.2f}")
    del library


if __name__ == "__main__":
    main()
