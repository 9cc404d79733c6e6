"""FSDP2's gathers and reductions over megastack's own collectives, so that the ledger counts what travels."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.collectives import Pending, start_all_gather_, start_reduce_scatter_
from megastack.comm.group import AxisGroup


class _Traffic:
    """A way of FSDP2 to communicate that is ours, and counted."""

    def __init__(self, group: AxisGroup, dtype: torch.dtype | None = None) -> None:
        self._group, self._dtype = group, dtype

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(_Traffic):
    """The all-gather; its input lies in its output already.

    On the CPU it goes on until the parameters are used. On a GPU it runs on the stream that FSDP2 has chosen, and
    waiting for it does not hold up the host.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gathering = start_all_gather_(output_tensor, self._group)
        if output_tensor.device.type == "cpu":
            return _Gathering(gathering)
        gathering.wait()
        return None


class _Gathering(dist.Work):
    """A gather under way, as FSDP2 waits for one."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._pending.wait()
        return True


class CountedReduce(_Traffic):
    """The reduce-scatter, in the dtype that is wanted on the wire."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        sent = input_tensor.to(self._dtype or input_tensor.dtype)
        if sent is input_tensor:
            start_reduce_scatter_(sent, self._group, output_tensor).wait()
        else:
            output_tensor.copy_(start_reduce_scatter_(sent, self._group).wait())
