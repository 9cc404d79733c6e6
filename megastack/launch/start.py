"""Start ranks on this machine with torch's elastic agent, which watches them and leaves nothing running.

A forked rank inherits the locks of its parent as they are, and nobody in it will ever release those that another thread
of the parent holds. One such thread serves the store in which ranks find each other: for every connection it asks the
C library for the name of an address, under a lock. A rank forked in that moment would wait for the lock for ever at its
own first look-up. So no rank talks to the store before all of them have been forked: they meet at a start line.

Ranks are always forked, whoever calls: no main module is imported again, and closures reach them as they are. A parent
that computed on several threads is no hindrance. OpenMP keeps a pool of threads for each thread that computed; a child
of such a thread would wait for threads that it does not have. The agent runs on a thread of its own, which never
computes, so its children have no pool yet and make their own.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
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
from megastack.errors import MegastackError
from megastack.torch_private import is_in_bad_fork

T = TypeVar("T")

QUIET = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
"""Loggers of the agent; what they have to say about failures is said better by the ranks."""
START_METHOD = "fork"
LOOKS_EVERY_S = 0.002
INTERRUPTED_EVERY_S = 0.1
ADDRESS = "127.0.0.1"
RENDEZVOUS = "megastack"


class NotStarted(MegastackError):
    """Ranks that others wait for have not been started."""


class StartLine:
    """Where ranks of one parent wait until all of them have been started.

    Marks in shared memory, without a lock: a rank that is killed on the way leaves nothing behind that others need.

    Args:
        ranks: how many there will be.
        timeout_s: how long one waits for the others.
    """

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self._arrived = multiprocessing.get_context(START_METHOD).RawArray("b", ranks)
        self._timeout_s = timeout_s

    def wait(self, rank: int) -> None:
        """Wait as ``rank`` until all ranks are here.

        Raises:
            NotStarted: some were not started in time; about those.
        """
        self._arrived[rank] = 1
        deadline = time.monotonic() + self._timeout_s
        while missing := [other for other, here in enumerate(self._arrived) if not here]:
            if time.monotonic() > deadline:
                who = f"ranks {', '.join(map(str, missing))} were" if missing[1:] else f"rank {missing[0]} was"
                raise NotStarted(f"{who} not started within launch.timeout_s={self._timeout_s:g}").about(missing)
            time.sleep(LOOKS_EVERY_S)


class _OneAgent(StaticTCPRendezvous):
    """Torch's rendezvous without a vote, for an agent that waits for no other: a store in which its ranks meet.

    Torch's has to be told a port that is free; here the store finds one. The one with a vote, which torchrun has, looks
    through all modules at each of its steps to find the name of its caller.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(ADDRESS, 0, 0, 1, parameters.run_id, math.ceil(parameters.config["timeout_s"]))

    def get_backend(self) -> str:
        """The name it is registered by."""
        return RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and where ranks find it."""
        made = super().next_rendezvous()
        port = made.store.underlying_store.port  # type: ignore[attr-defined]  # a TCPStore behind a prefix
        return RendezvousInfo(made.store, made.rank, made.world_size, RendezvousStoreInfo(ADDRESS, port))


rendezvous_handler_registry.register(RENDEZVOUS, _OneAgent)


def keeps_inherited(entry: Callable[..., T]) -> Callable[..., T]:
    """A function for a forked process that never destroys an object of its parent.

    The store of an earlier run may be garbage in the parent. Its destructor needs threads that a forked process does
    not have: a garbage collection there would never return, or crash.
    """

    @wraps(entry)
    def run(*arguments: Any) -> T:
        gc.freeze()
        return entry(*arguments)

    return run


def run_agent(
    agent: LaunchConfig, entry: Callable[..., Any], *arguments: Any, before: Callable[[], object] = lambda: None
) -> dict[int, Any]:
    """Start the ranks, wait until they have ended; what ``entry(*arguments)`` returned on each.

    Args:
        agent: from :func:`agent`.
        entry: what each rank runs; inherited, so it need not be picklable, nor need its arguments.
        before: called immediately before the ranks are started; starts none where it raises.

    Raises:
        ChildFailedError: a rank failed.
    """
    returned, raised = dict[int, Any](), list[BaseException]()

    def run() -> None:
        try:
            before()
            gc.collect()
            returned.update(elastic_launch(agent, keeps_inherited(entry))(*arguments))
        except BaseException as error:
            raised.append(error)

    others = set(multiprocessing.active_children())
    thread = threading.Thread(target=run, name="agent", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # an interrupt of this process: what it started ends with it
        while thread.is_alive():
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            thread.join(INTERRUPTED_EVERY_S)
        raise
    if raised:
        raise raised[0]
    return returned


def agent(config: TrainConfig, world_size: int) -> LaunchConfig:
    """How torch's elastic agent starts the ranks of this machine, and says little about it."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Torch asks the CUDA runtime for its default NUMA options, and after that no forked process can use CUDA.
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

    Any call to the CUDA runtime has this effect, that of ``torch.cuda.is_available()`` included. Torch knows it only in
    the forked process, so one is forked to ask.
    """
    if not torch.backends.cuda.is_built():
        return False
    child = os.fork()
    if child == 0:
        os._exit(int(is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent is gone, a killed one included (Linux only)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
