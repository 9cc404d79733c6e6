"""Turns what the loop did into rows, lines and the status file, on the one rank that records.

The other ranks hold a :class:`Recorder` as well, one that returns the same rows and writes nothing; so the loop has no
branch on who writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.comm.ledger import Ledger
from megastack.observe.console import Console
from megastack.observe.metrics import MetricsWriter
from megastack.observe.status import write_status
from megastack.training.state import Progress, RunResult
from megastack.training.step import StepOutcome


@dataclass
class Recorder:
    """Rows for ``metrics.jsonl``, lines for the console, ``status.json``.

    Attributes:
        steps: the run's last step.
        devices: the number of ranks.
        flops_per_token: model FLOPs of training on one token, forward and backward.
        peak_flops: of one device, in the compute dtype; ``None`` where it is not known, and then there is no MFU.
        metrics: ``None`` on ranks that do not record.
        status: the path of ``status.json``, ``None`` likewise.
        baseline: nats per token of a bigram model on the validation split, computed when it is asked for.
    """

    steps: int
    devices: int
    flops_per_token: float
    peak_flops: float | None
    console: Console
    log_every: int = 1
    metrics: MetricsWriter | None = None
    status: Path | None = None
    baseline: Callable[[], float | None] | None = None
    _validation_loss: float | None = None
    _checkpoint: str | None = None
    _last_status: str = "running"

    def train(
        self,
        progress: Progress,
        outcome: StepOutcome,
        loss: float,
        norm: float,
        seconds: float,
        memory: int,
        ledger: Ledger,
    ) -> dict[str, Any]:
        """The row of a step that was just counted in ``progress``."""
        rate = outcome.tokens / seconds
        used = rate * self.flops_per_token / self.devices
        fields = {
            "loss": loss,
            "grad_norm": norm,
            "lr": outcome.lr,
            "tokens": outcome.tokens,
            "consumed_tokens": progress.consumed_tokens,
            "consumed_samples": progress.consumed_samples,
            "skipped": progress.skipped,
            "step_time_s": seconds,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": rate / self.devices,
            "peak_memory_bytes": memory,
            "mfu": used / self.peak_flops if self.peak_flops else None,
            "bubble": None,
            "step_bubble": None,
            "wire_bytes": _wire_bytes(ledger),
            "exposed_s": {},
            "loss_scale": None,
        }
        if self.metrics is None:
            return {"kind": "train", "step": progress.step} | fields
        row = self.metrics.train(progress.step, **fields)
        if progress.step % self.log_every == 0 or progress.step == self.steps:
            self.console.train(row, self.steps)
        return row

    def validation(self, step: int, loss: float, tokens: int, samples: int) -> dict[str, Any]:
        """The row of a validation after ``step``."""
        self._validation_loss = loss
        fields = {"loss": loss, "tokens": tokens, "samples": samples}
        if self.metrics is None:
            return {"kind": "validation", "step": step} | fields
        row = self.metrics.validation(step, **fields)
        self.console.validation(row)
        return row

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """A published checkpoint."""
        self._checkpoint = str(path)
        self.event(step, "checkpoint", path=str(path), seconds=seconds)
        self.console.line(f"  saved {path}  ({seconds:.2f} s)")
        self.running(step)

    def event(self, step: int, name: str, **fields: Any) -> None:
        """Something that happened."""
        if self.metrics is not None:
            self.metrics.event(step, name, **fields)

    def running(self, step: int) -> None:
        """Say in ``status.json`` that the run goes on."""
        if self.status is not None:
            write_status(self.status, "running", step=step, checkpoint=self._checkpoint)

    def end(self, result: RunResult) -> None:
        """The last row, the last lines, the final status."""
        if self.metrics is None:
            return
        if result.status == "preempted":
            self.event(result.step, "preempt", reason=result.reason)
        self.event(result.step, "end", status=result.status, reason=result.reason)
        self.metrics.close()
        if self.status is not None:
            write_status(
                self.status, result.status, step=result.step, checkpoint=self._checkpoint, reason=result.reason
            )
        for line in self._closing_lines(result):
            self.console.line(line)

    def _closing_lines(self, result: RunResult) -> list[str]:
        lines = []
        bigram = self.baseline() if self.baseline and self._validation_loss is not None else None
        if bigram is not None and self._validation_loss is not None:
            lines.append(
                f"validation loss {self._validation_loss:.4f} nats per token; a bigram model has {bigram:.4f} "
                f"({self._validation_loss - bigram:+.4f})"
            )
        why = f": {result.reason}" if result.reason else ""
        return [*lines, f"{result.status} after step {result.step}{why}; everything is in {result.folder}"]


def _wire_bytes(ledger: Ledger) -> Mapping[str, int]:
    axes = sorted({axis for axis, _ in ledger.records()})
    return {axis: ledger.total(axis=axis).wire_bytes for axis in axes}
