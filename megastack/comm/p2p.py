"""Messages between pipeline ranks: one first-in-first-out line for each (source, destination).

A send is posted and never blocks; its tensor is kept until the message is matched. A receive is posted into a fresh
buffer and waited for at first use. Because the lines are ordered, a receiver posts its receives in the sender's order;
:func:`megastack.pipeline.check.check` proves that a schedule does.

Lines to higher places run in one process group and lines to lower places in another, because NCCL runs all operations
of a pair of ranks in a group one after another: a send and a receive in crossing orders would wait for each other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.collectives import Pending
from megastack.comm.flight_recorder import Waited
from megastack.comm.group import AxisGroup


class P2PChannels:
    """The message lines of one rank of an axis.

    Args:
        group: the axis along which messages travel; peers are named by their place in it.
        backward: a second process group of the same ranks, which carries messages to lower places.
        device: where message tensors live.
    """

    def __init__(self, group: AxisGroup, backward: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._backward = backward
        self._device = device
        self._posted: deque[tuple[Waited, Tensor]] = deque()

    def send(self, x: Tensor, peer: int) -> None:
        """Post ``x`` to a peer; it must not be written to afterwards."""
        self._group.ledger.record(self._group.axis, "send", 2, x.numel() * x.element_size())
        self._post(x.contiguous(), peer)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending:
        """Post a receive for the peer's next message, whose shape and dtype are known."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        line = self._line(peer, self._group.rank)
        work = self._tracked("receive", buffer, dist.irecv(buffer, src=self._group.ranks[peer], group=line), peer)
        return Pending(work, lambda: buffer)

    def send_header(self, value: Any, peer: int) -> None:
        """Post a JSON value, for what must be said before tensors can be received; not counted in the ledger."""
        text = json.dumps(value).encode()
        self._post(torch.tensor([len(text)], device=self._device), peer)
        self._post(torch.tensor(list(text), dtype=torch.uint8, device=self._device), peer)

    def receive_header(self, peer: int) -> Any:
        """Wait for the peer's next message, a JSON value."""
        length = int(self.receive((1,), torch.int64, peer).wait())
        return json.loads(bytes(self.receive((length,), torch.uint8, peer).wait().tolist()))

    def _post(self, x: Tensor, peer: int) -> None:
        self._release()
        work = dist.isend(x, dst=self._group.ranks[peer], group=self._line(self._group.rank, peer))
        self._posted.append((self._tracked("send", x, work, peer), x))

    def _tracked(self, op: str, x: Tensor, work: dist.Work | None, peer: int) -> Waited:
        """A message's work, once it is posted, with its place on the trail."""
        assert work is not None
        ends = self._group.ranks[self._group.rank], self._group.ranks[peer]
        operation = self._group.flight_recorder.start(
            self._group.axis, op, tuple(x.shape), ends if op == "send" else ends[::-1]
        )
        return Waited(work, self._group.flight_recorder, operation)

    def _line(self, source: int, destination: int) -> dist.ProcessGroup | None:
        return self._group.group if source < destination else self._backward

    def _release(self) -> None:
        """Let go of the tensors of messages that were matched."""
        while self._posted and self._posted[0][0].is_completed():
            self._posted.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until every message posted so far was matched."""
        while self._posted:
            self._posted.popleft()[0].wait()
