"""Run a function on several ranks of this machine: forked processes, gloo, results as a list.

A module-level function whose arguments are plain data runs in a standing pool of forked ranks, which serves many meshes
one after another and is forked again after it lost or had to give up a rank. Anything else gets a fresh fork, which
inherits function and arguments: a closure or a lambda, whether it is the function or an argument, a local class, what
``__main__`` or a notebook defines. Which of the two it is follows from function and arguments alone. Ranks run on one
thread: a parent that used several threads may not fork ranks that do so as well. The parent must hold no process group.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist

from megastack.comm.peer_failure import is_peer_failure
from megastack.errors import MegastackError
from megastack.testing.stuck import Stuck, answering, locate

POOL_SIZE = 8
_GRACE_S = 2.0
_fork = multiprocessing.get_context("fork")


class RankFailure(MegastackError):
    """A rank raised, died, or did not return in time.

    Attributes:
        rank: the first rank known to have failed; of ranks that did not return, one that the others may wait for.
        error: the exception that the rank raised, ``None`` if it died or was late.
    """

    def __init__(self, message: str, rank: int, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass(frozen=True)
class _Task:
    """What a rank is asked to do; ``call`` pickles function and arguments, ``None`` for what its fork inherited."""

    call: bytes | None
    rank: int
    world_size: int
    folder: Path
    path: tuple[str, ...]
    timeout: float


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    time: float = 0.0
    echo: bool = False


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` gloo ranks and return what each rank returned, by rank.

    Inside, ``Mesh.from_environment(MeshShape(...))`` finds the process group. Results travel by pickle.

    Args:
        fn: what each rank runs, any callable; module-level functions share a standing pool of processes, which does not
            see what this process changed in its modules after the pool was forked.
        world_size: the number of ranks.
        args: any objects; what cannot be pickled, or is defined where the pool cannot import it, is inherited by a
            fresh fork.
        timeout: seconds after which ranks are killed.

    Raises:
        RankFailure: with the first failing rank and its own traceback.
    """
    assert not dist.is_initialized(), "a parent that holds a process group cannot fork ranks"
    call = _pickled_call(fn, args)
    folder = Path(tempfile.mkdtemp(prefix="megastack-ranks-"))
    pool = _holder.get(world_size) if call else _Pool(world_size, lambda: fn(*args))
    tasks = [_Task(call, rank, world_size, folder, tuple(sys.path), timeout) for rank in range(world_size)]
    try:
        return pool.run(tasks, timeout)
    finally:
        if not call:
            pool.close()
        shutil.rmtree(folder, ignore_errors=True)


def _pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes | None:
    """A module-level function and its arguments for the pool; None where only a fork can inherit them."""
    if not isinstance(fn, FunctionType | type):
        return None
    buffer = io.BytesIO()
    try:
        _PoolPickler(buffer).dump((fn, args))
    except Exception:  # whatever an object raises when it is pickled
        return None
    return buffer.getvalue()


class _PoolPickler(pickle.Pickler):
    """Pickles functions and classes only by the name of a module that any process can import."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type):
            module = sys.modules.get(obj.__module__)
            spec = getattr(module, "__spec__", None)
            if obj.__module__ == "__main__" or spec is None or (spec.origin is None and spec.loader is None):
                raise pickle.PicklingError(f"{obj.__qualname__} is not importable")
        return NotImplemented


class _Pool:
    """Forked ranks, each behind a pipe."""

    def __init__(self, size: int, fn: Callable[[], Any] | None = None) -> None:
        self.size = size
        self.broken = False
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes: list[Any] = []
        for _ in range(size):
            mine, theirs = _fork.Pipe()
            process = _fork.Process(target=_serve, args=(theirs, [*self._pipes, mine], fn), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, tasks: Sequence[_Task], timeout: float) -> list[Any]:
        try:
            for pipe, task in zip(self._pipes, tasks, strict=False):
                pipe.send_bytes(pickle.dumps(task))
        except OSError:
            self.close()
            raise RankFailure("a rank was gone before it was asked to run", task.rank) from None
        outcomes = self._collect(len(tasks), time.monotonic() + timeout)
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.trace}
        missing = [rank for rank in range(len(tasks)) if rank not in outcomes]
        if failed or missing:
            stuck = locate(tasks[0].folder, {rank: self._processes[rank].pid for rank in missing})
            self.close()
            raise _failure(failed, stuck, timeout)
        return [outcomes[rank].value for rank in range(len(tasks))]

    def _collect(self, count: int, deadline: float) -> dict[int, _Outcome]:
        """Outcomes by rank until all are in, the deadline is over, or one failed and the others had their grace."""
        waiting, outcomes = {self._pipes[rank]: rank for rank in range(count)}, {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(cast(multiprocessing.connection.Connection, ready))
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
    """The standing pool of this process; a child of a fork does not inherit it."""

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


def _failure(failed: dict[int, _Outcome], stuck: Sequence[Stuck], timeout: float) -> RankFailure:
    """The failure to report: a rank's own error, else a rank that did not return, else a secondary failure."""
    missing = [found.rank for found in stuck]
    first = min(failed, key=lambda r: (failed[r].echo, failed[r].time), default=None)
    busy = [found for found in stuck if not found.waits]
    if first is None or (failed[first].echo and busy):
        named = busy or stuck
        limit = (
            f"no result within {timeout:g} s" if first is None else f"did not return; ranks {sorted(failed)} missed it"
        )
        places = "".join(f"\n{found}" for found in stuck)
        trace = "" if first is None else f"\n{failed[first].trace}"
        late = f"ranks {[found.rank for found in named]}: {limit}; all ranks were killed"
        return RankFailure(f"{late}{places}{trace}", named[0].rank)
    others = f" (ranks {sorted(set(failed) - {first})} failed after it)" if len(failed) > 1 else ""
    others += f" (ranks {missing} did not return)" if missing else ""
    return RankFailure(f"rank {first} failed{others}\n{failed[first].trace}", first, failed[first].error)


def _serve(pipe: multiprocessing.connection.Connection, others: list[Any], inherited: Callable[[], Any] | None) -> None:
    """The life of a rank: run tasks until the pipe closes."""
    gc.freeze()  # what the parent left may have a destructor that waits for a thread that is not here
    for other in others:
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        pipe.send_bytes(_pickled(_perform(task, inherited)))


def _perform(task: _Task, inherited: Callable[[], Any] | None) -> _Outcome:
    try:
        sys.path[:] = list(task.path)
        fn, args = pickle.loads(task.call) if task.call else (inherited, ())
        assert fn is not None
        with answering(task.folder, task.rank), _process_group(task):
            return _Outcome(value=fn(*args))
    except BaseException as error:
        return _Outcome(error=error, trace=traceback.format_exc(), time=time.time(), echo=is_peer_failure(error))


def _pickled(outcome: _Outcome) -> bytes:
    """An outcome for the parent, without a value or an error that would not arrive there."""
    try:
        content = pickle.dumps(outcome)
        if outcome.error is not None:
            pickle.loads(content)  # an exception with arguments of its own may be pickled and not be built again
        return content
    except Exception as error:
        trace = outcome.trace or f"the result cannot be pickled: {error}"
        return pickle.dumps(_Outcome(trace=trace, time=outcome.time, echo=outcome.echo))


@contextlib.contextmanager
def _process_group(task: _Task) -> Iterator[None]:
    """The default process group of one task; a single rank has none."""
    try:
        if task.world_size > 1:
            store = dist.FileStore(f"{task.folder}/store", task.world_size)
            limit = timedelta(seconds=task.timeout + 2 * _GRACE_S)  # the parent speaks first, and names who is late
            dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=limit)
            dist.barrier()  # a rank that is done at once would close what others are still connecting to
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
