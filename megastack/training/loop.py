"""The loop around the step: when to validate, save, report and stop. It knows nothing of the layout.

Everything it uses comes in built. All ranks run it alike; only the one with a :class:`Recorder` that records writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from megastack.checkpoint.items import State
from megastack.checkpoint.saver import Saved, Saver
from megastack.comm.collectives import all_reduce
from megastack.data.validation import ValidationBatches
from megastack.mesh.mesh import Mesh
from megastack.observe.memory import peak_memory_bytes
from megastack.training.hooks import Hooks
from megastack.training.report import Recorder, Spent
from megastack.training.signals import StopRequest, describe_stop
from megastack.training.state import Progress, RunResult
from megastack.training.step import StepOutcome, TrainStep


@dataclass(frozen=True)
class LoopOptions:
    """When to do what; steps are 1-based counts of completed optimizer steps."""

    steps: int
    samples_per_step: int
    validate_every: int = 0
    save_every: int | None = None
    save_at_end: bool = True
    skip_nonfinite: bool = False
    dump_steps: Sequence[int] = ()


@dataclass
class Loop:
    """A run from its current progress to its last step.

    Attributes:
        saver: writes checkpoints, at once or while training goes on.
        state: what a checkpoint of the current progress holds.
        dump: called with a step's number, twice: with its gradients ready, and after its update.
        sample: a prompt, and how the current weights go on with it.
        doing: what this rank is busy with, for reports about a failure.
    """

    options: LoopOptions
    mesh: Mesh
    step: TrainStep
    stages: Sequence[nn.Module]
    progress: Progress
    recorder: Recorder
    stop: StopRequest
    folder: Path
    saver: Saver
    state: Callable[[], State]
    dump: Callable[[int, str], None]
    validation: ValidationBatches | None = None
    hooks: Hooks = field(default_factory=Hooks)
    sample: Callable[[], tuple[str, str]] | None = None
    doing: str = "starting"
    _loss: float | None = None
    _saved: int = -1
    _validated: int = -1

    def run(self) -> RunResult:
        """Train until the last step, a request to stop, or a loss that is not finite."""
        self._saved = self.progress.step if self.progress.step else -1
        self.recorder.start(self.progress.step)
        reason, _ = self._agree()
        while self.progress.step < self.options.steps and not reason:
            began = time.perf_counter()
            outcome = self._train_step()
            reason, memory = self._agree()
            if not self._report(outcome, Spent(time.perf_counter() - began, memory)):
                return self._end("diverged", f"non-finite loss or gradient in step {self.progress.step + 1}")
            self._every(self.options.validate_every, self._validate)
            self._every(self.options.save_every or 0, self._checkpoint)
        if reason and self.progress.step < self.options.steps:
            self._checkpoint()
            return self._end("preempted", describe_stop(reason))
        self._validate()
        if self.options.save_at_end:
            self._checkpoint()
        return self._end("completed", None)

    def _train_step(self) -> StepOutcome:
        number = self.progress.step + 1
        self.doing = f"training step {number}"
        self.mesh.ledger.reset()
        wanted = number in self.options.dump_steps
        outcome = self.step(self.progress.step, (lambda: self.dump(number, "gradients")) if wanted else None)
        if wanted:
            self.dump(number, "weights")
        return outcome

    def _agree(self) -> tuple[float, int]:
        """The strongest request to stop and the highest peak of memory over all ranks; reports what all have saved."""
        memory = float(peak_memory_bytes(self.mesh.device))
        own = torch.tensor([self.stop.code, memory, float(self.saver.busy)], dtype=torch.float64)
        code, memory, busy = all_reduce(own.to(self.mesh.device), self.mesh.world, "max").tolist()
        if not busy:
            self._published(self.saver.settle())
        return code, int(memory)

    def _report(self, outcome: StepOutcome, spent: Spent) -> bool:
        """Count the step and write its row; False, and nothing counted, where the run is to end here."""
        loss, norm = float(outcome.loss), float(outcome.grad_norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if not finite:
            self.recorder.event(self.progress.step + 1, "nonfinite", loss=repr(loss), grad_norm=repr(norm))
            overflow = math.isfinite(loss) and self.step.loss_scale.may_overflow(outcome.loss_scale)
            if not overflow and not self.options.skip_nonfinite:
                return False
        self.progress.step += 1
        self.progress.skipped += not finite
        self.progress.consumed_tokens += outcome.tokens
        self.progress.consumed_samples += self.options.samples_per_step
        self._loss = loss if math.isfinite(loss) else None
        row = self.recorder.train(self.progress, outcome, (loss, norm), spent, self.mesh.ledger)
        for hook in self.hooks.on_step:
            hook(row)
        return True

    def _every(self, period: int, action: Callable[[], None]) -> None:
        if period and self.progress.step % period == 0 and self.progress.step < self.options.steps:
            action()

    def _validate(self) -> None:
        """Score the validation split with the current weights, without dropout; once for each step at most."""
        if self.validation is None or not self.validation.samples or self._validated == self.progress.step:
            return
        self.doing, self._validated = f"validation after step {self.progress.step}", self.progress.step
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        _set_training(self.stages, False)
        for batch in self.validation:
            total += self.step.pipeline.evaluate([microbatch.to(self.mesh.device) for microbatch in batch])
        _set_training(self.stages, True)
        tokens = self.validation.valid_tokens
        row = self.recorder.validation(self.progress.step, float(total) / tokens, tokens, self.validation.samples)
        for hook in self.hooks.on_validation:
            hook(row)
        if self.sample is not None:
            self.doing = f"sampling after step {self.progress.step}"
            self.recorder.sample(self.progress.step, *self.sample())

    def _checkpoint(self) -> None:
        if self._saved == self.progress.step:
            return
        self.doing, self._saved = f"saving step {self.progress.step}", self.progress.step
        self._published(self.saver.save(self.progress.step, self.state()))

    def _published(self, checkpoints: list[Saved]) -> None:
        """Report checkpoints that are whole; every rank does so after the same step."""
        for saved in checkpoints:
            self.recorder.checkpoint(saved.step, saved.path, saved.seconds, saved.write_seconds)
            for hook in self.hooks.on_checkpoint:
                hook(saved.step, saved.path)

    def _end(self, status: str, reason: str | None) -> RunResult:
        self.doing = "ending"
        self._published(self.saver.settle())
        result = RunResult(status, self.progress.step, self._loss, self.folder, reason)
        self.recorder.end(result)
        return result


def _set_training(stages: Sequence[nn.Module], mode: bool) -> None:
    for stage in stages:
        stage.train(mode)
