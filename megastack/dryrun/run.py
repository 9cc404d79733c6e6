"""One rank of a job in this process: the code of a worker, without peers, device and data.

:func:`rank_alone` builds a rank with :func:`megastack.assemble.training.build_training`, as a worker does, on the
device of :mod:`megastack.dryrun.device` and in a world whose other ranks do not exist. Its steps, validation,
generation and checkpoint copy then run as they are. Layout, schedule, ZeRO level, precision and recomputation are those
of the configuration, at any size: nothing is allocated and no kernel runs, so the time depends on the number of
operations.

:func:`dry_run` runs two steps of a rank and returns its kernels, traffic and bytes. A host read or a mixture of devices
raises :class:`~megastack.dryrun.device.DryRunError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from megastack.assemble.training import Training, build_training
from megastack.checkpoint.asynchronous import StagingBuffer
from megastack.comm.backend import Gloo, backend_choice
from megastack.comm.observer import RankObserver
from megastack.comm.peers import answered_by
from megastack.comm.traffic import Ledger, Traffic
from megastack.config.convert import replace_values
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset, Source, Split
from megastack.data.packing import PackedSamples, SingleSamples
from megastack.data.stream import TokenStream
from megastack.dryrun.device import DEVICE, ImmediateStreams, ShapeDevice
from megastack.dryrun.peers import DerivedPeers
from megastack.errors import MeshError
from megastack.layers.kernels import KernelChoice, kernel_choice
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.stages import configured_schedule
from megastack.pipeline.action import Action, Op
from megastack.torch_private import without_data, world_without_peers
from megastack.training.step import StepOutcome

MESSAGES = "messages"
COMPUTATIONS = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weight gradients"}
"""The phase of each computation of a schedule."""
ACTION_PHASES = frozenset({*COMPUTATIONS.values(), MESSAGES})
"""The phases of the actions of a schedule."""


@dataclass(frozen=True)
class Counts:
    """What a part of a run does on one rank.

    Attributes:
        kernels: kernels by phase (``zero``, ``forward``, ``backward``, ``reduce``, ``clip``, ``optimizer``, …) and
            operator.
        traffic: the communication by axis and operation, as in a run.
        host_reads: host reads by place (:data:`megastack.dryrun.host_reads.ALLOWED_READS`).
        peak_bytes: the most bytes that tensors of the device held at once. Sent tensors are held to the end of the
            step, as on a device that runs far behind the host.
    """

    kernels: Mapping[tuple[str, str], int]
    traffic: Mapping[tuple[str, str], Traffic]
    host_reads: Mapping[str, int]
    peak_bytes: int

    def kernels_of(self, phase: str) -> int:
        """The number of kernels of a phase."""
        return sum(count for (where, _), count in self.kernels.items() if where == phase)


@dataclass(frozen=True)
class DryRun:
    """The result of :func:`dry_run`.

    Attributes:
        coordinates: the rank's coordinate on every axis.
        built_bytes: the bytes that tensors of the device hold before the first step.
        first_step: the first step, in which stages exchange tensor specs.
        step: every later step.
    """

    coordinates: Mapping[Axis, int]
    built_bytes: int
    first_step: Counts
    step: Counts


_SAMPLES = 8


def placeholder_dataset(config: TrainConfig) -> Dataset:
    """A few samples of ``batch.sequence_length``; with document masks, most rows contain the end of a document."""
    data, size = config.data, config.batch.sequence_length
    length = _SAMPLES * size + 1
    starts = np.arange(0, length, size + 1 if not data.pack else 2 * size // 3 + 1, dtype=np.int64)
    stream = TokenStream(np.zeros(length, dtype=np.uint8), starts)
    samples = (
        PackedSamples(stream, size, document_mask=data.document_mask) if data.pack else SingleSamples(stream, size)
    )
    split = Split(stream, samples)
    return Dataset((Source(split, split),), config.model.vocab, data.pack, data.document_mask, data.validation_fraction)


class DryRank:
    """One rank of a job, built by :func:`rank_alone`.

    Attributes:
        training: the components of training, as in a worker.
        device: the device, with its counters.
        peers: what answers for the other ranks.
    """

    def __init__(self, training: Training, device: ShapeDevice, peers: DerivedPeers) -> None:
        self.training, self.device, self.peers = training, device, peers
        step = training.step
        self._enter_phase("zero", step.buckets, "zero_")
        self._enter_phase("reduce", step.buckets, "finish")
        self._enter_phase("optimizer", step.optimizer, "step")
        self._enter_phase("loss scale", step.loss_scale, "update")

    def step(self, number: int) -> tuple[StepOutcome, Counts]:
        """Run the 0-based step; the tensors of the outcome have no data."""
        return self._counted("microbatches", lambda: self.training.step(number, lambda: self._set_phase("clip")))

    def validate(self) -> tuple[Tensor, Counts]:
        """Evaluate the first batch of the validation split; returns the sum of its losses, without data."""
        training = self.training
        for stage in training.stages:
            stage.eval()
        batch = [microbatch.to(training.mesh.device) for microbatch in next(iter(training.validation))]
        result = self._counted("microbatches", lambda: training.step.pipeline.evaluate(batch))
        for stage in training.stages:
            stage.train()
        return result

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[Any], Counts]:
        """Continue prompts; every chosen id is 0."""
        self.peers.generates = True
        try:
            generator = self.training.generator()
            return self._counted("forward", lambda: generator(prompts, max_new_tokens=new_tokens))
        finally:
            self.peers.generates = False

    def stage_checkpoint(self) -> tuple[list[Tensor], Counts]:
        """Copy the whole state of the rank to the host, as an asynchronous save does with the boxes it writes."""
        tensors = [tensor for item in self.training.state().items for _, tensor in item.boxes]
        return self._counted("checkpoint", lambda: StagingBuffer().copy(tensors))

    def _set_phase(self, phase: str) -> None:
        self.device.phase = phase

    def _enter_phase(self, phase: str, owner: Any, method: str) -> None:
        """Set the phase whenever a method of an object is called."""
        original = getattr(owner, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._set_phase(phase)
            return original(*args, **kwargs)

        setattr(owner, method, run)

    def _counted(self, phase: str, run: Callable[[], Any]) -> tuple[Any, Counts]:
        device, ledger = self.device, self.training.mesh.ledger
        device.kernels.clear()
        device.reads.clear()
        device.memory.reset_peak()
        ledger.reset()
        self._set_phase(phase)
        result = run()
        counts = Counts(Counter(device.kernels), ledger.records(), Counter(device.reads), device.memory.peak)
        return result, counts


class _Observer(RankObserver):
    """Sets the phase of the device when an action begins."""

    def __init__(self, device: ShapeDevice) -> None:
        super().__init__()
        record = self.on_action

        def on_action(action: Any) -> None:
            device.phase = COMPUTATIONS.get(action.op, MESSAGES) if isinstance(action, Action) else device.phase
            record(action)

        self.on_action = on_action

    def describe(self, phase: str) -> str:
        """The layer and the action that are running, or the phase outside of the schedule."""
        recorder = self.flight_recorder
        if phase not in ACTION_PHASES:
            return phase
        return " of ".join(filter(None, (recorder.layer, f"action {recorder.actions[-1]}")))


@contextmanager
def rank_alone(
    config: TrainConfig, rank: int, *, kernels: KernelChoice = "device", dataset: Dataset | None = None
) -> Iterator[DryRank]:
    """Context manager with one rank of a job; every tensor of its device is without data.

    Args:
        config: a valid configuration; its device is ignored.
        rank: the rank, below the world size of the configuration.
        kernels: whether layers and collectives choose their implementations for a GPU or for the CPU.
        dataset: the data; by default placeholders of the same shapes.

    Raises:
        MeshError: there is no such rank, or this process already has a process group.
        DryRunError: building the rank reads a tensor on the host, or mixes devices.
    """
    shape = mesh_shape(config)
    if not 0 <= rank < shape.world_size:
        raise MeshError(f"rank={rank}: {shape} has the ranks 0 … {shape.world_size - 1}")
    device = ShapeDevice(lambda phase: observer.describe(phase))
    observer = _Observer(device)
    with ExitStack() as stack:
        stack.enter_context(world_without_peers(rank, shape.world_size) if shape.world_size > 1 else nullcontext())
        stack.enter_context(kernel_choice(kernels))
        stack.enter_context(backend_choice(Gloo()) if kernels == "cpu" else nullcontext())
        stack.enter_context(without_data(ImmediateStreams()))
        stack.enter_context(device)
        mesh = Mesh.from_environment(shape, device=str(DEVICE), observer=observer)

        @contextmanager
        def aside() -> Iterator[None]:
            ledger, observer.ledger = observer.ledger, Ledger()
            with device.uncounted():
                yield
            observer.ledger = ledger

        peers = DerivedPeers(config, mesh, configured_schedule(config, shape), aside)
        stack.enter_context(answered_by(peers))
        config = replace_values(config, {"compile": False})  # a compiled block would not show its operations
        training = build_training(config, mesh, dataset or placeholder_dataset(config))
        device.names = {x: name for stage in training.stages for name, x in stage.named_modules() if name}
        yield DryRank(training, device, peers)


def dry_run(config: TrainConfig, rank: int) -> DryRun:
    """Build a rank and run two steps, without its peers, its device and its data.

    Args:
        config: a valid configuration.
        rank: the rank.

    Raises:
        MeshError: there is no such rank, or this process already has a process group.
        DryRunError: the rank reads a tensor on the host, or mixes devices.
    """
    with rank_alone(config, rank) as alone:
        built = alone.device.memory.live
        (_, first), (_, later) = alone.step(0), alone.step(1)
        return DryRun(alone.training.mesh.coordinates, built, first, later)
