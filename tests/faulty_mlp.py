"""An MLP that fails on one rank in one step, for tests of failing runs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor

from megastack.layers.mlp import ParallelMLP
from megastack.mesh.shape import Axis


class FaultyMLP(ParallelMLP):
    """Does ``what`` in the forward of 0-based step ``at``, on the last rank of the pipeline, tensor and data axes.

    ``what`` is ``raise``, ``kill`` (SIGKILL to itself), ``term`` (SIGTERM to itself), ``launcher`` (SIGINT to its
    parent), ``hang``, ``stop`` (SIGSTOP to itself) or ``poison`` (NaN output). With ``in_validation`` it happens in
    validation instead. ``slow`` adds this many seconds to every forward of every rank.
    """

    def __init__(
        self,
        *args: Any,
        what: str = "nothing",
        at: int = 2,
        in_validation: bool = False,
        slow: float = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.slow = slow
        self.what, self.at, self.in_validation = what, at, in_validation
        last = all(self.mesh[axis].rank == self.mesh[axis].size - 1 for axis in (Axis.PP, Axis.DP, Axis.TP))
        self.armed = last

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        time.sleep(self.slow)
        due = context.step == self.at if not self.in_validation else True
        if self.armed and due and self.training is not self.in_validation:
            if self.what == "poison":
                return super().forward(hidden_BSD, context) * torch.nan
            self.armed = False
            self.fail()
        return super().forward(hidden_BSD, context)

    def fail(self) -> None:
        match self.what:
            case "raise":
                raise ValueError("the layer broke")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "launcher":
                os.kill(os.getppid(), signal.SIGINT)
            case "hang":
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                while True:
                    signal.pause()


def fault(what: str, **more: Any) -> str:
    """The override that selects the layer."""
    extra = "".join(f", {name}: {str(value).lower()}" for name, value in more.items())
    return f"model.mlp={{_target_: tests.faulty_mlp.FaultyMLP, what: {what}{extra}}}"
