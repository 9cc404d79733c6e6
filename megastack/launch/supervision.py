"""What runs beside the work of a rank: its watchdog, the monitor of its peers, and the end of a rank that is blocked.

With gloo, a wait for a rank that is gone or late raises. With NCCL it does not: the host is blocked in a call that does
not return, and NCCL ends the process by SIGABRT after its own time-out, without a report. The watchdog therefore ends
such a rank first. It writes the failure report of the rank, lets the launcher print, and exits.

With gloo, the sockets of a process that ends are closed and its peers fail at once. With NCCL they wait until the
time-out. A :class:`~megastack.comm.peer_failure.PeerMonitor` notices such an end there, and the watchdog ends the rank
as soon as it is blocked.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from megastack.comm.backend import backend_of
from megastack.comm.observer import RankObserver
from megastack.comm.peer_failure import PeerMonitor
from megastack.config.schema import TrainConfig
from megastack.errors import MegastackError
from megastack.launch.environment import set_nccl_defaults
from megastack.launch.failure import FAILED
from megastack.mesh.device import bind_to_cpus_near, pick_device, set_allocator_defaults, use_deterministic_kernels
from megastack.mesh.environment import read_environment
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.observe.failure import FailureRecord, any_failed
from megastack.observe.folder import RunFolder
from megastack.observe.watchdog import JOINING, RankState, Watchdog
from megastack.torch_private import default_store, nccl_trace, process_groups

ABORT_S = 10.0
"""How long to wait for NCCL to abort its kernels."""


class Supervised(Protocol):
    """Work of several ranks."""

    @property
    def config(self) -> TrainConfig:
        """The configuration."""

    @property
    def shape(self) -> MeshShape:
        """The mesh."""


class Supervision:
    """A context manager around the work of one rank.

    Args:
        observer: the observer of the rank's mesh.
        folder: the run folder.
        rank: this rank.
        work: the configuration and the mesh.
        doing: describes what the rank is doing.
        step: returns the number of completed steps.
        deliver: writes the failure report of a rank that is ended.
        may_write: whether the run still owns its folder.
        conclude: called after that, on the watchdog's thread, to print the failure of the run.
    """

    def __init__(
        self,
        observer: RankObserver,
        folder: RunFolder,
        rank: int,
        work: Supervised,
        *,
        doing: Callable[[], str],
        deliver: Callable[[FailureRecord], object],
        step: Callable[[], int] = lambda: 0,
        may_write: Callable[[], bool] = lambda: True,
        conclude: Callable[[], object] = lambda: None,
    ) -> None:
        self._observer, self._folder, self._rank, self._work = observer, folder, rank, work
        self._doing, self._step, self._deliver, self._conclude = doing, step, deliver, conclude
        self._peers: PeerMonitor | None = None
        self._watchdog = Watchdog(
            observer.flight_recorder,
            folder.report(rank),
            rank,
            work.shape.coordinates(rank),
            limit_s=work.config.launch.timeout_s,
            doing=doing,
            may_write=may_write,
            failed=lambda: any_failed(folder.failures),
            lost=lambda: self._peers is not None and self._peers.lost is not None,
            end=self._end,
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Supervision:
        self._stack.enter_context(self._watchdog)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.ends_rank = False
        self._stack.__exit__(kind, error, trace)

    def join(self) -> Mesh:
        """Join the mesh; meanwhile, the flight recorder shows that this rank waits for the others."""
        config, shape = self._work.config, self._work.shape
        prepare_environment(config, self._folder.watch)
        mesh = join_mesh(shape, config, self._observer)
        if not backend_of(mesh.device).wait_blocks_host:
            if shape.world_size > 1:
                launched = read_environment()
                master = None if launched is None else launched.address
                peers = PeerMonitor(default_store(), self._rank, shape.world_size, master=master)
                self._peers = self._stack.enter_context(peers)
            self._watchdog.ends_rank = True
        return mesh

    def _end(self, state: RankState) -> None:
        """Report that this rank is blocked, and end its process."""
        try:
            self._write_trace()
            self._deliver(
                FailureRecord.of(
                    self._error(state),
                    self._rank,
                    self._work.shape.coordinates(self._rank),
                    step=self._step(),
                    action=f"{self._doing()}, waiting for {state.waiting}",
                    echo=True,
                )
            )
            self._conclude()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(FAILED)

    def _error(self, state: RankState) -> MegastackError:
        if self._peers is not None and self._peers.lost is not None:
            return MegastackError(self._peers.describe()).about([self._peers.lost])
        if any_failed(self._folder.failures):
            return MegastackError(f"another rank failed while this rank waited for {state.waiting}")
        limit_s = self._work.config.launch.timeout_s
        return MegastackError(f"{state.waiting} did not complete within launch.timeout_s={limit_s:g}")

    def _write_trace(self) -> None:
        """Write NCCL's flight recorder, in the format and with the name that torch's analyzer expects."""
        trace = nccl_trace()
        if trace is not None:
            with contextlib.suppress(OSError):
                (self._folder.watch / f"nccl_{self._rank}").write_bytes(trace)


def join_mesh(shape: MeshShape, config: TrainConfig, observer: RankObserver) -> Mesh:
    """Join the mesh; meanwhile, the flight recorder shows that this rank waits for the others."""
    with observer.flight_recorder.waits(observer.flight_recorder.start(*JOINING, (), tuple(range(shape.world_size)))):
        limit_s = config.launch.timeout_s
        mesh = Mesh.from_environment(
            shape,
            device=config.device.value,
            timeout_s=limit_s,
            observer=observer,
            cpu_transport=config.launch.cpu_transport.value,
        )
    bind_to_cpus_near(mesh.device, config.launch.numa_binding.value)
    return mesh


def prepare_environment(config: TrainConfig, watch: Path | None = None) -> None:
    """Configure torch's kernels and allocator, and NCCL on a rank that uses a GPU, before either is used.

    Args:
        config: contains the device.
        watch: the folder for NCCL's own reports, if it is known.
    """
    if config.run.deterministic:
        use_deterministic_kernels()
    if config.device == "cpu":
        return
    set_allocator_defaults()
    if pick_device(config.device.value).type == "cuda":
        set_nccl_defaults(None if watch is None else watch / "nccl_")


def release_device(mesh: Mesh | None, config: TrainConfig) -> None:
    """Let this process exit after a failure, if kernels that wait for other ranks may still be running.

    Args:
        mesh: the mesh; None if this rank has not joined it.
        config: contains the time that the exit may take.
    """
    if mesh is None or backend_of(mesh.device).wait_blocks_host:
        return
    thread = threading.Thread(target=_abort, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
    exit_within(config.launch.grace_s)


def _abort() -> None:
    """Abort the communication of all process groups, which ends their kernels."""
    for group in process_groups():
        with contextlib.suppress(RuntimeError):  # a backend without this function, or already aborted
            group.abort()


def exit_within(seconds: float) -> None:
    """End this process at most ``seconds`` after its exit begins, with the code of a failure.

    Destructors of process groups and of the CUDA context run at exit, and may wait for the device. The timer does not
    need Python's interpreter lock.
    """
    atexit.register(faulthandler.dump_traceback_later, seconds, exit=True, file=2)
