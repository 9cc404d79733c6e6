"""Point-to-point messages between pipeline ranks: one first-in-first-out channel per (source, destination).

A send is posted and its tensors are kept until the message is matched. A receive is posted with a new buffer and waited
for at first use. Channels are ordered, so a receiver posts its receives in the sender's order;
:func:`megastack.pipeline.check.check` proves that a schedule does.

Where waiting blocks the host (gloo), a rank never waits for a send within a step; it releases the messages that it
finds matched. On a GPU the host runs ahead of the messages, so it would find none matched and keep the outputs of all
microbatches. There each channel has a maximum number of posted messages, and the *stream* waits for the oldest before
the next one is posted. Memory then follows the schedule and not the speed of the host.

Channels to higher ranks of the axis use one process group and channels to lower ranks another. NCCL runs all operations
between two ranks of a group in sequence, so a send and a receive in opposite orders would deadlock.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.backend import backend_of, transport_of
from megastack.comm.collectives import Pending
from megastack.comm.flight_recorder import Operation
from megastack.comm.group import AxisGroup
from megastack.comm.observer import ObservedWork
from megastack.comm.peers import absent_peers

_Message = list[tuple[ObservedWork, Tensor]]
"""The operations and tensors of a posted message."""


class P2PChannels:
    """The channels of one rank of an axis.

    Args:
        group: the axis along which messages travel; peers are identified by their rank in it.
        backward: a second process group of the same ranks, for messages to lower ranks.
        device: the device of message tensors.
        max_posted: the most messages to keep on a channel; the oldest is waited for before one more is posted. Ignored
            where waiting blocks the host.
    """

    def __init__(
        self, group: AxisGroup, backward: dist.ProcessGroup | None, device: torch.device, *, max_posted: int = 2
    ) -> None:
        self._group = group
        self._backward = backward
        self._device = device
        self._max_posted = None if backend_of(device).wait_blocks_host else max_posted
        self._posted: dict[int, deque[_Message]] = defaultdict(deque)

    @property
    def posted(self) -> int:
        """The number of messages whose tensors are kept."""
        return sum(map(len, self._posted.values()))

    def send(self, tensors: Sequence[Tensor], peer: int, *, header: Any = None) -> None:
        """Post one message: its tensors in order, which must not be modified afterwards.

        Args:
            tensors: the tensors.
            peer: the receiver.
            header: a JSON value that describes the tensors, if the receiver does not know them; it is not counted.
        """
        self._release(peer)
        message = [] if header is None else [self._post(x, peer) for x in self._encoded(header)]
        message += [self._post(x.contiguous(), peer, x.numel() * x.element_size()) for x in tensors]
        self._posted[peer].append(message)

    def connect(self, peers: Iterable[int]) -> None:
        """Create the communicators of all channels from and to peers, with one message in each direction.

        Called on all ranks that have a channel. As in :func:`megastack.comm.collectives.connect`, one order of all
        pairs of ranks excludes a deadlock. The messages are recorded but not counted.
        """
        rank = self._group.rank
        for peer in sorted(set(peers), key=lambda peer: sorted((rank, peer))):
            for source in sorted((rank, peer)):
                if source == rank:
                    self._posted[peer].append([self._post(torch.zeros(1, device=self._device), peer)])
                else:
                    self.receive((1,), torch.float32, peer).wait()
        self.finish()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending:
        """Post a receive for the peer's next message, whose shape and dtype are known."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        channel = self._process_group(peer, self._group.rank)
        operation = self._begin("receive", buffer, peer)
        work = transport_of(self._group, self._device).receive_(buffer, self._group, peer, channel)
        return Pending(ObservedWork(work, self._group.observer, operation), lambda: buffer)

    def receive_header(self, peer: int, about: object = None) -> Any:
        """Wait for the header of the peer's next message and return it; ``about`` says what it describes.

        The host reads two tensors, once for each boundary between stages and shape of a microbatch.
        """
        if (peers := absent_peers()) is not None:
            return peers.header(about)
        length = int(self.receive((1,), torch.int64, peer).wait())
        return json.loads(bytes(self.receive((length,), torch.uint8, peer).wait().tolist()))

    def _encoded(self, value: Any) -> tuple[Tensor, Tensor]:
        """A JSON value as its length and its text, on the device of the messages."""
        text = list(json.dumps(value).encode())
        length = torch.tensor([len(text)], device=self._device)
        return length, torch.tensor(text, dtype=torch.uint8, device=self._device)

    def _post(self, x: Tensor, peer: int, payload_bytes: int | None = None) -> tuple[ObservedWork, Tensor]:
        operation = self._begin("send", x, peer, payload_bytes)
        channel = self._process_group(self._group.rank, peer)
        work = transport_of(self._group, self._device).send(x, self._group, peer, channel)
        return ObservedWork(work, self._group.observer, operation), x

    def _begin(self, op: str, x: Tensor, peer: int, payload_bytes: int | None = None) -> Operation | None:
        """Report a message to the observer before it is posted: NCCL connects two ranks in their first call."""
        group = self._group
        ends = group.ranks[group.rank], group.ranks[peer]
        ranks = ends if op == "send" else ends[::-1]
        return group.observer.on_operation(group.axis, op, ranks, tuple(x.shape), payload_bytes)

    def _process_group(self, source: int, destination: int) -> dist.ProcessGroup | None:
        return self._group.group if source < destination else self._backward

    def _release(self, peer: int) -> None:
        """Release messages before one more is posted to a peer."""
        if self._max_posted is None:
            for channel in self._posted.values():
                while channel and all(work.is_completed() for work, _ in channel[0]):
                    _wait(channel.popleft())
            return
        while len(self._posted[peer]) >= self._max_posted:
            _wait(self._posted[peer].popleft())

    def finish(self) -> None:
        """Wait until every message posted so far is matched."""
        for channel in self._posted.values():
            while channel:
                _wait(channel.popleft())


def _wait(message: _Message) -> None:
    for work, _ in message:
        work.wait()
