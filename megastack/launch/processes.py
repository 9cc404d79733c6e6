"""Rank processes on this machine: start them, forward signals to them, kill stragglers after a failure.

Torch's elastic agent starts the ranks, monitors them and leaves none running. Ranks are always forked: the main module
is not imported again, and closures need not be picklable. The parent may already have computed on several threads.
OpenMP keeps a thread pool for every thread that has computed, and a child forked from such a thread would wait for pool
threads that it does not have. The agent therefore runs on its own thread, which never computes; its children start
without a pool and create their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import wraps
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.numa.binding import AffinityMode, NumaOptions

from megastack.config.schema import TrainConfig
from megastack.launch.failure import ObservedExits
from megastack.launch.rendezvous import StartBarrier
from megastack.observe.streams import protect_output, write_stderr
from megastack.torch_private import is_in_bad_fork
from megastack.training.signals import handled_signals

T = TypeVar("T")

START_METHOD = "fork"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""
QUIET = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
"""Loggers of the agent; the ranks' own reports replace its messages about failures."""
ADDRESS = "127.0.0.1"
RENDEZVOUS = "megastack"
INTERRUPTED_EVERY_S, REPEAT_SIGNAL_S, CHECK_EVERY_S = 0.1, 1.0, 0.2
FIND_EVERY_S = 0.01
"""How often to look for started processes. Ranks wait at a barrier until all are forked, so none is missed."""


class RanksFailed(Exception):
    """A rank of this machine failed.

    Attributes:
        exits: how the ranks ended.
    """

    def __init__(self, exits: ObservedExits) -> None:
        super().__init__(f"rank {exits.first} failed")
        self.exits = exits


def start_ranks(
    config: TrainConfig,
    ranks: int,
    entry: Callable[..., Any],
    *arguments: Any,
    failed: Callable[[], bool],
    before: Callable[[], object] = lambda: None,
) -> dict[int, Any]:
    """Start ranks and wait until they have ended.

    Args:
        config: contains the time-outs.
        ranks: the number of ranks.
        entry: what each rank runs, called with a function that waits for the other ranks, and the arguments.
        arguments: inherited by the ranks, so they need not be picklable.
        failed: whether a rank has reported a failure; called often, on a thread.
        before: called immediately before the ranks are started; if it raises, no rank is started.

    Returns:
        The result of ``entry``, by rank.

    Raises:
        RanksFailed: a rank failed.
    """
    barrier = StartBarrier(ranks, config.launch.timeout_s)
    stragglers = StragglerKiller(ranks, failed, config.launch.grace_s)
    try:
        with stragglers:
            return run_agent(agent(config, ranks), _rank, entry, barrier, *arguments, before=before)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        codes = stragglers.exit_codes() | {rank: failure.exitcode}
        raise RanksFailed(ObservedExits(rank, codes, stragglers=stragglers.killed)) from error


def _rank(entry: Callable[..., T], barrier: StartBarrier, *arguments: Any) -> T:
    """Run a forked rank, which dies with its launcher."""
    die_with_parent()
    protect_output()
    return entry(barrier.wait, *arguments)


class _SingleAgentRendezvous(StaticTCPRendezvous):
    """Static rendezvous for a run with a single agent: a store for its ranks, on a port that the store picks.

    Torch's static rendezvous requires a free port as an argument. Its dynamic rendezvous, which torchrun uses, searches
    all modules for the name of its caller at every step.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(ADDRESS, 0, 0, 1, parameters.run_id, math.ceil(parameters.config["timeout_s"]))

    def get_backend(self) -> str:
        """Return the name under which it is registered."""
        return RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and its address."""
        made = super().next_rendezvous()
        port = made.store.underlying_store.port  # type: ignore[attr-defined]  # a TCPStore behind a prefix
        return RendezvousInfo(made.store, made.rank, made.world_size, RendezvousStoreInfo(ADDRESS, port))


rendezvous_handler_registry.register(RENDEZVOUS, _SingleAgentRendezvous)


def _keeps_inherited(entry: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function for a forked process so that it never destroys an object of its parent.

    The store of an earlier run may be garbage in the parent. Its destructor needs threads that a forked process does
    not have, so a garbage collection there would hang or crash.
    """

    @wraps(entry)
    def run(*arguments: Any) -> T:
        gc.freeze()
        return entry(*arguments)

    return run


def run_agent(
    agent: LaunchConfig, entry: Callable[..., Any], *arguments: Any, before: Callable[[], object] = lambda: None
) -> dict[int, Any]:
    """Run the elastic agent until its ranks have ended, and return the results of ``entry(*arguments)`` by rank.

    Args:
        agent: from :func:`agent`.
        entry: what each rank runs; inherited, so neither it nor its arguments need to be picklable.
        before: called immediately before the ranks are started; if it raises, no rank is started.

    Raises:
        ChildFailedError: a rank failed.
    """
    returned, raised = dict[int, Any](), list[BaseException]()

    def run() -> None:
        try:
            before()
            gc.collect()
            returned.update(elastic_launch(agent, _keeps_inherited(entry))(*arguments))
        except BaseException as error:
            raised.append(error)

    others = set(multiprocessing.active_children())
    thread = threading.Thread(target=run, name="agent", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # this process was interrupted: the ranks end with it
        while thread.is_alive():
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            thread.join(INTERRUPTED_EVERY_S)
        raise
    if raised:
        raise raised[0]
    return returned


def agent(config: TrainConfig, world_size: int) -> LaunchConfig:
    """Return the configuration of an elastic agent that starts the ranks of this machine and logs little."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Torch's default NUMA options call the CUDA runtime, after which no forked process can use CUDA.
    launch = LaunchConfig(
        numa_options=NumaOptions(AffinityMode.NODE),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend=RENDEZVOUS,
        rdzv_configs={"timeout_s": config.launch.timeout_s},
        local_addr=ADDRESS,
        max_restarts=0,
        monitor_interval=0.1,
        start_method=START_METHOD,
        signals_to_handle="",
        shutdown_timeout=math.ceil(config.launch.grace_s),
    )
    launch.numa_options = None
    return launch


def forks_lose_cuda() -> bool:
    """Whether a process forked from this one could not use CUDA.

    Any call of the CUDA runtime has this effect, including ``torch.cuda.is_available()``. Torch detects it only in the
    forked process, so this function forks a process to find out.
    """
    if not torch.backends.cuda.is_built():
        return False
    child = os.fork()
    if child == 0:
        os._exit(int(is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def die_with_parent() -> None:
    """Request SIGKILL from the kernel when the parent ends for any reason (Linux only)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))


class StoppedEarly(Exception):
    """A signal to stop arrived before any rank was started."""


class StopForwarder:
    """A context manager that forwards stop signals to the processes started in it, which save and return.

    A rank receives the original signal, so its records name it. The elastic agent would also forward signals, but then
    it stops listening: ranks that saved and returned would wait for it until they are killed. With this context manager
    it keeps listening, and the run ends as soon as the ranks do. Ranks that exceed the grace period are killed, and a
    second SIGINT kills them at once. A signal that arrives before there are processes is sent to the first ones found;
    code that starts processes calls :meth:`check` first. An ignored SIGHUP stays ignored, as under nohup.

    Args:
        grace_s: seconds from the signal until the ranks are killed.

    Attributes:
        received: the first signal.
        killed: whether ranks had to be killed.
    """

    def __init__(self, grace_s: float) -> None:
        self.received: signal.Signals | None = None
        self.killed = False
        self._grace_s = grace_s
        self._owner = os.getpid()
        self._kill_now = self._over = False
        self._wake = threading.Event()
        self._others = {child.pid for child in multiprocessing.active_children()}
        self._thread: threading.Thread | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopForwarder:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._on_signal) for number in handled_signals(SIGNALS)}
        return self

    def check(self) -> None:
        """Raise if a stop signal has arrived; called immediately before the processes are started.

        Raises:
            StoppedEarly: a signal has arrived already.
        """
        if self.received is not None:
            raise StoppedEarly(f"received {self.received.name} before the ranks started")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a forked rank that has not set its own handlers yet; the signal is repeated
        name = signal.Signals(number)
        if self.received is not None:
            if number == signal.SIGINT:
                self._kill_now = True
                self._wake.set()
            return
        self.received = name
        hint = " (a second SIGINT kills them)" if name is signal.SIGINT else ""
        write_stderr(f"{name.name}: the ranks finish their step, save and stop{hint}\n")
        self._thread = threading.Thread(target=self._forward, args=(name,), daemon=True)
        self._thread.start()

    def _forward(self, number: signal.Signals) -> None:
        """Repeat the signal until the run ends, since a rank may not handle it yet; kill after the grace period."""
        deadline, ranks = time.monotonic() + self._grace_s, list[int]()
        while not (self._over or self.killed):
            ranks = ranks or self._children()
            self.killed = bool(ranks) and (self._kill_now or time.monotonic() >= deadline)
            for pid in ranks:
                _send(pid, signal.SIGKILL if self.killed else number)
            self._wake.wait(REPEAT_SIGNAL_S)

    def _children(self) -> list[int]:
        children = {child.pid for child in multiprocessing.active_children()} - self._others
        return [pid for pid in children if pid is not None]


class StragglerKiller:
    """A context manager that kills the processes started in it that are still alive ``grace_s`` after a failure.

    After a failure, the elastic agent asks the other ranks to end, with its own time-out. A process that is stopped, or
    whose device waits for another rank, does not respond.

    Args:
        ranks: the number of processes that will be started.
        failed: whether a rank has reported a failure; called often, on a thread. An exit code is a failure as well.
        grace_s: how long the others may take to end.

    Attributes:
        killed: the ranks that were killed.
    """

    def __init__(self, ranks: int, failed: Callable[[], bool], grace_s: float) -> None:
        self._count, self._failed, self._grace_s = ranks, failed, grace_s
        self._others = set(multiprocessing.active_children())
        self.killed: set[int] = set()
        self._ranks: list[BaseProcess] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stragglers", daemon=True)

    def __enter__(self) -> StragglerKiller:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(CHECK_EVERY_S if len(self._ranks) == self._count else FIND_EVERY_S):
            self._find()
            if self._failed() or any(map(_has_failed, self._ranks)):
                if not self._over.wait(self._grace_s):
                    self._kill()
                return

    def _find(self) -> None:
        """Find the processes in the order of their start, by the numbers in their names, until all are found.

        Listing living children reaps dead ones, which the agent waits for on its thread, so it is not repeated.
        """
        if len(self._ranks) < self._count:
            found = set(multiprocessing.active_children()) - self._others
            self._ranks = sorted(found, key=lambda child: [int(number) for number in re.findall(r"\d+", child.name)])

    def _kill(self) -> None:
        for rank, child in enumerate(self._ranks):
            if child.pid is not None and child.is_alive():
                self.killed.add(rank)
                _send(child.pid, signal.SIGKILL)

    def exit_codes(self) -> dict[int, int]:
        """Return the exit code of each rank, after the context; empty if some ended before all were found."""
        codes = {rank: child.exitcode for rank, child in enumerate(self._ranks)}
        return {rank: code for rank, code in codes.items() if code is not None and len(codes) == self._count}


def _has_failed(child: BaseProcess) -> bool:
    """Whether a process ended with an exit code; leaves it to the agent to reap it."""
    try:
        ended = os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the agent has reaped it
        return bool(child.exitcode)
    return ended is not None and ended.si_status != 0


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
