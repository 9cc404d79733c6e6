"""The training loop: when to validate, save, report and stop. It is independent of the parallel layout.

Its parts are built elsewhere. Every rank runs the same loop, and only the rank whose :class:`Recorder` records writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from megastack.checkpoint.manager import CheckpointManager, PublishedCheckpoint
from megastack.checkpoint.state import State
from megastack.comm.collectives import all_reduce
from megastack.data.validation import ValidationBatches
from megastack.mesh.mesh import Mesh
from megastack.observe.devices import peak_memory_bytes
from megastack.training.agreement import (
    StepInputs,
    fingerprint_bounds,
    fingerprints_differ,
    require_data,
    require_identical,
)
from megastack.training.nonfinite import NonfiniteOrigin, locate_nonfinite
from megastack.training.report import Losses, Recorder, StepCost
from megastack.training.signals import StopRequest, describe_stop
from megastack.training.state import Hooks, Progress, RunResult, nothing_to_train
from megastack.training.step import StepOutcome, TrainStep


@dataclass(frozen=True)
class LoopOptions:
    """When the loop acts, and on which steps; steps are 1-based counts of completed optimizer steps."""

    steps: int
    samples_per_step: int
    validate_every: int = 0
    save_every: int | None = None
    save_at_end: bool = True
    skip_nonfinite: bool = False
    dump_steps: Sequence[int] = ()


@dataclass
class Loop:
    """Runs training from its current progress to the last step.

    Attributes:
        manager: writes checkpoints, either immediately or while training continues.
        state: returns the state to save at the current progress.
        dump: called twice with a step's number: with ``"gradients"`` when they are ready, and with ``"weights"`` after
            the update.
        sample: returns a prompt and its continuation with the current weights.
        doing: the current activity of this rank, for failure reports.
    """

    options: LoopOptions
    mesh: Mesh
    step: TrainStep
    stages: Sequence[nn.Module]
    progress: Progress
    recorder: Recorder
    stop: StopRequest
    folder: Path
    manager: CheckpointManager
    state: Callable[[], State]
    dump: Callable[[int, str], None]
    validation: ValidationBatches | None = None
    hooks: Hooks = field(default_factory=Hooks)
    sample: Callable[[], tuple[str, str]] | None = None
    doing: str = "starting"
    _loss: float | None = None
    _saved: int = -1
    _validated: int = -1
    _stop_code: float = 0.0
    _data_error: Exception | None = None
    _any_data_error: float = 0.0
    _origin: NonfiniteOrigin = field(default_factory=lambda: NonfiniteOrigin(""))

    def __post_init__(self) -> None:
        validation = self.validation
        self._validation_size = (validation.samples, validation.valid_tokens) if validation is not None else (0, 0)

    def run(self) -> RunResult:
        """Train until the last step, a request to stop, or a loss that is not finite."""
        self._saved, done = self.progress.step if self.progress.step else -1, self.progress.step
        self.recorder.start(self.progress.step)
        reason, _ = self._agree(self.progress.step)
        while self.progress.step < self.options.steps and not reason:
            began = time.perf_counter()
            outcome = self._train_step()
            reason, memory = self._agree(self.progress.step + 1)
            if not self._report(outcome, StepCost(time.perf_counter() - began, memory)):
                return self._diverged()
            self._every(self.options.validate_every, self._validate)
            reason = reason or self._stop_code
            self._every(self.options.save_every or 0, self._checkpoint)
        unfinished = self.progress.step < self.options.steps
        if not unfinished:
            self._validate()
        if unfinished or self._stop_code:
            self._checkpoint()
            return self._end("preempted", describe_stop(reason or self._stop_code))
        if self.options.save_at_end:
            self._checkpoint()
        idle = done >= self.options.steps
        return self._end("completed", nothing_to_train(done, self.options.steps) if idle else None)

    def _train_step(self) -> StepOutcome:
        number = self.progress.step + 1
        self.doing = f"training step {number}"
        if self._any_data_error:
            require_data(self._data_error, number, self.mesh)
        self.recorder.step(self.progress.step)
        self.mesh.ledger.reset()
        dump = number in self.options.dump_steps
        outcome = self.step(self.progress.step, (lambda: self.dump(number, "gradients")) if dump else None)
        if dump:
            self.dump(number, "weights")
        return outcome

    def _agree(self, coming: int) -> tuple[float, int]:
        """The highest stop code and peak memory over all ranks. Also reports checkpoints that all ranks have finished.

        Also compares the inputs of the 0-based step ``coming`` over the ranks.
        """
        inputs = self._step_inputs(coming)
        flags = [
            self.stop.code,
            float(peak_memory_bytes(self.mesh.device)),
            self.manager.busy,
            self._data_error is not None,
        ]
        own = torch.tensor([*map(float, flags), *fingerprint_bounds(inputs)], dtype=torch.float64)
        reduced = all_reduce(own.to(self.mesh.device), self.mesh.world, "max").tolist()
        code, memory, busy, self._any_data_error, *bounds = reduced
        if fingerprints_differ(*bounds):
            require_identical(inputs, self.mesh)
        if not busy:
            self._published(self.manager.wait())
        return code, int(memory)

    def _step_inputs(self, step: int) -> StepInputs | None:
        """This rank's inputs to a 0-based step; None if it cannot read its data, in which case the error is kept.

        The error is raised when the step is due, if it is reached: earlier steps are reported, validated and saved
        first.
        """
        self._data_error = None
        try:
            data = self.step.prepare(step)
        except Exception as error:
            self._data_error = error
            return None
        return StepInputs.of(step + 1, data.microbatches, data.tokens, self._validation_size)

    def _report(self, outcome: StepOutcome, cost: StepCost) -> bool:
        """Count the step and write its row. Returns False without counting if the run must end here."""
        if outcome.loss is None or outcome.grad_norm is None:
            self.recorder.no_labels(self.progress.step + 1)
            self._count(outcome, (None, None), cost, skipped=True)
            return True
        number, loss, norm = self.progress.step, float(outcome.loss), float(outcome.grad_norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        overflow = not finite and math.isfinite(loss) and self.step.loss_scale.may_overflow(outcome.loss_scale)
        counted = finite or overflow or self.options.skip_nonfinite
        if counted:
            self._count(outcome, (loss, norm), cost, skipped=not finite)
        if not finite:
            self._origin = NonfiniteOrigin("") if overflow else locate_nonfinite(self.step, self.stages, number)
            self.recorder.nonfinite(number + 1, (loss, norm), self._origin)
        return counted

    def _count(self, outcome: StepOutcome, losses: Losses, cost: StepCost, *, skipped: bool) -> None:
        self.progress.step += 1
        self.progress.skipped += skipped
        self.progress.consumed_tokens += outcome.tokens
        self.progress.consumed_samples += self.options.samples_per_step
        if losses[0] is not None:
            self._loss = losses[0] if math.isfinite(losses[0]) else None
        row = self.recorder.train(self.progress, outcome, losses, cost, self.mesh.ledger)
        for hook in self.hooks.on_step:
            hook(row)

    def _every(self, period: int, action: Callable[[], None]) -> None:
        """Run ``action`` every ``period`` steps."""
        if period and self.progress.step % period == 0:
            action()

    def _validate(self) -> None:
        """Compute the validation loss of the current weights, without dropout; at most once per step.

        On a request to stop, all ranks end it between two batches, without a row.
        """
        if self.validation is None or not self.validation.samples or self._validated == self.progress.step:
            return
        self.doing, self._validated = f"validation after step {self.progress.step}", self.progress.step
        tokens = self.validation.valid_tokens
        loss = self._summed_loss(self.validation) / tokens if tokens else None
        if self._stop_code:
            return
        row = self.recorder.validation(self.progress.step, loss, tokens, self.validation.samples)
        for hook in self.hooks.on_validation:
            hook(row)
        if self.sample is not None:
            self.doing = f"sampling after step {self.progress.step}"
            self.recorder.sample(self.progress.step, *self.sample())

    def _summed_loss(self, batches: ValidationBatches) -> float:
        """The sum of the losses of all batches, or of the batches before the ranks agreed to stop."""
        _set_training(self.stages, False)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for batch in batches:
            total += self.step.pipeline.evaluate([microbatch.to(self.mesh.device) for microbatch in batch])
            own = torch.tensor(self.stop.code, dtype=torch.float64, device=self.mesh.device)
            self._stop_code = float(all_reduce(own, self.mesh.world, "max"))
            if self._stop_code:
                break
        _set_training(self.stages, True)
        return float(total)

    def _checkpoint(self) -> None:
        if self._saved == self.progress.step:
            return
        self.doing, self._saved = f"saving step {self.progress.step}", self.progress.step
        self._published(self.manager.save(self.progress.step, self.state()))

    def _published(self, checkpoints: list[PublishedCheckpoint]) -> None:
        """Report complete checkpoints; every rank does so after the same step."""
        for saved in checkpoints:
            self.recorder.checkpoint(saved.step, saved.path, saved.seconds, saved.write_seconds)
            for hook in self.hooks.on_checkpoint:
                hook(saved.step, saved.path)

    def _diverged(self) -> RunResult:
        reason = f"non-finite loss or gradient in step {self.progress.step + 1}{self._origin.text}"
        return self._end("diverged", reason, self._origin)

    def _end(self, status: str, reason: str | None, origin: NonfiniteOrigin | None = None) -> RunResult:
        self.doing = "ending"
        self._published(self.manager.wait())
        rank, coordinates = (None, None) if origin is None else (origin.rank, origin.coordinates)
        result = RunResult(
            status, self.progress.step, self._loss, self.folder, reason, rank=rank, coordinates=coordinates
        )
        self.recorder.end(result)
        return result


def _set_training(stages: Sequence[nn.Module], mode: bool) -> None:
    for stage in stages:
        stage.train(mode)
