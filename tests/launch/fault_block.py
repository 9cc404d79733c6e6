"""An MLP that fails on one rank at a given moment, in one of seven ways, from outside the package.

It is selected like any layer of a user. Building, a training step and a validation call it. For a save it listens to
the files that the process opens; for data loading and the optimizer it wraps their method in this process.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.data.loader import Loader
from megastack.layers.mlp import ParallelMLP
from megastack.optim.optimizer import Optimizer

KINDS = ("raise", "SIGKILL", "SIGSTOP", "sleep", "SIGTERM", "NaN", "disk full")
PHASES = ("before step 1", "step", "validation", "save")
INSIDE_STEP = ("data", "backward", "optimizer")
"""Further phases of a step, for hangs."""
STEP = 2
"""The 0-based step that fails; the validation and the save that fail come right after it."""


class FailingMLP(ParallelMLP):
    """Does ``kind`` in ``phase`` on the global rank ``rank``, and touches the file ``mark`` then."""

    def __init__(self, *args: Any, kind: str, rank: int, phase: str, mark: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kind, self.phase, self.mark = kind, phase, Path(mark)
        self.armed = dist.is_initialized() and dist.get_rank() == rank  # not where it is only looked at
        self.reached = False
        if self.armed and phase == "before step 1":
            self.fail()
        if self.armed and phase == "save":
            sys.addaudithook(self.listen)
        if self.armed and phase in ("data", "optimizer"):
            self.wrap(*((Loader, "step") if phase == "data" else (Optimizer, "step")))

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        if self.training:
            self.reached = context.step == STEP
        due = self.reached and self.phase == ("step" if self.training else "validation")
        if self.armed and due and self.kind == "NaN":
            self.mark.touch()
            return super().forward(hidden_BSD, context) * torch.nan
        if self.armed and due:
            self.fail()
        result = super().forward(hidden_BSD, context)
        if self.armed and self.reached and self.phase == "backward" and result.requires_grad:
            result.register_hook(lambda _: self.fail())
        return result

    def wrap(self, owner: type, name: str) -> None:
        """Fail at the call of a method for ``STEP``, counted from the first one."""
        original, calls = getattr(owner, name), iter(range(STEP))

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) is None:
                self.fail()
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def listen(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook: the first time that this process opens its file of a checkpoint's tensors for writing."""
        if not self.armed or event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path, flags = Path(os.fsdecode(arguments[0])), arguments[2]
        if path.suffix == ".safetensors" and isinstance(flags, int) and flags & os.O_CREAT:
            self.fail()

    def fail(self) -> None:
        """What a fault is, once."""
        if not self.armed:
            return
        self.armed = False
        self.mark.touch()
        if self.kind == "raise":
            raise RuntimeError("the layer broke")
        if self.kind == "disk full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif self.kind == "sleep":
            time.sleep(600)
        elif self.kind.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self.kind])
