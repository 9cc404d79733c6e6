"""Every error that megastack raises for a user's mistake or a failed run.

All derive from :class:`MegastackError`, so one ``except`` catches them and nothing else. Messages name the key and its
value, the rule that was broken, and what would work. Invariants inside megastack use ``assert`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class MegastackError(Exception):
    """Base of all errors that megastack raises on purpose."""


class ConfigError(MegastackError, ValueError):
    """A configuration that megastack refuses; carries every violation found, not only the first.

    Args:
        message: the report, one violation a line.
        violations: the violations as values (``megastack.config.rules.Violation``), empty for a plain message.
    """

    def __init__(self, message: str, violations: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class MeshError(MegastackError, ValueError):
    """A grid of ranks that cannot exist, or a rank or axis that is not on it."""


class PlacementError(MegastackError, ValueError):
    """A parameter without a placement, or a placement that does not fit its tensor or its mesh."""


class ScheduleError(MegastackError, ValueError):
    """A pipeline schedule that is incomplete, out of order or cannot make progress.

    Args:
        message: the rule that was broken.
        grid: the rank by step grid as text, with the first offending action marked.
        action: the first offending action.
    """

    def __init__(self, message: str, grid: str | None = None, action: Any = None) -> None:
        super().__init__(message if grid is None else f"{message}\n{grid}")
        self.grid = grid
        self.action = action


class CheckpointError(MegastackError):
    """A checkpoint that is incomplete, corrupt or does not fit the state it is loaded into."""


class DataError(MegastackError, ValueError):
    """Data that is empty, unreadable, too short or out of vocabulary."""
