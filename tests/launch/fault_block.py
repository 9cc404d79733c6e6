"""An MLP that fails on one stage of a pipeline at a given moment, in one of six ways, from outside the package.

It is chosen like any layer of a user's. Building, a training step and a validation call it; a save does not, so there
it listens to the files that the process opens.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.layers.mlp import ParallelMLP
from megastack.mesh.shape import Axis

KINDS = ("raise", "SIGKILL", "SIGSTOP", "SIGTERM", "NaN", "disk full")
PHASES = ("before step 1", "step", "validation", "save")
STEP = 2
"""The 0-based step that fails; the validation and the save that fail come right after it."""


class FailingMLP(ParallelMLP):
    """Does ``kind`` in ``phase`` on pipeline coordinate ``stage``, and touches the file ``mark`` then."""

    def __init__(self, *args: Any, kind: str, stage: int, phase: str, mark: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kind, self.phase, self.mark = kind, phase, Path(mark)
        self.armed = dist.is_initialized() and self.mesh[Axis.PP].rank == stage  # not where it is only looked at
        self.reached = False
        if self.armed and phase == "before step 1":
            self.fail()
        if self.armed and phase == "save":
            sys.addaudithook(self.listen)

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        if self.training:
            self.reached = context.step == STEP
        due = self.reached and self.phase == ("step" if self.training else "validation")
        if self.armed and due and self.kind == "NaN":
            self.mark.touch()
            return super().forward(hidden_BSD, context) * torch.nan
        if self.armed and due:
            self.fail()
        return super().forward(hidden_BSD, context)

    def listen(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook: the first time that this process opens its file of a checkpoint's tensors for writing."""
        if not self.armed or event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path, flags = Path(os.fsdecode(arguments[0])), arguments[2]
        if path.suffix == ".safetensors" and isinstance(flags, int) and flags & os.O_CREAT:
            self.fail()

    def fail(self) -> None:
        """What a fault is, once."""
        self.armed = False
        self.mark.touch()
        if self.kind == "raise":
            raise RuntimeError("the layer broke")
        if self.kind == "disk full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif self.kind.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self.kind])
