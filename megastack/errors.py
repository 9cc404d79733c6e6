"""Every error that megastack raises for a user's mistake or a failed run.

All derive from :class:`MegastackError`, so one ``except`` catches them and nothing else. Messages name the key and its
value, the rule that was broken, and what would work. Invariants inside megastack use ``assert`` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import Any, Self


class MegastackError(Exception):
    """Base of all errors that megastack raises on purpose.

    Attributes:
        ranks: the ranks whose fault it is, where all ranks raise it; empty where it is the raising rank's own.
        reporter: the rank that prints it, where the ranks of a launcher have agreed on one; ``None`` where they have
            not.
    """

    ranks: tuple[int, ...] = ()
    reporter: int | None = None

    def about(self, ranks: Iterable[int]) -> Self:
        """This error, as the fault of some ranks that all ranks raise."""
        self.ranks = tuple(ranks)
        return self

    def reported_by(self, rank: int | None) -> Self:
        """This error, to be printed by one rank."""
        self.reporter = rank
        return self


@dataclass(frozen=True)
class Violation:
    """One broken rule, printed as ``key=value: rule; use …``.

    Args:
        key: the configuration key, or the argument's name where no configuration is involved.
        value: its value.
        rule: what has to hold, in words.
        legal: values that would do, or advice in words; empty where there is none to give.
    """

    key: str
    value: Any
    rule: str
    legal: tuple[Any, ...] = ()

    def __str__(self) -> str:
        advice = f"; use {one_of(self.legal)}" if self.legal else ""
        return f"{self.key}={spell(self.value)}: {self.rule}{advice}"


_MOST_BITS = 10_000
"""Python writes out no whole number of many thousands of digits."""


def spell(value: Any) -> str:
    """A value as one would write it on the command line: ``null``, ``true``, ``[1, 2]``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(spell(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1}…"
    return str(value)


def one_of(values: Iterable[Any]) -> str:
    """A choice in words: ``1, 2, 4 or 8``."""
    words = [spell(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def counted(count: float, one: str, many: str | None = None) -> str:
    """A number and its noun: ``1 stage``, ``2,000 stages``, ``1.5 microbatches``."""
    number = f"{count:,}" if isinstance(count, Integral) else f"{count:g}"
    return f"{number} {one if count == 1 else many or one + 's'}"


ErrorLine = Violation | str
"""Something that is to be mended: as a value where it is about one key, else in words."""


class ConfigError(MegastackError, ValueError):
    """A configuration that megastack refuses; carries every fault found, not only the first.

    Args:
        message: the report, one fault a line.
        faults: the faults as values; the message where there are none.

    Attributes:
        violations: the faults that are about one key each.
    """

    def __init__(self, message: str, errors: Sequence[ErrorLine] = ()) -> None:
        super().__init__(message)
        self.errors: tuple[ErrorLine, ...] = tuple(errors) or (message,)
        self.violations = tuple(error for error in self.errors if isinstance(error, Violation))

    @classmethod
    def of(cls, errors: Sequence[ErrorLine]) -> ConfigError:
        """The report of several faults, a line each."""
        return cls("\n".join(str(error) for error in errors), errors)


class MeshError(MegastackError, ValueError):
    """A grid of ranks that cannot exist, or a rank or axis that is not on it."""


class RankEnvironmentError(MeshError):
    """Rank variables of the environment that cannot be used, or an address where ranks cannot find each other.

    Ranks that cannot find each other cannot agree on who reports it, so every rank reports its own.
    """


class LayerError(ConfigError):
    """A layer of the user's whose constructor ended with an error that says nothing of its arguments.

    Before anything starts that is the user's to mend; on a rank, where the same layer was built before, a failure.
    """


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
