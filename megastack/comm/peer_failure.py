"""Peer failures: another rank is gone or late, and that rank reports the cause.

Where a wait for such a rank raises an error (gloo), :func:`is_peer_failure` recognises it. Transports use many texts
for such errors, and some do not name the transport, so the text alone is not sufficient. The place where an error was
raised decides: inside a collective, a message, a wait for either, or the store.

Where no wait raises (NCCL), :class:`PeerMonitor` notices in two ways that a rank is gone:

- *Connections.* The ranks form a ring in which neighbours hold a TCP connection. The kernel closes the connections of a
  process that ends, however it ends. Its neighbours notice at once, and pass its number on around the ring.
- *Heartbeats.* A machine that loses its power or its network closes nothing. Every rank therefore also renews a key in
  the store of the job, and watches the key of the next rank. These are a few small requests for each rank and period,
  whatever the number of ranks.

If a firewall prevents the connections, the heartbeats alone remain.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist

from megastack.comm.periodic import PeriodicThread
from megastack.torch_private import DISPATCH_FILE, TRANSPORT_FILES

HEARTBEAT_S = 2.0
SILENT_S = 20.0
"""A rank without a heartbeat for this time has ended. C code that holds Python's interpreter lock delays heartbeats."""
_CONNECT_S, _RETRY_S = 5.0, 0.1
_LOST, _DONE = "megastack/lost", "done"
_OWN = f"{Path(__file__).parent}/"
_TEXTS = ("gloo/", "caused pair closure", "NCCL")
"""Texts for waits in code outside of torch and megastack, where the call itself leaves no frame."""
_LOG = logging.getLogger(__name__)


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error, or one of its causes, only indicates that other ranks cannot be reached."""
    return any(_signals_peer_failure(cause) for cause in _causes(error))


def _signals_peer_failure(error: BaseException) -> bool:
    """Whether an error has torch's class for peer failures, or is a plain ``RuntimeError`` of the transport.

    Subclasses of ``RuntimeError`` mean something else: out of memory, not implemented, a failed kernel.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and (_in_transport(error) or any(text in str(error) for text in _TEXTS))


def _in_transport(error: BaseException) -> bool:
    """Whether an error was raised in torch's communication, or in one of megastack's waits for it."""
    calls = []
    trace = error.__traceback__
    while trace is not None:
        calls.append((trace.tb_frame.f_code.co_filename, trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    return is_transport(calls)


def is_transport(calls: Sequence[tuple[str, str]]) -> bool:
    """Whether a stack, as files and functions, ends in torch's communication, or in one of megastack's waits for it."""
    file, name = next((call for call in reversed(calls) if call[0] != DISPATCH_FILE), ("", ""))
    return file in TRANSPORT_FILES or (file.startswith(_OWN) and name == "wait")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class PeerMonitor:
    """A context manager that notices on threads that another rank ended.

    Args:
        store: shared by the ranks of the mesh; the monitor uses a clone.
        rank: this rank.
        world_size: the number of ranks.
        master: an address that all ranks can reach, which shows the network that they share.
        period_s: seconds between heartbeats.
        silent_s: seconds without a heartbeat after which a rank has ended.

    Attributes:
        lost: the rank that failed or ended first; None as long as there is none.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        master: str | None = None,
        period_s: float = HEARTBEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self.lost: int | None = None
        self._store, self._rank, self._next = cast(Any, store).clone(), rank, (rank + 1) % world_size
        self._store.set_timeout(timedelta(seconds=silent_s))
        self._silent_s = silent_s
        self._beats, self._seen, self._seen_at = 0, b"", time.monotonic()
        self._heartbeats = PeriodicThread("heartbeats", period_s, self._poll)
        self._ring = _Ring(cast(Any, store).clone(), rank, world_size, self._lose, master)

    def __enter__(self) -> PeerMonitor:
        self._ring.start()
        self._heartbeats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeats.stop()
        self._ring.stop(failed=error is not None)
        with contextlib.suppress(dist.DistError):
            if error is None:
                self._store.set(_heartbeat(self._rank), _DONE)
            else:
                self._store.set(_LOST, str(self._rank))

    def describe(self) -> str:
        """Describe the loss of a rank."""
        return f"rank {self.lost} ended or no longer responds"

    def _lose(self, rank: int) -> None:
        """Record the first rank that is gone, and pass it on."""
        if self.lost is None:
            self.lost = rank
            self._ring.send(rank)
            with contextlib.suppress(dist.DistError):
                self._store.set(_LOST, str(rank))

    def _poll(self) -> None:
        if self.lost is None:
            try:
                self._beat()
            except dist.DistError:  # rank 0, or the agent of its machine, serves the store
                self._lose(0)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(_heartbeat(self._rank), str(self._beats))
        if self._store.check([_LOST]):
            self._lose(int(self._store.get(_LOST)))
            return
        now, key = time.monotonic(), _heartbeat(self._next)
        found = self._store.get(key) if self._store.check([key]) else b""
        if found != self._seen:
            self._seen, self._seen_at = found, now
        if now - self._seen_at > self._silent_s and found.decode() != _DONE:
            self._lose(self._next)


def _heartbeat(rank: int) -> str:
    return f"megastack/heartbeat/{rank}"


_MESSAGE = struct.Struct("!i")
"""What neighbours send: the number of a rank that is gone, or one of the following."""
_WELCOME, _GOODBYE = -1, -2


class _Ring:
    """The connections of one rank to its neighbours in the ring of all ranks, on a thread.

    A rank listens at a free port, and publishes its addresses, the port and a secret in the store. The rank before it
    connects and sends the secret, so that no other program is taken for a rank. A process that this one forks closes
    its copies of the connections; otherwise they would stay open when this process has ended.

    Args:
        store: shared by the ranks.
        rank: this rank.
        world_size: the number of ranks.
        on_lost: called on the thread with the number of a rank that is gone.
        master: an address that all ranks can reach.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, on_lost: Callable[[int], object], master: str | None
    ) -> None:
        self._store, self._rank, self._on_lost = store, rank, on_lost
        self._previous, self._next = (rank - 1) % world_size, (rank + 1) % world_size
        self._addresses, self._secret = _own_addresses(master), secrets.token_bytes(16)
        self._listener = _listen()
        self._stopped, self._stop = socket.socketpair()
        self._links: dict[socket.socket, int] = {}
        self._calling: socket.socket | None = None
        self._has_next = False
        self._last_message = _GOODBYE
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        close = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (close() or (lambda: None))())

    def start(self) -> None:
        """Publish the address of this rank; the thread connects."""
        record = {"addresses": self._addresses, "port": self._listener.getsockname()[1], "secret": self._secret.hex()}
        with contextlib.suppress(dist.DistError):
            self._store.set(_address(self._rank), json.dumps(record))
        self._thread.start()

    def send(self, message: int) -> None:
        """Send a message to the neighbours."""
        for link in (*self._links, self._calling):  # the next rank may just be answering a call
            if link is not None:
                with contextlib.suppress(OSError):
                    link.sendall(_MESSAGE.pack(message))

    def stop(self, *, failed: bool) -> None:
        """Close the connections; the neighbours take this rank for lost only if it ``failed``."""
        self._last_message = self._rank if failed else _GOODBYE
        self._stop.close()
        self._thread.join()

    def _close(self) -> None:
        for each in (*self._links, self._calling, self._listener, self._stopped, self._stop):
            if each is not None:
                each.close()
        self._selector.close()

    def _run(self) -> None:
        calls = self._call()
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        try:
            while True:
                is_calling = next(calls, False)
                for ready, _ in self._selector.select(_RETRY_S if is_calling else None):
                    if ready.data is None:
                        self.send(self._last_message)
                        return
                    ready.data(ready.fileobj)
        finally:
            self._close()

    def _call(self) -> Iterator[bool]:
        """Connect to the next rank, at one of its addresses; yields True after each attempt."""
        try:
            while not self._store.check([_address(self._next)]):
                yield True
            record = json.loads(self._store.get(_address(self._next)))
        except dist.DistError:
            return  # the heartbeats notice it as well
        for address in record["addresses"]:
            with contextlib.suppress(OSError):
                link = socket.create_connection((address, record["port"]), _CONNECT_S)
                link.sendall(bytes.fromhex(record["secret"]))
                self._selector.register(link, selectors.EVENT_READ, self._answered)
                self._calling = link
            while self._calling is not None:
                yield True
            if self._has_next:
                return
        _LOG.debug("rank %d cannot be reached at %s; only its heartbeats are watched", self._next, record["addresses"])

    def _answered(self, link: socket.socket) -> None:
        """Read the answer to a call. Another program at the same address and port does not send it."""
        self._calling, self._has_next = None, _received(link) == _WELCOME
        self._selector.unregister(link)
        self._welcome(link, self._next, self._has_next)

    def _accept(self, listener: socket.socket) -> None:
        """Answer a call, if it is by the previous rank."""
        with contextlib.suppress(OSError):
            link, _ = listener.accept()
            link.settimeout(_CONNECT_S)
            is_rank = secrets.compare_digest(link.recv(len(self._secret), socket.MSG_WAITALL), self._secret)
            if is_rank:
                link.sendall(_MESSAGE.pack(_WELCOME))
            self._welcome(link, self._previous, is_rank)

    def _welcome(self, link: socket.socket, peer: int, is_rank: bool) -> None:
        """Watch a connection if it is with a rank."""
        if is_rank:
            self._links[link] = peer
            self._selector.register(link, selectors.EVENT_READ, self._read)
        else:
            link.close()

    def _read(self, link: socket.socket) -> None:
        """Read a message of a neighbour, or that its process has ended."""
        message = _received(link)
        if message is not None and message >= 0:
            self._on_lost(message)
            return
        peer = self._links.pop(link)
        self._selector.unregister(link)
        link.close()
        if message is None:
            self._on_lost(peer)


def _address(rank: int) -> str:
    return f"megastack/address/{rank}"


def _received(link: socket.socket) -> int | None:
    """The next message of a connection; None if the process at its other end has ended.

    A connection that breaks in another way, such as a time-out in the network, does not show that. It is not used
    further, as if the other rank had ended normally.
    """
    try:
        data = link.recv(_MESSAGE.size, socket.MSG_WAITALL)
    except OSError:
        return _GOODBYE
    return int(_MESSAGE.unpack(data)[0]) if len(data) == _MESSAGE.size else None


def _own_addresses(master: str | None) -> list[str]:
    """This machine's address in the network that leads to ``master``, and its host name."""
    found = list[str]()
    if master is not None:
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                found.append(probe.getsockname()[0])
    return [*found, socket.gethostname()]


def _listen() -> socket.socket:
    """A socket that listens at a free port, for both versions of IP if possible."""
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
