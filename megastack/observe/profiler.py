"""Profiles of training steps: one trace of torch's profiler per rank and step, and a memory snapshot after a failure.

The traces are in Chrome's format (open them with Perfetto or ``chrome://tracing``). Kernels and operators come from
torch, the ranges of pipeline actions and collectives from the mesh (:func:`megastack.comm.observer.annotated`).
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from megastack.torch_private import dump_cuda_memory

KINETO_QUIET = ("KINETO_LOG_LEVEL", "6")
"""Environment variable that keeps the profiler's library from printing the start and end of each profile."""
LOGGER = logging.getLogger("megastack")


class StepProfiler:
    """Profiles some steps of one rank.

    Args:
        steps: the 1-based steps to profile.
        trace: returns the path of the trace of a step on this rank.
        device: the device of the rank.
        name: the name of the rank in its traces.
        annotated: a context manager in which actions and collectives appear as named ranges.
    """

    def __init__(
        self,
        steps: Collection[int],
        trace: Callable[[int], Path],
        device: torch.device,
        name: str,
        annotated: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._steps, self._trace, self._device, self._annotated = frozenset(steps), trace, device, annotated
        self._name = name

    def around(self, step: int) -> AbstractContextManager[None]:
        """A context manager that profiles the 1-based ``step`` if it is selected, and writes its trace."""
        return self._profile(step) if step in self._steps else nullcontext()

    @contextmanager
    def _profile(self, step: int) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile, record_function

        on_gpu = self._device.type == "cuda"
        if not on_gpu:  # on a GPU, this would also hide errors of CUPTI
            os.environ.setdefault(*KINETO_QUIET)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, record_shapes=True) as profiled:
            with self._annotated(), record_function(f"step {step}"):
                yield
            if on_gpu:
                torch.cuda.synchronize(self._device)
        path = self._trace(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            raw = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(raw))
            trace = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
        _name_processes(trace["traceEvents"], self._name)
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump(trace, file)
        LOGGER.info("wrote the profile of step %d to %s", step, path)


def _name_processes(events: Iterable[dict[str, Any]], name: str) -> None:
    """Replace the names of the process and its devices, which is ``python`` for all."""
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name" and isinstance(event.get("pid"), int):
            event["args"]["name"] = name


def write_memory_snapshot(path: Path) -> bool:
    """Write the state of torch's CUDA allocator for https://pytorch.org/memory_viz, and return whether it was written.

    Without a GPU in use nothing is written. A failure is only logged, since it must not hide the error that led here.
    """
    if not torch.cuda.is_initialized():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dump_cuda_memory(path)
    except Exception as error:
        LOGGER.warning("%s: cannot write the memory snapshot (%s)", path, error)
        return False
    return True
