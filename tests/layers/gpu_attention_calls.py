"""Prints the attention kernels that a GPU runs, from a GPU that is not there: tensors on ``gpu:0`` have no data.

Autograd needs the device before its first backward, so ``test_attention_kernels.py`` runs this in its own process.
Reading a tensor on the host is an error here, as is a tensor of the CPU among those of the GPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megastack.batch import Microbatch
from megastack.layers.attention_kernels import attention
from megastack.layers.context import Context

ROWS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 4, [0] * 2 + [1] * 10])


class Calls(TorchDispatchMode):
    """The names of the attention kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attn" in func.__name__ or "attention" in func.__name__:
            self.names.append(func.__name__.removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def kernels(dtype: torch.dtype, *, documents: bool) -> list[str]:
    """The kernels of a forward and a backward with grouped queries, in order."""
    batch = Microbatch(ROWS, ROWS, ROWS, ROWS if documents else None, samples_B=torch.arange(2))
    with FakeTensorMode() as mode, Calls() as calls:
        cu_seqlens = None if batch.cu_seqlens is None else mode.from_tensor(batch.cu_seqlens).to("gpu:0")
        context = Context(attention_mask=batch.attention_mask, cu_seqlens=cu_seqlens, dtype=dtype)
        x = [torch.randn(2, 12, heads, 64, device="gpu:0", dtype=dtype, requires_grad=True) for heads in (8, 2, 2)]
        out = attention(x[0], x[1], x[2], context)
        out.sum().backward()
        assert out.shape == x[0].shape and all(each.grad is not None and each.grad.shape == each.shape for each in x)
    return calls.names


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("gpu")
    cases = [(dtype, documents) for dtype in (torch.bfloat16, torch.float32) for documents in (False, True)]
    sys.stdout.write(json.dumps([kernels(dtype, documents=documents) for dtype, documents in cases]))
