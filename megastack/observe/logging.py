"""Logs: a file for each rank with everything, the console with warnings, each line with its rank and coordinates."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from megastack.mesh.shape import Axis, describe_coordinates
from megastack.observe.files import cannot_write
from megastack.observe.printable import printable
from megastack.observe.streams import standard_error

LOGGER = "megastack"


class _Printable(logging.Formatter):
    """Lines without control characters, on the screen and for whoever shows the file."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _LogFile(logging.FileHandler):
    """A log that cannot be written, as on a full disk, is a failure, not a note on the screen."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise cannot_write(Path(self.baseFilename), error) from error
        super().handleError(record)


def set_up_logging(path: Path, rank: int, coordinates: Mapping[Axis, int]) -> logging.Logger:
    """Send this process's log to its own file, and its warnings to the console as well.

    Args:
        path: the rank's log file; its folder is made.
        rank: the global rank.
        coordinates: its place on the mesh, for the prefix ``[rank 5 | pp1 dp0 tp1]``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"[rank {rank} | {describe_coordinates(coordinates)}]"
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    file = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(_Printable(f"%(asctime)s %(levelname)s {prefix} %(message)s"))
    screen = logging.StreamHandler(standard_error())
    screen.setLevel(logging.WARNING)
    screen.setFormatter(_Printable(f"{prefix} %(levelname)s %(message)s"))
    logger.addHandler(file)
    logger.addHandler(screen)
    return logger
