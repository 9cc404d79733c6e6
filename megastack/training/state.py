"""The values that a run shares with its caller: its progress, its result, and the hooks it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megastack.errors import CheckpointError
from megastack.records import RecordError, integer

Row = Mapping[str, Any]


@dataclass
class Hooks:
    """Functions that a run calls on every rank, in order.

    Attributes:
        on_step: called with the row of each training step, as in ``metrics.jsonl``.
        on_validation: called with the row of each validation.
        on_checkpoint: called with the step and the folder of each published checkpoint.
    """

    on_step: list[Callable[[Row], None]] = field(default_factory=list)
    on_validation: list[Callable[[Row], None]] = field(default_factory=list)
    on_checkpoint: list[Callable[[int, Path], None]] = field(default_factory=list)


@dataclass
class Progress:
    """The trainer's own state; together with weights and moments, everything that a resumed run needs.

    Learning rate, data order and dropout are functions of ``step``, so nothing else is restored.

    Attributes:
        step: completed optimizer steps.
        consumed_tokens: valid targets seen so far, each once.
        consumed_samples: sequences seen so far.
        skipped: steps without an update, because a gradient was not finite or the global batch had no valid label.
    """

    step: int = 0
    consumed_tokens: int = 0
    consumed_samples: int = 0
    skipped: int = 0

    def as_json(self) -> dict[str, int]:
        """The state as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Progress:
        """The inverse of :meth:`as_json`; other keys of a trainer record are ignored.

        Raises:
            CheckpointError: a count is missing or invalid.
        """
        try:
            return cls(**{name: integer(record, name) for name in cls.__dataclass_fields__})
        except RecordError as error:
            raise CheckpointError(f"the trainer's state: {error}") from None


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: ``completed``, ``preempted``, ``diverged`` or ``failed``.
        step: completed optimizer steps.
        loss: the last training loss, mean nats per valid token; ``None`` if there is none or it is not finite.
        folder: the run folder.
        reason: why the run did not complete, or why there was nothing to train.
        interrupted: whether a signal asked the launcher to stop.
        rank: the global rank that the reason refers to, if it refers to one.
        coordinates: that rank's mesh coordinates, as text.
    """

    status: str
    step: int
    loss: float | None
    folder: Path
    reason: str | None = None
    interrupted: bool = False
    rank: int | None = None
    coordinates: str | None = None

    @property
    def exit_code(self) -> int:
        """0 completed, 75 preempted and resumable, 1 failed or diverged."""
        return {"completed": 0, "preempted": 75}.get(self.status, 1)


def nothing_to_train(done: int, steps: int) -> str:
    """The reason given by a run that ends without a step."""
    return f"nothing is trained: the checkpoint's step {done} is at or beyond run.steps={steps}"
