"""The records of a run: rows of ``metrics.jsonl``, console lines and ``status.json``, written by one rank.

The other ranks also have a :class:`Recorder`, which returns the same rows and writes nothing, so the loop does not
branch on which rank writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megastack.comm.traffic import Ledger
from megastack.observe.console import Console
from megastack.observe.devices import LargestMemory
from megastack.observe.metrics import MetricsWriter, Row, row
from megastack.observe.status import write_status
from megastack.training.nonfinite import NonfiniteOrigin
from megastack.training.state import Progress, RunResult
from megastack.training.step import StepOutcome

_LOG = logging.getLogger(__name__)


class StepResults(NamedTuple):
    """The results of a step, read on the host.

    Attributes:
        loss: see :class:`megastack.training.step.StepOutcome`.
        grad_norm: likewise.
        loss_scale: likewise.
    """

    loss: float | None
    grad_norm: float | None
    loss_scale: float | None


STATUS_PERIOD_S = 1.0
"""The minimum time between two updates of ``status.json`` while steps are running."""


@dataclass(frozen=True)
class StepCost:
    """The wall time of a step, and the largest peak memory of the ranks so far."""

    seconds: float
    memory: LargestMemory


@dataclass
class Recorder:
    """Writes rows of ``metrics.jsonl``, console lines and ``status.json``, or nothing on ranks that do not record.

    Attributes:
        steps: the run's last step.
        devices: the number of ranks.
        flops_per_token: returns the model FLOPs of training on one token, forward and backward, at a 0-based step.
        peak_flops: the peak FLOP/s of one device in the compute dtype; ``None`` if unknown, in which case MFU is null.
        metrics: ``None`` on ranks that do not record.
        status: the path of ``status.json``; ``None`` on ranks that do not record.
        pid: the process to signal to stop the run.
        last_checkpoint: the newest checkpoint from which the run can be resumed.
        elastic: a description of this start of an elastic job, for the status.
        guard: called before every write; raises if this run may no longer write.
        baseline: computes the nats per token of a bigram model on the validation split.
        compile_cache: where compiled kernels are kept; ``None`` if nothing is compiled.
        phases: descriptions of the later data phases, by the 0-based step at which each begins.
        read_ahead_s: the time that reading data took before the first step began.
    """

    steps: int
    devices: int
    flops_per_token: Callable[[int], float]
    peak_flops: float | None
    console: Console
    log_every: int = 1
    metrics: MetricsWriter | None = None
    status: Path | None = None
    pid: int | None = None
    last_checkpoint: Path | None = None
    elastic: str | None = None
    guard: Callable[[], None] | None = None
    baseline: Callable[[], float | None] | None = None
    compile_cache: Path | None = None
    phases: Mapping[int, str] = field(default_factory=dict)
    read_ahead_s: float = 0.0
    _trained_s: float = 0.0
    _data_s: float = 0.0
    _validation_loss: float | None = None
    _status_at: float = 0.0

    def start(self, step: int) -> None:
        """Record that the run starts, or resumes from a checkpoint."""
        if self.last_checkpoint is None:
            self.event(step, "start", ranks=self.devices)
        else:
            self.event(step, "resume", ranks=self.devices, path=str(self.last_checkpoint))
        if self.compile_cache is not None:
            self.console.line("note      compiling the blocks; the first step takes longer")
        self._running(step)

    def step(self, step: int) -> None:
        """Record that the 0-based ``step`` begins."""
        if step in self.phases:
            self.event(step, "stage", data=self.phases[step])
            self.console.line(f"  after step {step}: {self.phases[step]}")

    def train(
        self, progress: Progress, outcome: StepOutcome, results: StepResults, cost: StepCost, ledger: Ledger
    ) -> Row:
        """Write and return the row of a step that ``progress`` already includes."""
        # The data of a step are read during an earlier step, and the data of the first steps before any step begins.
        before = 0.0 if self._trained_s else self.read_ahead_s
        if not self._trained_s and self.compile_cache is not None:
            note = f"the first step compiled the blocks and took {cost.seconds:.1f} s; kernels: {self.compile_cache}"
            _LOG.info(note)
            self.console.line(f"note      {note}")
        self._trained_s, self._data_s = self._trained_s + before + cost.seconds, self._data_s + outcome.data_seconds
        fields = self._train_fields(progress, outcome, results, cost)
        entry = row("train", progress.step, fields | {"wire_bytes": wire_bytes(ledger), "exposed_s": ledger.exposed_s})
        if self._write(entry):
            if progress.step % self.log_every == 0 or progress.step == self.steps:
                self.console.train(entry, self.steps)
            if time.monotonic() - self._status_at >= STATUS_PERIOD_S:
                self._running(progress.step)
        return entry

    def _train_fields(
        self, progress: Progress, outcome: StepOutcome, results: StepResults, cost: StepCost
    ) -> dict[str, object]:
        rate = outcome.tokens / cost.seconds
        used = rate * self.flops_per_token(progress.step - 1) / self.devices
        return {
            "loss": results.loss,
            "grad_norm": results.grad_norm,
            "lr": outcome.lr,
            "tokens": outcome.tokens,
            "consumed_tokens": progress.consumed_tokens,
            "consumed_samples": progress.consumed_samples,
            "skipped": progress.skipped,
            "step_time_s": cost.seconds,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": rate / self.devices,
            "peak_memory_bytes": cost.memory.allocated,
            "peak_memory_rank": cost.memory.allocated_rank,
            "peak_reserved_bytes": cost.memory.reserved,
            "peak_reserved_rank": cost.memory.reserved_rank,
            "model_tflops_per_device": used / 1e12,
            "mfu": used / self.peak_flops if self.peak_flops else None,
            "bubble": None,
            "step_bubble": None,
            "wire_bytes": {},
            "exposed_s": {},
            "loss_scale": results.loss_scale,
        }

    def validation(self, step: int, loss: float | None, tokens: int, samples: int) -> Row:
        """Write and return the row of a validation after ``step``."""
        self._validation_loss = loss
        entry = row("validation", step, {"loss": loss, "tokens": tokens, "samples": samples})
        if self._write(entry):
            self.console.validation(entry)
        return entry

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Record the continuation of the sample prompt after ``step``."""
        self.event(step, "sample", prompt=prompt, text=text)
        self.console.line(f"  sample      {prompt}{text}")

    def checkpoint(self, step: int, path: Path, seconds: float, write_seconds: float) -> None:
        """Record a published checkpoint: the time it added to training, and the time its writing took."""
        self.last_checkpoint = path
        self.event(step, "checkpoint", path=str(path), seconds=seconds, write_seconds=write_seconds)
        beside = f", written in {write_seconds:.2f} s beside training" if write_seconds > seconds else ""
        self.console.line(f"  saved {path}  ({seconds:.2f} s{beside})")
        self._running(step)

    def no_labels(self, step: int) -> None:
        """Record a step that is skipped because its global batch has no valid label."""
        self.event(step, "no_labels")
        self.console.line(f"  step {step} has no valid label; skipped")

    def nonfinite(self, step: int, results: StepResults, origin: NonfiniteOrigin) -> None:
        """Record a non-finite loss or gradient norm and its origin; an overflowing loss scale has no origin."""
        fields = {"origin": origin.text.lstrip(",; ") or None, "rank": origin.rank, "coordinates": origin.coordinates}
        self.event(step, "nonfinite", loss=repr(results.loss), grad_norm=repr(results.grad_norm), **fields)

    def event(self, step: int, name: str, **fields: object) -> None:
        """Write a row of kind ``event``."""
        self._write(row("event", step, {"name": name} | fields))

    def end(self, result: RunResult) -> None:
        """Write the last row, the closing lines and the final status."""
        if result.status == "preempted":
            self.event(result.step, "preempt", reason=result.reason)
        spent = {"train_s": self._trained_s, "data_s": self._data_s}
        self.event(result.step, "end", status=result.status, reason=result.reason, **spent)
        where = {"rank": result.rank, "coordinates": result.coordinates}
        self._status(result.status, step=result.step, reason=result.reason, **where)
        if self.metrics is not None:
            for line in self._closing_lines(result):
                self.console.line(line)
            self.metrics.close()

    def _write(self, entry: Row) -> bool:
        """Write a row if this rank records; returns whether it does."""
        if self.metrics is not None:
            self._require_writable()
            self.metrics.write(entry)
        return self.metrics is not None

    def _require_writable(self) -> None:
        if self.guard is not None:
            self.guard()

    def _running(self, step: int) -> None:
        self._status_at = time.monotonic()
        self._status("running", step=step)

    def _status(self, status: str, **fields: object) -> None:
        if self.status is not None:
            self._require_writable()
            last = self.last_checkpoint
            path = None if last is None else str(last)
            write_status(self.status, status, checkpoint=path, pid=self.pid, start=self.elastic, **fields)

    def _closing_lines(self, result: RunResult) -> list[str]:
        lines = []
        bigram = self.baseline() if self.baseline and self._validation_loss is not None else None
        if bigram is not None and self._validation_loss is not None:
            lines.append(
                f"validation loss {self._validation_loss:.4f} nats per token; a bigram model has {bigram:.4f} "
                f"({self._validation_loss - bigram:+.4f})"
            )
        if self._trained_s:
            share = self._data_s / self._trained_s
            lines.append(f"reading data took {self._data_s:.2f} of {self._trained_s:.2f} s of training ({share:.1%})")
        why = f": {result.reason}" if result.reason else ""
        return [*lines, f"{result.status} after step {result.step}{why}; everything is in {result.folder}"]


def wire_bytes(ledger: Ledger) -> Mapping[str, int]:
    """Bytes on the wire of this rank, by axis."""
    axes = sorted({axis for axis, _ in ledger.records()})
    return {axis: ledger.total(axis=axis).wire_bytes for axis in axes}
