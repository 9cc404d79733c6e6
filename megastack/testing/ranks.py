"""Run a function on several ranks of this machine: forked processes with gloo, results as a list.

A module-level function with arguments of plain data runs in a standing pool of forked ranks. The pool serves one mesh
after another, and is forked again after a rank died or was killed. Everything else runs in a new fork, which inherits
the function and the arguments: closures and lambdas, as function or argument, local classes, definitions of
``__main__`` or of a notebook. Function and arguments alone determine which of the two is used. Ranks run on one thread,
since a child forked from a parent that used several threads cannot use several itself. The parent must not hold a
process group.

If ranks do not return, their stacks show which of them wait for other ranks. A rank that is blocked in the transport
runs no Python code, so ``faulthandler`` writes the stack of its main thread from a signal handler in C. A stopped
process writes nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megastack.comm.peer_failure import is_peer_failure, is_transport
from megastack.comm.shared_memory.connect import close_shared_memory
from megastack.comm.shared_memory.engine import drain
from megastack.errors import MegastackError

T = TypeVar("T")

POOL_SIZE = 8
_GRACE_S = 2.0
_STACK_SIGNAL = signal.SIGUSR2
_STACK_TIMEOUT_S = 2.0
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)\n')
_fork = multiprocessing.get_context("fork")


class RankFailure(MegastackError):
    """A rank raised, died, or did not return in time.

    Attributes:
        rank: the first rank known to have failed, or the rank that others may be waiting for if ranks did not return.
        error: the exception that the rank raised; ``None`` if it died or timed out.
    """

    def __init__(self, message: str, rank: int, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass(frozen=True)
class _RankTask:
    """A call for one rank; ``call`` is the pickled function and arguments, ``None`` if the fork inherited them."""

    call: bytes | None
    rank: int
    world_size: int
    folder: Path
    path: tuple[str, ...]
    timeout: float


@dataclass(frozen=True)
class _Outcome:
    """The result of a rank; ``trace`` is not empty if it failed."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""
    time: float = 0.0
    is_secondary: bool = False


def run_ranks(fn: Callable[..., T], world_size: int, *args: object, timeout: float = 60) -> list[T]:
    """Call ``fn(*args)`` on ``world_size`` gloo ranks and return the results by rank.

    Inside, ``Mesh.from_environment(MeshShape(...))`` finds the process group. Results are pickled.

    Args:
        fn: any callable. Module-level functions run in a standing pool of processes, which does not see changes that
            this process made in its modules after the pool was forked.
        world_size: the number of ranks.
        args: any objects. Objects that cannot be pickled, or are defined where the pool cannot import them, are
            inherited by a new fork.
        timeout: seconds after which ranks are killed.

    Raises:
        RankFailure: a rank failed; it holds the first failing rank and its traceback.
    """
    assert not dist.is_initialized(), "a parent that holds a process group cannot fork ranks"
    call = _pickled_call(fn, args)
    folder = Path(tempfile.mkdtemp(prefix="megastack-ranks-"))
    pool = _holder.get(world_size) if call else _Pool(world_size, lambda: fn(*args))
    tasks = [_RankTask(call, rank, world_size, folder, tuple(sys.path), timeout) for rank in range(world_size)]
    try:
        return cast("list[T]", pool.run(tasks, timeout))
    finally:
        if not call:
            pool.close()
        shutil.rmtree(folder, ignore_errors=True)


def _pickled_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes | None:
    """A module-level function and its arguments, pickled for the pool; None if only a fork can inherit them."""
    if not isinstance(fn, FunctionType | type):
        return None
    buffer = io.BytesIO()
    try:
        _PoolPickler(buffer).dump((fn, args))
    except Exception:  # pickling an object may raise anything
        return None
    return buffer.getvalue()


class _PoolPickler(pickle.Pickler):
    """Pickles only functions and classes that any process can import by name."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FunctionType | type):
            module = sys.modules.get(obj.__module__)
            spec = getattr(module, "__spec__", None)
            if obj.__module__ == "__main__" or spec is None or (spec.origin is None and spec.loader is None):
                raise pickle.PicklingError(f"{obj.__qualname__} is not importable")
        return NotImplemented


class _Pool:
    """Forked ranks, each connected by a pipe."""

    def __init__(self, size: int, fn: Callable[[], object] | None = None) -> None:
        self.size = size
        self.broken = False
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        for _ in range(size):
            mine, theirs = _fork.Pipe()
            process = _fork.Process(target=_serve, args=(theirs, [*self._pipes, mine], fn), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, tasks: Sequence[_RankTask], timeout: float) -> list[object]:
        try:
            for pipe, task in zip(self._pipes, tasks, strict=False):
                pipe.send_bytes(pickle.dumps(task))
        except OSError:
            self.close()
            raise RankFailure("a rank had died before it was called", task.rank) from None
        outcomes = self._collect(len(tasks), time.monotonic() + timeout)
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.trace}
        missing = [rank for rank in range(len(tasks)) if rank not in outcomes]
        if failed or missing:
            hung = _hung_ranks(tasks[0].folder, self._pids(missing))
            self.close()
            raise _failure(failed, hung, timeout)
        return [outcomes[rank].value for rank in range(len(tasks))]

    def _pids(self, ranks: Iterable[int]) -> dict[int, int]:
        return {rank: pid for rank in ranks if (pid := self._processes[rank].pid) is not None}

    def _collect(self, count: int, deadline: float) -> dict[int, _Outcome]:
        """Outcomes by rank, until all returned, the deadline passed, or the grace period after a failure is over."""
        waiting, outcomes = {self._pipes[rank]: rank for rank in range(count)}, {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                rank = waiting.pop(cast(Connection, ready))
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].trace:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return outcomes

    def _receive(self, rank: int) -> _Outcome:
        try:
            outcome: _Outcome = pickle.loads(self._pipes[rank].recv_bytes())
            return outcome
        except (EOFError, OSError):
            self._processes[rank].join(1)
            code = self._processes[rank].exitcode
            return _Outcome(trace=f"the process ended with exit code {code}", time=time.time())
        except Exception as error:
            return _Outcome(trace=f"the result cannot be read: {error}", time=time.time())

    def close(self) -> None:
        """Kill every rank."""
        self.broken = True
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()


class _PoolHolder:
    """The standing pool of this process; forked children do not use it."""

    def __init__(self) -> None:
        self.pool: _Pool | None = None
        self.owner = 0

    def get(self, size: int) -> _Pool:
        fits = self.pool is not None and not self.pool.broken and self.pool.size >= size and self.owner == os.getpid()
        if not fits:
            self.close()
            self.pool, self.owner = _Pool(max(size, POOL_SIZE)), os.getpid()
        assert self.pool is not None
        return self.pool

    def close(self) -> None:
        if self.pool is not None and self.owner == os.getpid() and not self.pool.broken:
            self.pool.close()
        self.pool = None


_holder = _PoolHolder()
atexit.register(_holder.close)


@dataclass(frozen=True)
class _HungRank:
    """A rank that did not return: its innermost Python call if it responded, and whether that waits for other ranks."""

    rank: int
    location: str | None
    is_waiting: bool

    def __str__(self) -> str:
        if self.location is None:
            return f"rank {self.rank} does not respond; it may be stopped"
        return f"rank {self.rank} {'waits for other ranks' if self.is_waiting else 'is'} at {self.location}"


@contextlib.contextmanager
def _stack_dumps(folder: Path, rank: int) -> Iterator[None]:
    """Context manager in which this process writes its main thread's stack when :func:`_hung_ranks` requests it."""
    with _stack_path(folder, rank).open("w", encoding="utf-8") as file:
        faulthandler.register(_STACK_SIGNAL, file=file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.unregister(_STACK_SIGNAL)


def _hung_ranks(folder: Path, pids: Mapping[int, int]) -> list[_HungRank]:
    """Request the stacks of processes, by rank, and return their locations."""
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_TIMEOUT_S
    while not all(_FRAME.search(_read_stack(folder, rank)) for rank in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [_hung_rank(rank, _read_stack(folder, rank)) for rank in pids]


def _hung_rank(rank: int, stack: str) -> _HungRank:
    """Parse a stack, innermost call first."""
    frames = [(file, name, line) for file, line, name in _FRAME.findall(stack)]
    if not frames:
        return _HungRank(rank, None, is_waiting=False)
    file, name, line = frames[0]
    is_waiting = is_transport([(file, name) for file, name, _ in reversed(frames)])
    return _HungRank(rank, f"{file}:{line} in {name}", is_waiting)


def _read_stack(folder: Path, rank: int) -> str:
    path = _stack_path(folder, rank)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _stack_path(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank}"


def _failure(failed: dict[int, _Outcome], hung: Sequence[_HungRank], timeout: float) -> RankFailure:
    """The failure to report: a rank's own error, or else a rank that did not return, or else a secondary failure."""
    missing = [found.rank for found in hung]
    first = min(failed, key=lambda r: (failed[r].is_secondary, failed[r].time), default=None)
    busy = [found for found in hung if not found.is_waiting]
    if first is None or (failed[first].is_secondary and busy):
        return _timeout_failure(failed, first, hung, busy or hung, timeout)
    others = f" (ranks {sorted(set(failed) - {first})} failed after it)" if len(failed) > 1 else ""
    others += f" (ranks {missing} did not return)" if missing else ""
    return RankFailure(f"rank {first} failed{others}\n{failed[first].trace}", first, failed[first].error)


def _timeout_failure(
    failed: dict[int, _Outcome],
    first: int | None,
    hung: Sequence[_HungRank],
    named: Sequence[_HungRank],
    timeout: float,
) -> RankFailure:
    """The failure of ``named`` ranks, which did not return."""
    limit = (
        f"no result within {timeout:g} s"
        if first is None
        else f"did not return; ranks {sorted(failed)} failed waiting for them"
    )
    locations = "".join(f"\n{found}" for found in hung)
    trace = "" if first is None else f"\n{failed[first].trace}"
    summary = f"ranks {[found.rank for found in named]}: {limit}; all ranks were killed"
    return RankFailure(f"{summary}{locations}{trace}", named[0].rank)


def _serve(
    pipe: Connection,
    others: list[Connection],
    inherited: Callable[[], object] | None,
) -> None:
    """Run tasks until the pipe closes."""
    gc.freeze()  # objects of the parent may have destructors that wait for threads that were not forked
    for other in others:
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        pipe.send_bytes(_pickled(_perform(task, inherited)))


def _perform(task: _RankTask, inherited: Callable[[], object] | None) -> _Outcome:
    try:
        sys.path[:] = list(task.path)
        fn, args = pickle.loads(task.call) if task.call else (inherited, ())
        assert fn is not None
        with _stack_dumps(task.folder, task.rank), _process_group(task):
            return _Outcome(value=fn(*args))
    except BaseException as error:
        return _Outcome(
            error=error, trace=traceback.format_exc(), time=time.time(), is_secondary=is_peer_failure(error)
        )


def _pickled(outcome: _Outcome) -> bytes:
    """An outcome for the parent, without a value or an error that cannot be pickled and unpickled."""
    try:
        content = pickle.dumps(outcome)
        if outcome.error is not None:
            pickle.loads(content)  # some exceptions can be pickled but not unpickled
        return content
    except Exception as error:
        trace = outcome.trace or f"the result cannot be pickled: {error}"
        return pickle.dumps(_Outcome(trace=trace, time=outcome.time, is_secondary=outcome.is_secondary))


@contextlib.contextmanager
def _process_group(task: _RankTask) -> Iterator[None]:
    """The default process group of one task; a single rank has none."""
    try:
        if task.world_size > 1:
            store = dist.FileStore(f"{task.folder}/store", task.world_size)
            limit = timedelta(seconds=task.timeout + 2 * _GRACE_S)  # the parent times out first and names the rank
            dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=limit)
            dist.barrier()  # a rank that returns immediately would close connections that others are still opening
        yield
        drain(task.timeout)
    finally:
        close_shared_memory()  # peers that wait for this rank fail
        if dist.is_initialized():
            dist.destroy_process_group()
