"""The places where the host may read a tensor of the device. A read anywhere else stops a GPU, and fails a dry run.

A read is a scalar that becomes a Python number (``float(x)``, ``x.item()``, ``x.tolist()``, ``if x:``), a shape that
depends on values, or a copy to the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ReadSite:
    """A place where the host reads tensors.

    Attributes:
        what: what it reads.
        file: the file, relative to the package.
        function: the function, with its class.
        times: how often it reads.
    """

    what: str
    file: str
    function: str
    times: str


ALLOWED_READS = (
    ReadSite("header", "comm/p2p.py", "P2PChannels.receive_header", "2 a stage input and microbatch shape, once"),
    ReadSite("results", "comm/transfers.py", "start_copy_to_host", "1 a step, validation batch and validation, queued"),
    ReadSite("offloaded gradients", "optim/main_parameters.py", "MainParameters.gradients", "1 a shard and step"),
    ReadSite("offloaded overflow flag", "optim/optimizer.py", "Optimizer.step", "1 an optimizer group and step"),
    ReadSite("offloaded parameters", "optim/main_parameters.py", "MainParameters.__init__", "1 a shard, once"),
    ReadSite("generated ids", "inference/generate.py", "Generator._choose", "1 a token"),
    ReadSite("checkpoint", "checkpoint/asynchronous.py", "StagingBuffer.copy", "1 a box and save"),
    ReadSite("checksums", "checkpoint/state.py", "_checksum", "1 a replicated box and save"),
)
"""Every place. With ``parallel.zero.offload`` the update itself runs on the host."""

_NOT_CALLERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_BY_PLACE = {(str(PACKAGE / read.file), read.function): read for read in ALLOWED_READS}


def frames() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller() -> FrameType | None:
    """The innermost frame of this thread that is neither torch's nor a dry run's."""
    return next((frame for frame in frames() if not frame.f_code.co_filename.startswith(_NOT_CALLERS)), None)


def allowed_read() -> ReadSite | None:
    """The place that reads right now, if it is one of ``ALLOWED_READS``; its own callees are other places."""
    frame = caller()
    return None if frame is None else _BY_PLACE.get((frame.f_code.co_filename, frame.f_code.co_qualname))
