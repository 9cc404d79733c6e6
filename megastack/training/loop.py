"""The training loop: when to validate, save, report and stop. It is independent of the parallel layout.

Its parts are built elsewhere. Every rank runs the same loop, and only the rank whose :class:`Recorder` records writes.

On a GPU the loop *runs ahead*: it launches the next step before it reads the results of the previous one, so that the
device always has work while the host reads, reports and writes. Before a validation, a save, a dump, the end or a stop,
all launched steps are completed, so none of these sees a step whose results are unknown. A non-finite step makes the
steps launched after it change nothing (:attr:`TrainStep.held`). They are discarded, and launched again if the run
continues. On the CPU every operation blocks the host, and each step is completed before the next one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from megastack.checkpoint.manager import CheckpointManager, PublishedCheckpoint
from megastack.checkpoint.state import State
from megastack.comm.collectives import all_reduce
from megastack.comm.traffic import Ledger
from megastack.comm.transfers import copy_to_device
from megastack.data.validation import ValidationBatches
from megastack.mesh.mesh import Mesh
from megastack.observe.devices import LargestMemory, device_memory
from megastack.placement.buffers import persistent_buffers
from megastack.training.agreement import InputAgreement, StepInputs
from megastack.training.host_reads import STEP, VALIDATION_LOSS, VALIDATION_STOP, HostRead, default_steps_ahead
from megastack.training.nonfinite import NonfiniteOrigin, locate_nonfinite
from megastack.training.report import Recorder, StepCost, StepResults
from megastack.training.signals import StopRequest, describe_stop
from megastack.training.state import Hooks, Progress, Row, RunResult, nothing_to_train
from megastack.training.step import StepOutcome, TrainStep

FINISHING_S = 5.0
"""How long a failed rank waits for the results of a launched step, to write its row."""

_AGREED = 4 + InputAgreement.CONTRIBUTIONS
"""The number of values in :meth:`Loop._start_agreement`."""


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
    profile_steps: Sequence[int] = ()


@dataclass(frozen=True)
class _InFlight:
    """A launched step, 0-based, whose results have not been read.

    Attributes:
        results: what the ranks agreed on after the step, then those of its results that exist.
        buffers: persistent buffers and their values before the step.
    """

    step: int
    outcome: StepOutcome
    results: HostRead
    began: float
    ledger: Ledger
    buffers: Sequence[tuple[Tensor, Tensor]]

    def read(self) -> tuple[list[float], StepResults]:
        """What the ranks agreed on, and the results; blocks until the step is complete."""
        values = self.results.values()
        given, found = (self.outcome.loss, self.outcome.grad_norm, self.outcome.loss_scale), iter(values[_AGREED:])
        return values[:_AGREED], StepResults(*(None if x is None else next(found) for x in given))


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
        steps_ahead: how many steps are launched before the results of the oldest one are read; by default
            :func:`~megastack.training.host_reads.default_steps_ahead`.
        profiled: a context manager around the 1-based step, which writes its profile if it is selected.
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
    steps_ahead: int | None = None
    profiled: Callable[[int], AbstractContextManager[object]] = nullcontext
    _loss: float | None = None
    _saved: int = -1
    _validated: int = -1
    _reason: float = 0.0
    _stop_code: float = 0.0
    _completed_at: float = 0.0
    _origin: NonfiniteOrigin = field(default_factory=lambda: NonfiniteOrigin(""))

    def __post_init__(self) -> None:
        validation = self.validation
        self._validation_size = (validation.samples, validation.valid_tokens) if validation is not None else (0, 0)
        self._recorded = {*self.options.dump_steps, *self.options.profile_steps}
        self._in_flight: deque[_InFlight] = deque()
        self._inputs = InputAgreement(self._step_inputs, self.mesh)
        device, ahead = self.mesh.device, self.steps_ahead
        self._ahead = default_steps_ahead(device) if ahead is None else ahead
        self.step.held = torch.zeros((), dtype=torch.bool, device=device) if self._ahead else None

    def run(self) -> RunResult:
        """Train until the last step, a request to stop, or a loss that is not finite."""
        self._saved, done = self.progress.step if self.progress.step else -1, self.progress.step
        self.recorder.start(self.progress.step)
        self._agree_on_first_steps()
        while self._launched < self.options.steps and not self._reason:
            self._launch()
            while self._in_flight and (len(self._in_flight) > self._ahead or self._must_complete()):
                if not self._complete():
                    return self._diverged()
        unfinished = self.progress.step < self.options.steps
        if not unfinished:
            self._validate()
        if unfinished or self._stop_code:
            self._checkpoint()
            return self._end("preempted", describe_stop(self._reason or self._stop_code))
        if self.options.save_at_end:
            self._checkpoint()
        idle = done >= self.options.steps
        return self._end("completed", nothing_to_train(done, self.options.steps) if idle else None)

    @property
    def _launched(self) -> int:
        """The number of steps launched since the beginning of training."""
        return self.progress.step + len(self._in_flight)

    def _must_complete(self) -> bool:
        """Whether the launched steps must be completed before another one is launched."""
        options, launched = self.options, self._launched
        return (
            launched >= options.steps
            or bool(self._reason)
            or self._inputs.has_error(launched)
            or any(period and launched % period == 0 for period in (options.validate_every, options.save_every))
            or any(step in self._recorded for step in (launched, launched + 1))
            or launched in self.recorder.phases
        )

    def _launch(self) -> None:
        """Launch the next step and the agreement after it, without reading any of their results."""
        began, step = time.perf_counter(), self._launched
        self.doing = f"training step {step + 1}"
        try:
            self._inputs.require(step)
            self.recorder.step(step)
            self.mesh.ledger.reset()
            buffers = self._buffers()
            with self.profiled(step + 1):
                outcome = self._train_step(step)
            agreed = self._start_agreement(step + 1 + self._ahead)
        except BaseException:
            with suppress(Exception):  # the device or the disk may be what failed
                self._report_finished()
            raise
        results = [x.view(1).double() for x in (outcome.loss, outcome.grad_norm, outcome.loss_scale) if x is not None]
        read = HostRead(STEP, torch.cat([agreed, *results]))
        self._in_flight.append(_InFlight(step, outcome, read, began, self.mesh.ledger.copy(), buffers))

    def _train_step(self, step: int) -> StepOutcome:
        number = step + 1
        if number not in self.options.dump_steps:
            return self.step(step)
        outcome = self.step(step, lambda: self.dump(number, "gradients"))
        self.dump(number, "weights")
        return outcome

    def _complete(self) -> bool:
        """Read the results of the oldest launched step and act on them. Returns False if the run must end here."""
        launched = self._in_flight.popleft()
        agreed, results = launched.read()
        self.mesh.flight_recorder.settle()
        self._apply(agreed, launched.step + 1 + self._ahead)
        now = time.perf_counter()
        cost, self._completed_at = StepCost(now - max(launched.began, self._completed_at), self._memory(agreed)), now
        if not self._report(launched, results, cost):
            return False
        self._every(self.options.validate_every, self._validate)
        self._reason = self._reason or self._stop_code
        self._every(self.options.save_every or 0, self._checkpoint)
        return True

    def _report_finished(self) -> None:
        """After an error of this rank alone: write the rows of finite steps that were launched before it."""
        while self._in_flight and self._in_flight[0].results.ready(FINISHING_S):
            launched = self._in_flight.popleft()
            agreed, results = launched.read()
            if not _is_finite(results):
                return
            seconds = time.perf_counter() - max(launched.began, self._completed_at)
            self._count(launched, results, StepCost(seconds, self._memory(agreed)), skipped=results.loss is None)

    # What the ranks agree on after each step.

    def _agree_on_first_steps(self) -> None:
        """Agree on the inputs of the steps that are launched before the results of any step are read."""
        for step in range(self.progress.step, self.progress.step + self._ahead + 1):
            self._apply(HostRead(STEP, self._start_agreement(step)).values(), step)
            if not self._inputs.has_error(step):
                self.recorder.read_ahead_s += self.step.prepare(step).seconds

    def _start_agreement(self, step: int) -> Tensor:
        """Start to agree on this rank's state and on the inputs of a 0-based step."""
        mesh = self.mesh
        memory = LargestMemory.contribution(device_memory(mesh.device), mesh.rank, mesh.shape.world_size)
        flags = [self.stop.code, float(self.manager.busy)]
        own = torch.tensor([*flags, *memory, *self._inputs.contribution(step)], dtype=torch.float64)
        (own,) = copy_to_device([own], mesh.device)
        return all_reduce(own, mesh.world, "max")

    def _memory(self, agreed: Sequence[float]) -> LargestMemory:
        """The highest peak memory of the ranks, from an agreement."""
        return LargestMemory.of(agreed[2:4], self.mesh.shape.world_size)

    def _apply(self, agreed: Sequence[float], step: int) -> None:
        """Act on an agreement about a 0-based step, and report checkpoints that all ranks have finished."""
        code, busy, _, _, *inputs = agreed
        self._reason = self._reason or code
        self._inputs.agreed(step, inputs)
        if not busy:
            self._published(self.manager.wait())

    def _step_inputs(self, step: int) -> StepInputs:
        data = self.step.prepare(step)
        return StepInputs.of(step + 1, data.microbatches, data.tokens, self._validation_size)

    # The results of a step.

    def _report(self, launched: _InFlight, results: StepResults, cost: StepCost) -> bool:
        """Count the step and write its row. Returns False without counting if the run must end here."""
        if results.loss is None:
            self.recorder.no_labels(launched.step + 1)
            self._count(launched, results, cost, skipped=True, hooks=self.hooks.on_step)
            return True
        finite = _is_finite(results)
        overflow = not finite and math.isfinite(results.loss) and self.step.loss_scale.may_overflow(results.loss_scale)
        counted = finite or overflow or self.options.skip_nonfinite
        if counted:
            self._count(launched, results, cost, skipped=not finite, hooks=self.hooks.on_step)
        if not finite:
            self._origin = NonfiniteOrigin("") if overflow else self._locate(launched)
            self.recorder.nonfinite(launched.step + 1, results, self._origin)
        return counted

    def _locate(self, launched: _InFlight) -> NonfiniteOrigin:
        """Locate the origin of a non-finite value, after discarding the steps launched later."""
        discarded = self._in_flight.popleft() if self._in_flight else None
        self._in_flight.clear()
        if discarded is not None:
            self.step.replay(launched.step, launched.outcome.loss_scale)
            for buffer, before in discarded.buffers:
                buffer.copy_(before)
        if self.step.held is not None:
            self.step.held.zero_()
        return locate_nonfinite(self.step, self.stages, launched.step)

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Persistent buffers and copies of them, if the next step may be discarded and launched again."""
        if not self._ahead or not self.options.skip_nonfinite:
            return []
        return [(x, x.clone()) for stage in self.stages for x in persistent_buffers(stage).values()]

    def _count(
        self,
        launched: _InFlight,
        results: StepResults,
        cost: StepCost,
        *,
        skipped: bool,
        hooks: Sequence[Callable[[Row], None]] = (),
    ) -> None:
        self.progress.step += 1
        self.progress.skipped += skipped
        self.progress.consumed_tokens += launched.outcome.tokens
        self.progress.consumed_samples += self.options.samples_per_step
        if results.loss is not None:
            self._loss = results.loss if math.isfinite(results.loss) else None
        row = self.recorder.train(self.progress, launched.outcome, results, cost, launched.ledger)
        for hook in hooks:
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
        total = torch.zeros((1,), dtype=torch.float64, device=self.mesh.device)
        stops: deque[HostRead] = deque()
        for batch in batches:
            total += self.step.pipeline.evaluate(self.step.to_device(batch))
            own = torch.full((1,), self.stop.code, dtype=torch.float64, device=self.mesh.device)
            stops.append(HostRead(VALIDATION_STOP, all_reduce(own, self.mesh.world, "max")))
            if self._stop_requested(stops, unread=self._ahead):
                break
        self._stop_requested(stops, unread=0)
        _set_training(self.stages, True)
        return HostRead(VALIDATION_LOSS, total).values()[0]

    def _stop_requested(self, stops: deque[HostRead], *, unread: int) -> bool:
        """Whether the ranks agreed to stop, reading all but the ``unread`` newest agreements."""
        while len(stops) > unread:
            (code,) = stops.popleft().values()
            self._stop_code = self._stop_code or code
        return bool(self._stop_code)

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


def _is_finite(results: StepResults) -> bool:
    return all(x is None or math.isfinite(x) for x in (results.loss, results.grad_norm))
