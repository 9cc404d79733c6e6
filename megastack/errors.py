"""Exceptions for user errors and failed runs, and the text of their messages.

All exceptions derive from :class:`MegastackError`, so one ``except`` catches them and nothing else. A message names the
key, its value, the rule it violates and valid alternatives. Internal invariants use ``assert`` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from numbers import Integral
from typing import Self


class MegastackError(Exception):
    """Base class of all exceptions that megastack raises deliberately.

    Attributes:
        ranks: if every rank raises the error, the ranks that caused it; empty if the raising rank did.
        reporter: the rank that prints the error, if the ranks have agreed on one.
    """

    ranks: tuple[int, ...] = ()
    reporter: int | None = None

    def about(self, ranks: Iterable[int]) -> Self:
        """Set the ranks that caused an error raised on every rank, and return the error."""
        self.ranks = tuple(ranks)
        return self

    def reported_by(self, rank: int | None) -> Self:
        """Set the rank that prints the error, and return the error."""
        self.reporter = rank
        return self


@dataclass(frozen=True)
class Violation:
    """A rule that a value violates, printed as ``key=value: rule; use …``.

    Args:
        key: the configuration key, or the name of an argument.
        value: its value.
        rule: the rule in words, such as ``must divide model.heads=16``.
        legal: valid values, or advice in words; empty if there is none.
    """

    key: str
    value: object
    rule: str
    legal: tuple[object, ...] = ()

    def __str__(self) -> str:
        advice = f"; use {one_of(self.legal)}" if self.legal else ""
        return f"{self.key}={spell(self.value)}: {self.rule}{advice}"


_MOST_BITS = 10_000
"""Longer integers are abbreviated; Python does not convert integers of many thousands of digits to text."""


def spell(value: object) -> str:
    """Format a value as written on the command line: ``null``, ``true``, ``[1, 2]``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(spell(item) for item in value) + "]"
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        return spell({name: each for name, each in given.items() if each is not None})
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1}…"
    return str(value)


def one_of(values: Iterable[object]) -> str:
    """Format alternatives in words: ``1, 2, 4 or 8``."""
    words = [spell(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def counted(count: float, one: str, many: str | None = None) -> str:
    """Format a number with its noun: ``1 stage``, ``2,000 stages``, ``1.5 microbatches``."""
    number = f"{count:,}" if isinstance(count, Integral) else f"{count:g}"
    return f"{number} {one if count == 1 else many or one + 's'}"


ErrorLine = Violation | str
"""One error in a report: a violation if it concerns a single key, otherwise a line of text."""


class ConfigError(MegastackError, ValueError):
    """An invalid configuration, reported with every error found.

    Args:
        message: the report, one error per line.
        errors: the individual errors; by default the message.

    Attributes:
        errors: every error of the report.
        violations: the errors that concern a single key.
    """

    def __init__(self, message: str, errors: Sequence[ErrorLine] = ()) -> None:
        super().__init__(message)
        self.errors: tuple[ErrorLine, ...] = tuple(errors) or (message,)
        self.violations = tuple(error for error in self.errors if isinstance(error, Violation))

    @classmethod
    def of(cls, errors: Sequence[ErrorLine]) -> ConfigError:
        """Build the report of several errors, one per line."""
        return cls("\n".join(str(error) for error in errors), errors)


class MeshError(MegastackError, ValueError):
    """An invalid mesh shape, or a rank or axis outside the mesh."""


class RankEnvironmentError(MeshError):
    """Invalid rank variables in the environment, or an address at which the rendezvous fails.

    Without a rendezvous the ranks cannot agree on a reporter, so every rank reports its own error.
    """


class LayerError(ConfigError):
    """An exception in the constructor of a custom layer that is not about its arguments.

    Before launch, this is a configuration error. On a rank, it is a failure, because the layer was built before launch.
    """


class PlacementError(MegastackError, ValueError):
    """A parameter without a placement, or a placement that does not match its tensor or mesh."""


class ScheduleError(MegastackError, ValueError):
    """A pipeline schedule that is incomplete, out of order or deadlocks.

    Args:
        message: the rule that the schedule violates.
        grid: the schedule as text, with one row per rank and the first invalid action marked.
        action: the first invalid action.
    """

    def __init__(self, message: str, grid: str | None = None, action: object = None) -> None:
        super().__init__(message if grid is None else f"{message}\n{grid}")
        self.grid = grid
        self.action = action


class CheckpointError(MegastackError):
    """A checkpoint that is incomplete, corrupt or does not match the state it is loaded into."""


class DataError(MegastackError, ValueError):
    """Data that is empty, unreadable, too short or out of vocabulary."""
