"""Detects secondary (peer) failures: another rank is gone or late, and that rank reports the cause.

Transports use many texts for such errors, and some do not name the transport, so the text alone is not sufficient. The
place where an error was raised decides: inside a collective, a message, a wait for either, or the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from megastack.torch_private import DISPATCH_FILE, TRANSPORT_FILES

_OWN = f"{Path(__file__).parent}/"
_TEXTS = ("gloo/", "caused pair closure", "NCCL")
"""Texts for waits in code outside of torch and megastack, where the call itself leaves no frame."""


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
