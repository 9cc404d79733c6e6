"""What a user of the library can hang into a run: plain callables, called in order, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass
class Hooks:
    """Lists of callables.

    Attributes:
        on_step: with the row of each training step, as ``metrics.jsonl`` has it.
        on_validation: with the row of each validation.
        on_checkpoint: with the step and the folder of each published checkpoint.
    """

    on_step: list[Callable[[Row], None]] = field(default_factory=list)
    on_validation: list[Callable[[Row], None]] = field(default_factory=list)
    on_checkpoint: list[Callable[[int, Path], None]] = field(default_factory=list)
