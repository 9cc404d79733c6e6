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
from megastack.checkpoint.manager import CheckpointManager, Saved
from megastack.comm.collectives import all_reduce
from megastack.data.validation import ValidationBatches
from megastack.mesh.mesh import Mesh
from megastack.observe.devices import peak_memory_bytes
from megastack.training.agreement import Signature, are_different, fingerprints, require_alike, require_data
from megastack.training.hooks import Hooks
from megastack.training.nonfinite import Origin, locate
from megastack.training.report import Losses, Recorder, Spent
from megastack.training.signals import StopRequest, describe_stop
from megastack.training.state import Progress, RunResult, nothing_to_train
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
    saver: CheckpointManager
    state: Callable[[], State]
    dump: Callable[[int, str], None]
    validation: ValidationBatches | None = None
    hooks: Hooks = field(default_factory=Hooks)
    sample: Callable[[], tuple[str, str]] | None = None
    doing: str = "starting"
    _loss: float | None = None
    _saved: int = -1
    _validated: int = -1
    _asked: float = 0.0
    _unread: Exception | None = None
    _any_unread: float = 0.0
    _origin: Origin = field(default_factory=lambda: Origin(""))

    def __post_init__(self) -> None:
        validation = self.validation
        self._scored = (validation.samples, validation.valid_tokens) if validation is not None else (0, 0)

    def run(self) -> RunResult:
        """Train until the last step, a request to stop, or a loss that is not finite."""
        self._saved, done = self.progress.step if self.progress.step else -1, self.progress.step
        self.recorder.start(self.progress.step)
        reason, _ = self._agree(self.progress.step)
        while self.progress.step < self.options.steps and not reason:
            began = time.perf_counter()
            outcome = self._train_step()
            reason, memory = self._agree(self.progress.step + 1)
            if not self._report(outcome, Spent(time.perf_counter() - began, memory)):
                return self._diverged()
            self._every(self.options.validate_every, self._validate)
            reason = reason or self._asked
            self._every(self.options.save_every or 0, self._checkpoint)
        unfinished = self.progress.step < self.options.steps
        if not unfinished:
            self._validate()
        if unfinished or self._asked:
            self._checkpoint()
            return self._end("preempted", describe_stop(reason or self._asked))
        if self.options.save_at_end:
            self._checkpoint()
        idle = done >= self.options.steps
        return self._end("completed", nothing_to_train(done, self.options.steps) if idle else None)

    def _train_step(self) -> StepOutcome:
        number = self.progress.step + 1
        self.doing = f"training step {number}"
        if self._any_unread:
            require_data(self._unread, number, self.mesh)
        self.recorder.step(self.progress.step)
        self.mesh.ledger.reset()
        wanted = number in self.options.dump_steps
        outcome = self.step(self.progress.step, (lambda: self.dump(number, "gradients")) if wanted else None)
        if wanted:
            self.dump(number, "weights")
        return outcome

    def _agree(self, coming: int) -> tuple[float, int]:
        """The strongest request to stop and the highest peak of memory over all ranks; reports what all have saved.

        Also compares what the ranks bring to the 0-based step that is coming.
        """
        signature = self._signature(coming)
        flags = [self.stop.code, float(peak_memory_bytes(self.mesh.device)), self.saver.busy, self._unread is not None]
        own = torch.tensor([*map(float, flags), *fingerprints(signature)], dtype=torch.float64)
        reduced = all_reduce(own.to(self.mesh.device), self.mesh.world, "max").tolist()
        code, memory, busy, self._any_unread, most, least = reduced
        if are_different(most, least):
            require_alike(signature, self.mesh)
        if not busy:
            self._published(self.saver.settle())
        return code, int(memory)

    def _signature(self, step: int) -> Signature | None:
        """What this rank brings to a 0-based step; None, and the error kept, where it cannot read its data.

        The error is raised when it is the turn of the step, if that comes: what was trained before is reported,
        validated and saved first.
        """
        self._unread = None
        try:
            data = self.step.prepare(step)
        except Exception as error:
            self._unread = error
            return None
        return Signature.of(step + 1, data.microbatches, data.tokens, self._scored)

    def _report(self, outcome: StepOutcome, spent: Spent) -> bool:
        """Count the step and write its row; False, and nothing counted, where the run is to end here."""
        if outcome.loss is None or outcome.grad_norm is None:
            self.recorder.no_labels(self.progress.step + 1)
            self._count(outcome, (None, None), spent, skipped=True)
            return True
        number, loss, norm = self.progress.step, float(outcome.loss), float(outcome.grad_norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        overflow = not finite and math.isfinite(loss) and self.step.loss_scale.may_overflow(outcome.loss_scale)
        counted = finite or overflow or self.options.skip_nonfinite
        if counted:
            self._count(outcome, (loss, norm), spent, skipped=not finite)
        if not finite:
            self._origin = Origin("") if overflow else locate(self.step, self.stages, number)
            self.recorder.nonfinite(number + 1, (loss, norm), self._origin)
        return counted

    def _count(self, outcome: StepOutcome, losses: Losses, spent: Spent, *, skipped: bool) -> None:
        self.progress.step += 1
        self.progress.skipped += skipped
        self.progress.consumed_tokens += outcome.tokens
        self.progress.consumed_samples += self.options.samples_per_step
        if losses[0] is not None:
            self._loss = losses[0] if math.isfinite(losses[0]) else None
        row = self.recorder.train(self.progress, outcome, losses, spent, self.mesh.ledger)
        for hook in self.hooks.on_step:
            hook(row)

    def _every(self, period: int, action: Callable[[], None]) -> None:
        """Every ``period`` steps, the last step of the run included; an action is done once for each step."""
        if period and self.progress.step % period == 0:
            action()

    def _validate(self) -> None:
        """Score the validation split with the current weights, without dropout; once for each step at most.

        A request to stop ends it between two batches, on all ranks, and then there is no row.
        """
        if self.validation is None or not self.validation.samples or self._validated == self.progress.step:
            return
        self.doing, self._validated = f"validation after step {self.progress.step}", self.progress.step
        tokens = self.validation.valid_tokens
        loss = self._score(self.validation) / tokens if tokens else None
        if self._asked:
            return
        row = self.recorder.validation(self.progress.step, loss, tokens, self.validation.samples)
        for hook in self.hooks.on_validation:
            hook(row)
        if self.sample is not None:
            self.doing = f"sampling after step {self.progress.step}"
            self.recorder.sample(self.progress.step, *self.sample())

    def _score(self, batches: ValidationBatches) -> float:
        """The sum of the losses of all batches, or of those before the ranks agreed to stop."""
        _set_training(self.stages, False)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for batch in batches:
            total += self.step.pipeline.evaluate([microbatch.to(self.mesh.device) for microbatch in batch])
            own = torch.tensor(self.stop.code, dtype=torch.float64, device=self.mesh.device)
            self._asked = float(all_reduce(own, self.mesh.world, "max"))
            if self._asked:
                break
        _set_training(self.stages, True)
        return float(total)

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

    def _diverged(self) -> RunResult:
        reason = f"non-finite loss or gradient in step {self.progress.step + 1}{self._origin.text}"
        return self._end("diverged", reason, self._origin)

    def _end(self, status: str, reason: str | None, origin: Origin | None = None) -> RunResult:
        self.doing = "ending"
        self._published(self.saver.settle())
        rank, coordinates = (None, None) if origin is None else (origin.rank, origin.coordinates)
        result = RunResult(
            status, self.progress.step, self._loss, self.folder, reason, rank=rank, coordinates=coordinates
        )
        self.recorder.end(result)
        return result


def _set_training(stages: Sequence[nn.Module], mode: bool) -> None:
    for stage in stages:
        stage.train(mode)
