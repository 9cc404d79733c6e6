"""FSDP2's all-gathers and reduce-scatters over megastack's own collectives, so that they are counted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.backend import backend_of
from megastack.comm.collectives import Pending, start_all_gather_, start_reduce_scatter_
from megastack.comm.group import AxisGroup


class _Collective:
    """FSDP2's interface for custom communication."""

    def __init__(self, group: AxisGroup, dtype: torch.dtype | None = None) -> None:
        self._group, self._dtype = group, dtype

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(_Collective):
    """The all-gather; its input already lies in its output.

    Where waiting blocks the host, the wait comes when the parameters are used. On a GPU the gather runs on the stream
    that FSDP2 has chosen, which waits at once.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gathering = start_all_gather_(output_tensor, self._group)
        if backend_of(output_tensor.device).wait_blocks_host:
            return _Gathering(gathering)
        gathering.wait()
        return None


class _Gathering(dist.Work):
    """A gather in progress, as FSDP2 waits for one."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._pending.wait()
        return True


class CountedReduce(_Collective):
    """The reduce-scatter, in the dtype of the communication."""

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
