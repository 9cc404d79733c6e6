"""Lists of actions as a grid of ranks and steps, for error messages.

Unlike ``render`` it does not show time: a column is a position in a rank's list, so that a reader can find the wrong
entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megastack.errors import counted
from megastack.pipeline.action import Action

_STEPS_SHOWN = 14
_RANKS_SHOWN = 32


def grid(
    rows: Sequence[Sequence[Action]],
    offending: tuple[int, int] | None = None,
    waiting: Mapping[int, int] | None = None,
) -> str:
    """The lists of all ranks, one per line, reduced to the steps around the offending one.

    Args:
        rows: the actions of each rank.
        offending: (rank, step) of the action to mark as ``>2B0<``.
        waiting: maps ranks to steps of further actions, marked as ``?2B0?``. A step past a list's end is shown as
            ``(end)``.
    """
    rank, step = offending or (0, 0)
    marks = dict.fromkeys((waiting or {}).items(), "?{}?") | ({offending: ">{}<"} if offending else {})
    steps = _window(step, 1 + max([len(row) - 1 for row in rows] + [at for _, at in marks]), _STEPS_SHOWN)
    shown = _window(rank, len(rows), _RANKS_SHOWN)
    table = [["step", *map(str, steps)]]
    table += [[f"rank {r}", *(_cell(rows[r], s, marks.get((r, s), "{}")) for s in steps)] for r in shown]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [" ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    hidden = len(rows) - len(shown)
    return "\n".join([*lines, f"({counted(hidden, 'more rank')})"] if hidden else lines)


def _cell(row: Sequence[Action], step: int, mark: str) -> str:
    if step < len(row):
        return mark.format(row[step])
    return "" if mark == "{}" else mark.format("(end)")


def _window(centre: int, count: int, size: int) -> range:
    first = max(0, min(centre - size // 2, count - size))
    return range(first, min(count, first + size))
