"""Steps: the device computes what a CPU computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpu.task import TINY, Task
from megastack.placement.boxes import Box
from megastack.random import counter_bits, counter_normal, dropout_mask

MODELS = {
    "llama": [],
    "gpt2": ["model=gpt2_tiny", "model.layers=2"],
    "tied": ["model.tied=true"],
    "qk_norm": ["model.qk_norm=true"],
    "grouped": ["model.kv_groups=2"],
    "multi_query": ["model.kv_groups=1"],
    "biases": ["model.bias=true", "model.norm=layer"],
    "dropout": ["model.dropout=0.1"],
    "attention_dropout": ["model.attention_dropout=0.1"],
    "no_documents": ["data.document_mask=false"],
    "selective": ["recompute.mode=selective"],
    "full": ["recompute.mode=full"],
    "z_loss": ["loss.z_loss=1e-4", "loss.label_smoothing=0.1"],
    "whole_logits": ["loss.chunked=false"],
    "fp16": ["precision=fp16"],
}
LIMITS = {"fp32": 1e-3, "bf16": 3e-2}
"""The largest relative difference of a loss between device and CPU in the steps below."""


def curves(task: Task) -> dict[str, Any]:
    """The loss curves of every model option on the device against those on the CPU, in fp32 and bf16."""
    found, wrong = {}, []
    for name in list(MODELS)[: task.size(len(MODELS), 4)]:
        for dtype in ("fp32", "bf16") if name != "fp16" else ("fp16",):
            overrides = [*TINY, *MODELS[name], f"precision={dtype}"]
            own, reference = (_losses(each, overrides) for each in (task, Task("cpu", task.reduced)))
            difference = max(abs(a - b) / abs(b) for a, b in zip(own, reference, strict=True))
            found[f"{name} {dtype}"] = difference
            if not difference <= LIMITS.get(dtype, LIMITS["bf16"]):
                wrong.append(f"{name} {dtype}")
    if wrong:
        raise AssertionError(f"loss curves differ: {', '.join(wrong)}; {found}")
    return found


def _losses(task: Task, overrides: Sequence[str]) -> list[float]:
    training = task.build(*overrides)
    outcomes = [training.step(step) for step in range(task.size(10, 2))]
    return [float(outcome.loss) for outcome in outcomes if outcome.loss is not None]


def random_bits(task: Task) -> dict[str, Any]:
    """Random bits, dropout masks and initial values are equal bit for bit on the device and on the CPU."""
    n, found = task.size(2**22, 2**12), {}
    index, samples = torch.arange(n), torch.tensor([3, 2**40 + 1])
    device = task.torch_device
    found["bits"] = torch.equal(counter_bits(12345, index), counter_bits(12345, index.to(device)).cpu())
    options = {"start": 7, "length": 64, "features": 128, "p": 0.1}
    masks = [dropout_mask(1, 2, x, "blocks.0.mlp", **options).cpu() for x in (samples, samples.to(device))]
    found["dropout"] = torch.equal(*masks)
    box = Box((0, 0), (64, n // 64))
    values = [
        counter_normal(0, "weight", (64, n // 64), box, std=0.02, dtype=torch.float32, device=where).cpu()
        for where in ("cpu", device)
    ]
    found["initial_values"] = torch.equal(*values)
    found["initial_values_largest_difference"] = float((values[0] - values[1]).abs().max())
    if not (found["bits"] and found["dropout"]):
        raise AssertionError(f"random bits differ between {task.device} and the CPU: {found}")
    return found
