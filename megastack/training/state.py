"""Where a run stands, and how it ended: two small values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megastack.errors import CheckpointError
from megastack.records import RecordError, integer


@dataclass
class Progress:
    """The trainer's own state; with the weights and moments, all that a resumed run needs.

    Learning rate, data order and dropout are functions of ``step``, so there is nothing else to restore.

    Attributes:
        step: completed optimizer steps.
        consumed_tokens: valid targets seen so far, each once.
        consumed_samples: sequences seen so far.
        skipped: steps without an update, because of a non-finite gradient or a global batch without a valid label.
    """

    step: int = 0
    consumed_tokens: int = 0
    consumed_samples: int = 0
    skipped: int = 0

    def as_json(self) -> dict[str, int]:
        """The state as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Progress:
        """The inverse of :meth:`as_json`; other keys of a trainer record are ignored.

        Raises:
            CheckpointError: a count is missing or not a count.
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
        loss: the last training loss, mean nats per valid token; ``None`` where no step had one, or it is not finite.
        folder: the run folder.
        reason: why it did not complete, or why there was nothing to train.
        interrupted: a signal asked the launcher to stop.
        rank: the global rank that the reason is about, where it is about one.
        coordinates: its place on the mesh, in words.
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
    """Why a run ends without a step."""
    return f"nothing is trained: the checkpoint's step {done} is at or beyond run.steps={steps}"
