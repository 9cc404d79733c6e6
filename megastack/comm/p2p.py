"""Messages between pipeline ranks: one first-in-first-out line for each (source, destination).

A send is posted and never blocks; its tensor is kept until the message is matched. A receive is posted into a fresh
buffer and waited for at first use. Because the lines are ordered, a receiver posts its receives in the sender's order;
:func:`megastack.pipeline.check.check` proves that a schedule does.

On gloo the ranks' axis group carries all lines. NCCL runs all operations of a pair of ranks on one stream, where a send
and a receive in crossing orders would wait for each other, so there every line has a process group of its own.
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
from megastack.comm.group import AxisGroup


class Lines:
    """The message lines of one rank of an axis.

    Args:
        group: the axis along which messages travel; peers are named by their place in it.
        device: where message tensors live.
        peers: the places this rank exchanges messages with.
    """

    def __init__(self, group: AxisGroup, device: torch.device, peers: Sequence[int]) -> None:
        self._group = group
        self._device = device
        self._posted: deque[tuple[Any, Tensor]] = deque()
        self._lines: dict[tuple[int, int], Any] = {}
        for peer in sorted(peers):
            for line in (
                (min(peer, group.rank), max(peer, group.rank)),
                (max(peer, group.rank), min(peer, group.rank)),
            ):
                self._lines[line] = self._open(line)

    def _open(self, line: tuple[int, int]) -> Any:
        if self._device.type == "cpu":
            return self._group.group
        return dist.new_group([self._group.ranks[end] for end in sorted(line)], use_local_synchronization=True)

    def send(self, x: Tensor, peer: int) -> None:
        """Post ``x`` to a peer; it must not be written to afterwards."""
        self._group.ledger.record(self._group.axis, "send", 2, x.numel() * x.element_size())
        self._post(x.contiguous(), peer)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending:
        """Post a receive for the peer's next message, whose shape and dtype are known."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        line = self._lines[peer, self._group.rank]
        return Pending(dist.irecv(buffer, src=self._group.ranks[peer], group=line), lambda: buffer)

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
        line = self._lines[self._group.rank, peer]
        self._posted.append((dist.isend(x, dst=self._group.ranks[peer], group=line), x))

    def _release(self) -> None:
        """Let go of the tensors of messages that were matched."""
        while self._posted and self._posted[0][0].is_completed():
            self._posted.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until every message posted so far was matched."""
        while self._posted:
            self._posted.popleft()[0].wait()
