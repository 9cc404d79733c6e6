"""The console output of a run, printed by one rank, and the log file of each rank.

Rich chooses the colours (``NO_COLOR``, and whether the output is a terminal). Lines are never wrapped, so they can be
searched. Control characters are escaped, see :mod:`megastack.observe.printable`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from megastack.errors import counted
from megastack.mesh.shape import Axis, describe_coordinates
from megastack.observe.files import cannot_write
from megastack.observe.printable import printable
from megastack.observe.streams import standard_error, standard_output

LOGGER = "megastack"


class Console:
    """Console output of one rank; disabled on the others. Never raises.

    Args:
        enabled: whether anything is printed.
        stderr: whether to print to standard error.
        on_gpu: whether a second line of a step shows the use of GPUs: FLOP/s, MFU, peak memory (allocated, and reserved
            by torch's allocator, on the rank with the most), and the share of time with exposed communication.
    """

    def __init__(self, *, enabled: bool = True, stderr: bool = False, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._rich = RichConsole(
            file=standard_error() if stderr else standard_output(),
            quiet=not enabled,
            highlight=False,
            soft_wrap=True,
            force_jupyter=False,
        )

    def line(self, text: str, style: str = "") -> None:
        """Print one or more lines."""
        self._rich.print(Text(printable(text), style=style))

    def text(self, text: str, style: str = "") -> None:
        """Print text without a final newline."""
        self._rich.print(Text(printable(text), style=style), end="")

    def train(self, row: Mapping[str, Any], steps: int) -> None:
        """Print the line of a training step."""
        self._rich.print(
            Text.assemble(
                (f"step {row['step']:>{len(str(steps))}}/{steps}", "bold"),
                f"  loss {number(row['loss'], '.4f')}  grad {number(row['grad_norm'], '.3f')}",
                f"  lr {row['lr']:.2e}  {row['tokens_per_s']:>9,.0f} tok/s  {row['step_time_s'] * 1e3:>6.0f} ms",
                _use_of_gpu(row) if self._on_gpu else "",
            )
        )

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print aligned columns, never truncated."""
        shown = [[printable(cell) for cell in row] for row in (header, *rows)]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for at, cells in enumerate(shown):
            text = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            self.line(text.rstrip(), style="bold" if at == 0 else "")

    def validation(self, row: Mapping[str, Any]) -> None:
        """Print the line of a validation."""
        loss = number(row["loss"], ".4f")
        text = f"  validation  loss {loss}  over {counted(row['samples'], 'sample')}, {counted(row['tokens'], 'token')}"
        self.line(text, style="cyan")


def _use_of_gpu(row: Mapping[str, Any]) -> str:
    """The second line of a step on GPUs."""
    peak, reserved, exposed = row["peak_memory_bytes"], row["peak_reserved_bytes"], sum(row["exposed_s"].values())
    memory = f"peak {peak / 2**30:.1f} GiB"
    if reserved is not None:
        memory += f", {reserved / 2**30:.1f} GiB reserved (rank {row['peak_reserved_rank']})"
    parts = [f"{row['model_tflops_per_device']:.0f} TFLOP/s/GPU", f"MFU {number(row['mfu'], '.1%')}", memory]
    return "\n" + "".join(f"  {part}" for part in [*parts, f"exposed {exposed / row['step_time_s']:.0%}"])


def number(value: float | None, format_spec: str) -> str:
    """Format a number for a column; None, which replaces values that are not finite, becomes a dash."""
    return "–" if value is None else format(value, format_spec)


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters, which would affect the screen or any program that displays the file."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _LogFile(logging.FileHandler):
    """Raises an error if a record cannot be written, for example on a full disk, instead of printing a note."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise cannot_write(Path(self.baseFilename), error) from error
        super().handleError(record)


def set_up_logging(path: Path, rank: int, coordinates: Mapping[Axis, int]) -> logging.Logger:
    """Send this process's log to its own file, and warnings to the console as well.

    Args:
        path: the rank's log file; its parent folder is created.
        rank: the global rank.
        coordinates: its mesh coordinates, for the prefix ``[rank 5 | pp1 dp0 tp1]``.
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
    file.setFormatter(_EscapingFormatter(f"%(asctime)s %(levelname)s {prefix} %(message)s"))
    screen = logging.StreamHandler(standard_error())
    screen.setLevel(logging.WARNING)
    screen.setFormatter(_EscapingFormatter(f"{prefix} %(levelname)s %(message)s"))
    logger.addHandler(file)
    logger.addHandler(screen)
    return logger
