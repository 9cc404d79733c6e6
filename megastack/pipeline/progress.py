"""Determines whether lists of steps that wait for one another can complete, and in which order.

`simulate` and `check` share this module. A list runs from its front; a step needs some keys and provides others. The
caller defines the keys: outputs of computations, posted messages, started groups of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    """One entry of a list: it runs once all keys in `needs` are available, and provides the keys in `provides`."""

    needs: tuple[Hashable, ...] = ()
    provides: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class PossibleOrder:
    """The progress of each list.

    Attributes:
        order: (list, step) of all steps that ran, in a possible order.
        positions: for each list, the first step that did not run.
        missing: for each stuck list, the key that it waits for.
    """

    order: list[tuple[int, int]]
    positions: list[int]
    missing: dict[int, Hashable]

    def cycle(self, rows: Sequence[Sequence[Step]]) -> list[int]:
        """The stuck lists that wait for each other, in turn; the last may wait for a key that no step provides."""
        provider = {
            key: row for row in self.missing for step in rows[row][self.positions[row] :] for key in step.provides
        }
        row = min(self.missing, key=lambda stuck: self.positions[stuck])
        path: list[int] = []
        while row not in path:
            path.append(row)
            key = self.missing[row]
            if key not in provider:
                return path[-1:]
            row = provider[key]
        return path[path.index(row) :]


def run(rows: Sequence[Sequence[Step]]) -> PossibleOrder:
    """Run all lists as far as possible, in time linear in their length."""
    positions = [0] * len(rows)
    order: list[tuple[int, int]] = []
    available: set[Hashable] = set()
    waiting: dict[Hashable, list[int]] = {}
    missing: dict[int, Hashable] = {}
    ready = deque(range(len(rows)))
    while ready:
        row = ready.popleft()
        missing.pop(row, None)
        for position in range(positions[row], len(rows[row])):
            step = rows[row][position]
            lacking = [key for key in step.needs if key not in available]
            if lacking:
                waiting.setdefault(lacking[0], []).append(row)
                missing[row] = lacking[0]
                break
            order.append((row, position))
            positions[row] = position + 1
            available.update(step.provides)
            for key in step.provides:
                ready.extend(waiting.pop(key, ()))
    return PossibleOrder(order, positions, missing)
