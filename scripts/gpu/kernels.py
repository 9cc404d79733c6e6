"""Steps: the kernels that attention selects, the time of a block, the memory of the loss."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu.task import TINY, Task
from megastack.layers.context import Context
from megastack.models.profile import flops_per_token
from megastack.observe.devices import peak_flops

ATTENTION = ("flash", "fmha", "sdpa", "attention", "cudnn", "softmax", "mem_eff", "efficient")


def attention(task: Task) -> dict[str, Any]:
    """The kernels and the peak memory of torch's attention by dtype, mask, heads and length."""
    found = {}
    lengths = (2048, 8192) if not task.reduced else (64,)
    dtypes, groups = (torch.bfloat16, torch.float32), (32, 8)
    for dtype, masked, kv, length in product(dtypes, (False, True), groups, lengths):
        q, k, v = (
            torch.randn(1, heads, length, 64, dtype=dtype, device=task.device, requires_grad=True)
            for heads in (32, kv, kv)
        )
        mask = torch.ones(length, length, dtype=torch.bool, device=task.device).tril() if masked else None

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Tensor | None = mask) -> None:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
            out.sum().backward()

        name = f"{str(dtype)[6:]} {'mask' if masked else 'causal'} {32 // kv} queries a key, S {length}"
        try:
            peak = task.peak_bytes(run)
            found[name] = {"kernels": _kernels(task, run), "ms": task.milliseconds(run, 5), "peak_bytes": peak}
        except RuntimeError as error:
            found[name] = {"error": str(error).splitlines()[0]}
    return found


def _kernels(task: Task, run: Any) -> list[str]:
    """The names of the attention kernels that a call launches (on a CPU, of its operators)."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if task.device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        run()
        task.synchronize()
    names = {event.key for event in profiled.key_averages()}
    return sorted(name[:100] for name in names if any(part in name.lower() for part in ATTENTION))


class PlainBlock(nn.Module):
    """A Llama block in plain torch, with one-kernel norms."""

    def __init__(self, hidden: int, heads: int, groups: int, ffn: int) -> None:
        super().__init__()
        self.width, self.ffn = hidden // heads, ffn
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.kv = nn.Linear(hidden, 2 * groups * self.width, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q = self.q(normed).unflatten(-1, (-1, self.width)).transpose(1, 2)
        k, v = self.kv(normed).unflatten(-1, (2, -1, self.width)).unbind(2)
        q, k, v = self._turn(q, cos, sin), self._turn(k.transpose(1, 2), cos, sin), v.transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def block(task: Task) -> dict[str, Any]:
    """A block of Llama 3 8B: forward and backward, eager, in plain torch, and both compiled, with the MFU."""
    hidden, heads, groups = task.size(4096, 64), task.size(32, 4), task.size(8, 2)
    ffn, length = task.size(14336, 192), task.size(8192, 64)
    sizes = [f"model.hidden={hidden}", f"model.heads={heads}", f"model.kv_groups={groups}", f"model.ffn={ffn}"]
    more = [*sizes, "model.layers=1", f"batch.sequence_length={length}", "batch.micro_size=1", "batch.global_size=1"]
    options = [*TINY, *more, "precision=bf16", "data.document_mask=false"]
    found: dict[str, Any] = {}
    for name, chosen in {"eager": [], "compiled": ["compile=true"]}.items():
        try:
            training = task.build(*options, *chosen)
        except Exception as error:
            found[name] = {"error": str(error)}
            continue
        stage = training.stages[0]
        own = next(stage.blocks.children())
        run = own if stage.compiled_blocks is None else partial(stage.compiled_blocks, own, 0)
        positions = torch.arange(length, device=task.device)[None]
        context = Context.of(positions, rope=own.attention.rope, dtype=torch.bfloat16)
        found[name] = _timed(task, lambda x, run=run, context=context: run(x, context), length, hidden)
        found[name]["is_compiled"] = stage.compiled_blocks is not None
        per_token = flops_per_token(training.config)
    plain = PlainBlock(hidden, heads, groups, ffn).to(task.device, torch.bfloat16)
    angles = torch.randn(length, hidden // heads // 2, device=task.device, dtype=torch.bfloat16)
    tables = angles.cos(), angles.sin()
    found["plain"] = _timed(task, lambda x: plain(x, *tables), length, hidden)
    compiled = torch.compile(plain)
    found["plain compiled"] = _timed(task, lambda x: compiled(x, *tables), length, hidden)
    peak = peak_flops(task.torch_device, "bf16")
    for figures in found.values():
        if peak and "ms" in figures:
            figures["mfu_with_head"] = per_token * length / (figures["ms"] / 1e3) / peak
    return found


def _timed(task: Task, run: Any, length: int, hidden: int) -> dict[str, Any]:
    x = torch.randn(1, length, hidden, device=task.device, dtype=torch.bfloat16, requires_grad=True)

    def both() -> None:
        run(x).sum().backward()

    return {"ms": task.milliseconds(both), "peak_bytes": task.peak_bytes(both)}


def loss(task: Task) -> dict[str, Any]:
    """The time and the memory of a training step with a vocabulary of 128k, logits whole and in chunks."""
    found = {}
    sizes = [f"model.hidden={task.size(4096, 64)}", "model.layers=1", f"model.vocab={task.size(128256, 512)}"]
    length = [f"batch.sequence_length={task.size(8192, 64)}", "batch.micro_size=1", "batch.global_size=1"]
    for chunked in ("false", "true"):
        training = task.build(*TINY, *sizes, *length, "precision=bf16", f"loss.chunked={chunked}")
        steps = iter(range(1000))
        figures = {"ms": task.milliseconds(lambda training=training, steps=steps: training.step(next(steps)), 5)}
        figures["peak_bytes"] = task.peak_bytes(lambda training=training, steps=steps: training.step(next(steps)))
        found[f"chunked={chunked}"] = figures
        del training
    return found
