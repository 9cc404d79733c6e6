"""The steps of each set of checks, with their time limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu import kernels, start, step, two, values
from gpu.task import Task


@dataclass(frozen=True)
class Step:
    """One step: its name, its time limit in seconds, and a function that returns figures or raises."""

    name: str
    limit_s: float
    run: Callable[[Task], dict[str, Any]]


SETS: Mapping[str, tuple[Step, ...]] = {
    "first": (
        Step("environment", 30, start.environment),
        Step("start", 90, start.start),
        Step("random", 45, values.random_bits),
        Step("syncs", 45, step.syncs),
        Step("attention", 60, kernels.attention),
        Step("block", 90, kernels.block),
        Step("loss", 45, kernels.loss),
        Step("layouts", 60, step.layouts),
        Step("checkpoints", 90, step.checkpoints),
        Step("curves", 90, values.curves),
    ),
    "two": (
        Step("environment", 30, start.environment),
        Step("axes", 180, two.layouts),
        Step("messages", 60, two.messages),
        Step("hang", 60, two.hang),
        Step("profile", 60, two.profile),
    ),
}
