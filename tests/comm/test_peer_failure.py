"""Which errors count as secondary failures: it depends on where they were raised, not on their text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastack.comm.collectives import Pending
from megastack.comm.observer import ObservedWork, RankObserver
from megastack.comm.peer_failure import is_peer_failure
from tests import tiny_runs

C10D = dist.distributed_c10d.__file__
TEXT = "a text that no transport has used yet"
c_error = partial(torch.empty(2).view, 3)
"""Raises a plain ``RuntimeError`` and leaves no frame of its own, as torch's transport does."""


def raised(call: Callable[..., Any], *args: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call(*args)
    return caught.value


def raised_in(path: str, name: str, error: BaseException) -> BaseException:
    """``error``, raised by a function of a file."""
    scope: dict[str, Any] = {}
    exec(compile(f"def {name}(error):\n    raise error", path, "exec"), scope)
    return raised(scope[name], error)


def observed(wait: Callable[[], Any]) -> ObservedWork:
    work, observer = type("Work", (), {"wait": staticmethod(wait)})(), RankObserver()
    return ObservedWork(work, observer, observer.on_operation("dp", "all_reduce", (0, 1), (1,), None))


def test_what_a_collective_or_a_wait_raises_is_a_peer_failure_whatever_it_says() -> None:
    assert is_peer_failure(raised_in(C10D, "all_reduce", RuntimeError(TEXT)))
    assert is_peer_failure(raised(observed(c_error).wait))
    assert is_peer_failure(raised(Pending(observed(c_error), lambda: torch.empty(0)).wait))


def test_the_same_error_from_a_layer_or_from_a_rank_s_own_work_is_not() -> None:
    assert not is_peer_failure(raised(c_error))
    assert not is_peer_failure(raised_in(tiny_runs.__file__, "wait", RuntimeError(TEXT)))
    assert not is_peer_failure(raised_in(torch.nn.functional.__file__, "linear", RuntimeError(TEXT)))


def test_what_follows_a_wait_is_own_work() -> None:
    """The result of an operation is computed after its wait, within the same call."""

    def finish() -> torch.Tensor:
        raise RuntimeError(TEXT)

    assert not is_peer_failure(raised(Pending(observed(lambda: None), finish).wait))


@pytest.mark.parametrize(
    "error", [ValueError, TypeError, torch.OutOfMemoryError, NotImplementedError, KeyboardInterrupt]
)
def test_other_classes_are_own_failures_even_inside_a_collective(error: type[BaseException]) -> None:
    assert not is_peer_failure(raised_in(C10D, "all_reduce", error(TEXT)))


@pytest.mark.parametrize("error", [dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError, dist.DistError])
def test_torch_s_own_classes_are_peer_failures_anywhere(error: type[BaseException]) -> None:
    """NCCL raises DistBackendError where the host happens to be."""
    assert is_peer_failure(error(TEXT))


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2893",
        "Application timeout caused pair closure",
        "NCCL communicator was aborted on rank 0.",
    ],
)
def test_known_texts_count_where_a_user_s_code_waits(text: str) -> None:
    assert is_peer_failure(RuntimeError(text))


def test_an_error_that_follows_a_peer_failure_is_one() -> None:
    def handled(*, explicit: bool) -> None:
        try:
            raise raised(observed(c_error).wait)
        except RuntimeError as error:
            raise ValueError(TEXT) from (error if explicit else None)

    def unhandled() -> None:
        try:
            raise raised(observed(c_error).wait)
        except RuntimeError:
            raise ValueError(TEXT)  # noqa: B904 - the implicit context is what is tested

    assert is_peer_failure(raised(partial(handled, explicit=True))) and is_peer_failure(raised(unhandled))
    assert not is_peer_failure(raised(partial(handled, explicit=False)))
