"""The errors of a configuration, collected into one report.

A configuration that violates a rule may have further errors that only its model, its data or a checkpoint reveals.
:class:`ErrorCollector` runs such checks one after another. A check names the keys that it depends on, and is skipped if
one of them is known to be invalid: its result would only repeat that error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from megastack.config.convert import InvalidValueError
from megastack.errors import ConfigError, ErrorLine, MegastackError, Violation

T = TypeVar("T")


class ErrorCollector:
    """Runs checks and collects the errors that they raise.

    Args:
        known: the errors found so far; their keys are invalid.

    Attributes:
        found: every error so far, known errors first.
    """

    def __init__(self, known: Iterable[ErrorLine] = ()) -> None:
        self.found = list(known)
        self._invalid_keys = {error.key.partition("[")[0] for error in self.found if isinstance(error, Violation)}

    def any_invalid(self, *keys: str) -> bool:
        """Whether one of these keys, a part of it, or a section that contains it was invalid from the start."""
        return any(
            key == invalid or key.startswith(invalid + ".") or invalid.startswith(key + ".")
            for key in keys
            for invalid in self._invalid_keys
        )

    def check(self, function: Callable[[], T], *keys: str) -> T | None:
        """Call a function and collect the error that it raises.

        Args:
            function: returns a value, or raises the errors that it finds.
            keys: the keys that it depends on.

        Returns:
            The value; None if the function raises, or if it is skipped because a key is invalid.
        """
        if self.any_invalid(*keys):
            return None
        try:
            return function()
        except InvalidValueError:
            return None
        except ConfigError as error:
            self.add(error.errors)
        except (MegastackError, OSError) as error:
            self.add([str(error)])
        return None

    def add(self, errors: Iterable[ErrorLine]) -> None:
        """Add errors without duplicates: several checks may find the same one."""
        known = {str(error) for error in self.found}
        self.found += [error for error in errors if str(error) not in known]

    def branch(self) -> ErrorCollector:
        """Return a collector without errors that skips the same checks."""
        other = ErrorCollector()
        other._invalid_keys = self._invalid_keys
        return other

    def require_none(self) -> None:
        """Raise the collected errors, if there are any.

        Raises:
            ConfigError: every error.
        """
        if self.found:
            raise ConfigError.of(self.found)
