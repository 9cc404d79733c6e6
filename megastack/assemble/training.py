"""The components of training on one rank: model, data, gradients, optimizer, training step and validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megastack.assemble.data import build_loader, identity, read_dataset
from megastack.assemble.inference import build_generator
from megastack.assemble.optimizer import build_gradients, learning_rate, loss_scale, optimizer_options
from megastack.assemble.stages import build_stages, compile_stages
from megastack.checkpoint.load import load
from megastack.checkpoint.state import (
    State,
    StateItem,
    box_items,
    buffer_items,
    items_of,
    optimizer_items,
    stage_placements,
)
from megastack.config.convert import to_plain
from megastack.config.schema import TrainConfig
from megastack.data.blend_weights import History
from megastack.data.dataset import Dataset
from megastack.data.loader import Loader
from megastack.data.phases import BlendHistories, PhasedLoader, initial_histories, phase_orders
from megastack.data.resume import restored_histories, resume_errors
from megastack.data.validation import ValidationBatches
from megastack.errors import CheckpointError
from megastack.inference.generate import Generator
from megastack.layers.attention_kernels import KernelChoice
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.decoder import Decoder
from megastack.models.stages import configured_schedule
from megastack.optim.optimizer import build_optimizer
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedule import Schedule
from megastack.training.state import Progress
from megastack.training.step import TrainStep

STARTS = "optimizer_starts"
"""Key in the trainer state: for each parameter, the number of updates before it was first trained, if any."""


@dataclass
class Training:
    """The components of training on one rank."""

    config: TrainConfig
    mesh: Mesh
    schedule: Schedule
    stages: list[Decoder]
    step: TrainStep
    progress: Progress
    dataset: Dataset
    validation: ValidationBatches
    histories: BlendHistories

    @property
    def blend(self) -> History:
        """Blend weights of the first data phase so far; empty without a blend."""
        return self.histories[0]

    @property
    def attention_kernel(self) -> KernelChoice:
        """The kernel of the built-in attention layer for this run's microbatches."""
        batch, data = self.config.batch, self.config.data
        documents = data.pack and data.document_mask
        return self.stages[0].attention_kernel(batch.micro_size, batch.sequence_length, documents=documents)

    def state(self) -> State:
        """Return weights, moments and progress as checkpoint items; the tensors are views of the live ones."""
        placements = stage_placements(self.stages)
        optimizer = self.step.optimizer
        kinds = optimizer.moments() | (
            {"master": main_parameters} if (main_parameters := optimizer.main_parameters()) else {}
        )
        scalars = {"optim/step": optimizer.steps}
        scalars |= {f"loss_scale/{name}": x for name, x in self.step.loss_scale.state().items()}
        items = [
            *self.weight_items(),
            *optimizer_items(kinds, placements, self.mesh),
            *(StateItem.replicated(name, x) for name, x in scalars.items()),
        ]
        described = {"config": to_plain(self.config)} | identity(self.config, self.dataset, self.histories)
        trainer = self.progress.as_json() | described
        return State(items, trainer | ({STARTS: optimizer.starts} if optimizer.starts else {}))

    def weight_items(self) -> list[StateItem]:
        """Return weights and persistent buffers as checkpoint items, after pending parameter gathers."""
        self.step.buckets.wait_parameters()
        placements = stage_placements(self.stages)
        weights = box_items("model", self.step.buckets.weights(), placements, self.mesh)
        return [*weights, *buffer_items(self.stages, self.mesh)]

    def gradient_items(self) -> list[StateItem]:
        """Return the reduced gradients as checkpoint items."""
        placements = stage_placements(self.stages)
        return items_of("gradients", self.step.buckets.named_gradients(), placements, self.mesh)

    def generator(self) -> Generator:
        """Build a generator that continues prompts with the current weights; called on all ranks, between steps."""
        self.step.buckets.wait_parameters()
        return build_generator(self.config, self.mesh, self.stages, self.schedule)

    def restore(self, path: Path) -> None:
        """Restore weights, moments and progress from a checkpoint.

        With ``checkpoint.strict=false``, a parameter without moments in the checkpoint starts as in a new run.

        Raises:
            CheckpointError: the checkpoint does not fit, or its seed, data or batch differ from this run's.
        """
        state = self.state()
        report = load(path, state, self.mesh, strict=self.config.checkpoint.strict)
        self._restore_optimizer(report.missing, state.trainer.get(STARTS, {}))
        if errors := resume_errors(state.trainer, identity(self.config, self.dataset)):
            raise CheckpointError("\n".join([f"resume={path}: would not continue the same run", *errors]))
        self.progress.__dict__.update(Progress.from_json(state.trainer).__dict__)
        global_size, loader = self.config.batch.global_size, self.step.loader
        self.histories = restored_histories(self.dataset, state.trainer, global_size)
        orders = phase_orders(self.dataset, self.config.seed, self.histories, global_size)
        for part, order in zip(loader.loaders if isinstance(loader, PhasedLoader) else [loader], orders, strict=True):
            part.order = order

    def _restore_optimizer(self, missing: Sequence[str], starts: Mapping[str, int]) -> None:
        """Restore step counts and main parameters after a load; ``missing`` is identical on all ranks."""
        optimizer = self.step.optimizer
        steps = int(optimizer.steps)
        fresh = {name for kind in optimizer.kinds for name in _after(f"optim/{kind}/", missing)}
        started = {**starts, **dict.fromkeys(sorted(fresh), steps)}
        optimizer.load_steps(steps, {name: start for name, start in started.items() if start})
        optimizer.copy_model_to_main(set(_after("optim/master/", missing)) - set(_after("model/", missing)))
        optimizer.copy_main_to_model()

    def load_weights(self, path: Path) -> None:
        """Load only the weights of a checkpoint, in the dtypes of this run; everything else starts as in a new run."""
        load(path, self.state(), self.mesh, strict=self.config.checkpoint.strict, weights_only=True, cast=True)
        self.step.optimizer.copy_model_to_main()


def build_training(config: TrainConfig, mesh: Mesh, dataset: Dataset | None = None) -> Training:
    """Build the components of training; communicates only to create process groups and to agree on names.

    Args:
        config: a valid configuration.
        mesh: the mesh.
        dataset: the data of the configuration, if already read.
    """
    schedule = configured_schedule(config, mesh.shape)
    stages = build_stages(config, mesh, schedule)
    if config.compile:
        compile_stages(stages, mesh, schedule)
    buckets = build_gradients(config, stages, mesh)
    dataset = dataset or read_dataset(config)
    histories = initial_histories(dataset, config.batch.global_size)
    loader, validation = _batches(config, mesh, dataset, histories)
    step = TrainStep(
        mesh=mesh,
        loader=loader,
        pipeline=Pipeline(stages, schedule, mesh, on_last_backward=buckets.mark_last_backward),
        buckets=buckets,
        optimizer=build_optimizer(buckets, optimizer_options(config)),
        learning_rate=learning_rate(config),
        clip_norm=config.optim.clip_norm,
        loss_scale=loss_scale(config, mesh),
    )
    return Training(config, mesh, schedule, stages, step, Progress(), dataset, validation, histories)


def _batches(
    config: TrainConfig, mesh: Mesh, dataset: Dataset, histories: BlendHistories
) -> tuple[Loader | PhasedLoader, ValidationBatches]:
    """Build the training and validation batches of this data-parallel rank."""
    dp = mesh[Axis.DP]
    batch = {
        "micro_size": config.batch.micro_size,
        "dp_rank": dp.rank,
        "dp_size": dp.size,
        "vocab": config.model.vocab,
    }
    loader = build_loader(config, dataset, histories, batch)
    validation = ValidationBatches(
        dataset.validation.samples, microbatches=loader.microbatches, limit=config.run.validate_samples, **batch
    )
    return loader, validation


def _after(prefix: str, names: Sequence[str]) -> list[str]:
    """Return the names with a prefix, without the prefix."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
