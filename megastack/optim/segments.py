"""The parts of a slice whose parameters have had the same number of updates.

Adam's bias correction needs the updates that the moments of a parameter have seen. Parameters that are trained from the
start have seen all of a run. One that is trained from a later update on, since it was frozen or added, has seen fewer:
its *start* is the count of the run's updates then. A slice is one segment unless starts differ in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megastack.optim.main_parameters import MainParameters

STEP = "step"
"""The kind of state that is no moment: the count of updates."""


@dataclass(frozen=True)
class Segment:
    """A range of a slice, with views of the moments there and a count of its own.

    Attributes:
        part: the range.
        state: the optimizer's state for it, by kind.
    """

    part: slice
    state: dict[str, Tensor]


def segments_of(
    master: MainParameters, state: Mapping[str, Tensor], steps: int, starts: Mapping[str, int]
) -> list[Segment]:
    """The segments of a slice; counts are set to the updates that each has seen.

    Args:
        master: the slice.
        state: its moments, flat, and a count.
        steps: the updates of the run so far.
        starts: by parameter, the updates before it was trained, where there were any.
    """
    runs = _runs(master, starts)
    ends = [first for first, _ in runs[1:]] + [master.values.numel()]
    segments = []
    for (first, start), end in zip(runs, ends, strict=True):
        part = slice(first, end)
        own = {kind: flat[part] for kind, flat in state.items() if kind != STEP}
        if STEP in state:
            own[STEP] = state[STEP].clone().fill_(steps - start)
        segments.append(Segment(part, own))
    return segments


def _runs(master: MainParameters, starts: Mapping[str, int]) -> list[tuple[int, int]]:
    """Where parameters with another start begin, and that start; what fills a slice up belongs to what is before it."""
    base = master.values.storage_offset()
    found = sorted(
        (int(part.storage_offset() - base), starts.get(name, 0))
        for name, parts in master.parts(master.values)
        for _, part in parts
        if part.numel()
    )
    runs: list[tuple[int, int]] = []
    for first, start in found:
        if not runs or runs[-1][1] != start:
            runs.append((first if runs else 0, start))
    return runs or [(0, 0)]
