"""Point-to-point messages between pipeline ranks: one first-in-first-out channel per (source, destination).

A send is posted and never blocks; its tensor is kept until the message is matched. A receive is posted with a new
buffer and waited for at first use. Channels are ordered, so a receiver posts its receives in the sender's order;
:func:`megastack.pipeline.check.check` proves that a schedule does.

Channels to higher ranks of the axis use one process group and channels to lower ranks another. NCCL runs all operations
between two ranks of a group in sequence, so a send and a receive in opposite orders would deadlock.
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
from megastack.comm.flight_recorder import Operation
from megastack.comm.group import AxisGroup
from megastack.comm.observer import ObservedWork
from megastack.comm.peers import absent_peers


class P2PChannels:
    """The channels of one rank of an axis.

    Args:
        group: the axis along which messages travel; peers are identified by their rank in it.
        backward: a second process group of the same ranks, for messages to lower ranks.
        device: the device of message tensors.
    """

    def __init__(self, group: AxisGroup, backward: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._backward = backward
        self._device = device
        self._posted: deque[tuple[ObservedWork, Tensor]] = deque()

    def send(self, x: Tensor, peer: int) -> None:
        """Post a send of ``x`` to a peer; ``x`` must not be modified afterwards."""
        self._post(x.contiguous(), peer, x.numel() * x.element_size())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending:
        """Post a receive for the peer's next message, whose shape and dtype are known."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        channel = self._process_group(peer, self._group.rank)
        operation = self._begin("receive", buffer, peer)
        work = dist.irecv(buffer, src=self._group.ranks[peer], group=channel)
        return Pending(ObservedWork(work, self._group.observer, operation), lambda: buffer)

    def send_header(self, value: Any, peer: int) -> None:
        """Post a JSON value that describes the tensors to come; it is not counted."""
        text = json.dumps(value).encode()
        self._post(torch.tensor([len(text)], device=self._device), peer)
        self._post(torch.tensor(list(text), dtype=torch.uint8, device=self._device), peer)

    def receive_header(self, peer: int, about: object = None) -> Any:
        """Wait for the peer's next message and return it, a JSON value; ``about`` says what it describes."""
        if (peers := absent_peers()) is not None:
            return peers.header(about)
        length = int(self.receive((1,), torch.int64, peer).wait())
        return json.loads(bytes(self.receive((length,), torch.uint8, peer).wait().tolist()))

    def _post(self, x: Tensor, peer: int, payload_bytes: int | None = None) -> None:
        self._release()
        operation = self._begin("send", x, peer, payload_bytes)
        work = dist.isend(x, dst=self._group.ranks[peer], group=self._process_group(self._group.rank, peer))
        self._posted.append((ObservedWork(work, self._group.observer, operation), x))

    def _begin(self, op: str, x: Tensor, peer: int, payload_bytes: int | None = None) -> Operation | None:
        """Report a message to the observer before it is posted: NCCL connects two ranks in their first call."""
        group = self._group
        ends = group.ranks[group.rank], group.ranks[peer]
        ranks = ends if op == "send" else ends[::-1]
        return group.observer.on_operation(group.axis, op, ranks, tuple(x.shape), payload_bytes)

    def _process_group(self, source: int, destination: int) -> dist.ProcessGroup | None:
        return self._group.group if source < destination else self._backward

    def _release(self) -> None:
        """Release the tensors of matched messages."""
        while self._posted and self._posted[0][0].is_completed():
            self._posted.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until every message posted so far is matched."""
        while self._posted:
            self._posted.popleft()[0].wait()
