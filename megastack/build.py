"""The composition root: from a configuration and a mesh to a run that is ready to go.

This is the only file that sees configuration, mesh, model and parallel code together. It decides nothing about
mathematics; it hands each part its plain arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megastack.checkpoint.collect import items_of, model_items, optimizer_items, part_items, stage_placements
from megastack.checkpoint.dump import write_dump
from megastack.checkpoint.items import State, StateItem
from megastack.checkpoint.load import load
from megastack.checkpoint.saver import Saver
from megastack.comm.objects import all_gather_objects
from megastack.config.data_stages import StageConfig, stage_at, stage_configs
from megastack.config.schema import RecomputeOptions, TrainConfig
from megastack.data.baseline import bigram_loss
from megastack.data.blend import History
from megastack.data.continuity import identity as data_identity
from megastack.data.continuity import identity_faults as identity_faults
from megastack.data.continuity import restored_histories
from megastack.data.dataset import Dataset, Later, Streams, Wanted, build_dataset
from megastack.data.loader import Loader
from megastack.data.stages import Histories, StagedLoader, fresh_histories, stage_orders
from megastack.data.tokenizers import load_tokenizer
from megastack.data.validation import ValidationBatches
from megastack.errors import CheckpointError, ConfigError, DataError
from megastack.gradients.interface import Gradients
from megastack.gradients.make import build_gradients
from megastack.gradients.sharding import ZeroOptions
from megastack.inference.generate import Generator, check_prompts
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.decoder import Decoder
from megastack.models.profile import flops_per_token, max_positions
from megastack.models.stages import StageSlice, configured_schedule, stage_slices
from megastack.observe.console import Console
from megastack.observe.devices import peak_flops
from megastack.observe.folder import RunFolder
from megastack.observe.metrics import MetricsWriter, tensorboard_installed
from megastack.optim.groups import GroupRule, assign_groups, freeze
from megastack.optim.loss_scale import INITIAL, LossScale
from megastack.optim.lr import LearningRate
from megastack.optim.optimizer import Optimizer, OptimizerOptions, build_optimizer
from megastack.optim.precision import set_dtypes_
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedule import Schedule
from megastack.placement.module import initialise_
from megastack.training.hooks import Hooks
from megastack.training.loop import Loop, LoopOptions
from megastack.training.report import Recorder
from megastack.training.signals import StopRequest
from megastack.training.state import Progress
from megastack.training.step import TrainStep

SAMPLE_TOKENS = 32
"""Tokens that a sample during training adds to its prompt."""
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_stages(config: TrainConfig, mesh: Mesh, schedule: Schedule) -> list[Decoder]:
    """This rank's stages with their initial values, tied embeddings shared where one rank holds both ends."""
    slices = stage_slices(config, schedule.stages)
    stages = [_stage(config, mesh, slices[index]) for index in schedule.rank_stages(mesh[Axis.PP].rank)]
    first, last = stages[0], stages[-1]
    if config.model.tied and first is not last and first.has_embedding and last.has_head:
        last.share_embedding(first)
    return stages


def _stage(config: TrainConfig, mesh: Mesh, part: StageSlice) -> Decoder:
    with torch.device("meta"):
        stage = Decoder(config, mesh, layers=part.layers, embedding=part.embedding, head=part.head)
        set_dtypes_(stage, DTYPES[config.precision.compute], config.precision.keep_fp32)
    initialise_(stage, mesh, config.seed, device=mesh.device)
    return stage


def load_stages(config: TrainConfig, mesh: Mesh, schedule: Schedule, checkpoint: Path) -> list[Decoder]:
    """This rank's stages with the weights of a checkpoint, in the dtypes of the configuration.

    Raises:
        CheckpointError: it is damaged, or not of this model.
    """
    stages = build_stages(config, mesh, schedule)
    load(checkpoint, State(model_items(stages, mesh)), mesh, weights_only=True, cast=True)
    return stages


def inference_stages(config: TrainConfig, stages: Sequence[Decoder]) -> list[Decoder]:
    """Stages that use the same weights on sequences of any length: whole on every tp rank, no dropout, no recompute."""
    parallel = replace(config.parallel, sequence_parallel=False)
    plain = replace(config, parallel=parallel, recompute=RecomputeOptions())
    with torch.device("meta"):
        twins = [
            Decoder(plain, stage.mesh, layers=stage.layers, embedding=stage.has_embedding, head=stage.has_head)
            for stage in stages
        ]
    for twin, stage in zip(twins, stages, strict=True):
        twin.load_state_dict(stage.state_dict(), assign=True)
    return [twin.eval().requires_grad_(False) for twin in twins]


def build_generator(config: TrainConfig, mesh: Mesh, stages: Sequence[Decoder], schedule: Schedule) -> Generator:
    """What continues prompts with the current weights of these stages; all ranks call."""
    return Generator(
        inference_stages(config, stages),
        schedule,
        mesh,
        vocab=config.model.vocab,
        longest=longest_text(config),
    )


def longest_text(config: TrainConfig) -> int | None:
    """Positions that the model has; None where they are computed and there is no last one."""
    return max_positions(config) if config.model.positions == "learned" else None


@dataclass
class Training:
    """The parts of a training run on one rank, before anything is trained or written."""

    config: TrainConfig
    mesh: Mesh
    schedule: Schedule
    stages: list[Decoder]
    step: TrainStep
    progress: Progress
    dataset: Dataset
    validation: ValidationBatches
    histories: Histories

    @property
    def blend(self) -> History:
        """The weights of the first stage's blend so far, empty without one."""
        return self.histories[0]

    def state(self) -> State:
        """Weights, moments and progress as checkpoint items; the tensors are views of the live ones."""
        placements = stage_placements(self.stages)
        optimizer = self.step.optimizer
        kinds = optimizer.moments() | ({"master": masters} if (masters := optimizer.masters()) else {})
        scalars = {"optim/step": optimizer.steps}
        scalars |= {f"loss_scale/{name}": x for name, x in self.step.loss_scale.state().items()}
        items = [
            *self.weight_items(),
            *optimizer_items(kinds, placements, self.mesh),
            *(StateItem.replicated(name, x) for name, x in scalars.items()),
        ]
        trainer = self.progress.as_json() | identity(self.config, self.dataset, self.histories)
        return State(items, trainer)

    def weight_items(self) -> list[StateItem]:
        """The weights as checkpoint items; gathers that are under way are waited for."""
        self.step.buckets.wait_parameters()
        placements = stage_placements(self.stages)
        return part_items("model", self.step.buckets.weights(), placements, self.mesh)

    def gradient_items(self) -> list[StateItem]:
        """The gradients as checkpoint items, complete after their reduction."""
        placements = stage_placements(self.stages)
        return items_of("gradients", self.step.buckets.named_gradients(), placements, self.mesh)

    def generator(self) -> Generator:
        """Continues prompts with the weights as they are now; all ranks call, between steps."""
        self.step.buckets.wait_parameters()
        return build_generator(self.config, self.mesh, self.stages, self.schedule)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint: weights, moments and progress.

        Raises:
            CheckpointError: it does not fit, or its seed, data or batch are not this run's.
        """
        state = self.state()
        load(path, state, self.mesh, strict=self.config.checkpoint.strict)
        self.step.optimizer.load_steps(int(self.step.optimizer.steps))
        self.step.optimizer.publish_masters()
        if faults := identity_faults(state.trainer, identity(self.config, self.dataset)):
            raise CheckpointError("\n".join([f"resume={path}: would not continue the same run", *faults]))
        self.progress.__dict__.update(Progress.from_json(state.trainer).__dict__)
        global_size, loader = self.config.batch.global_size, self.step.loader
        self.histories = restored_histories(self.dataset, state.trainer, global_size)
        orders = stage_orders(self.dataset, self.config.seed, self.histories, global_size)
        for part, order in zip(loader.parts if isinstance(loader, StagedLoader) else [loader], orders, strict=True):
            part.order = order

    def load_weights(self, path: Path) -> None:
        """Start from the weights of a checkpoint, in this run's dtypes, everything else fresh."""
        load(path, self.state(), self.mesh, strict=self.config.checkpoint.strict, weights_only=True, cast=True)
        self.step.optimizer.refresh_masters()


def identity(config: TrainConfig, dataset: Dataset, histories: Histories = ()) -> dict[str, Any]:
    """What has to stay as it is from a run to its resume, since sample order and dropout follow from it."""
    return data_identity(dataset, seed=config.seed, global_size=config.batch.global_size, histories=histories)


def build_training(config: TrainConfig, mesh: Mesh, dataset: Dataset | None = None) -> Training:
    """Build everything that a step and a validation need; communicates only to open groups and agree on names.

    Args:
        config: a legal configuration.
        mesh: the ranks.
        dataset: the data of the configuration, where it was read already.
    """
    schedule = configured_schedule(config, mesh.shape)
    stages = build_stages(config, mesh, schedule)
    names = {name for found in all_gather_objects(_names(stages), mesh[Axis.PP]) for name in found}
    freeze(stages, config.optim.freeze, names=names)
    zero = config.parallel.zero
    buckets = build_gradients(
        stages,
        mesh,
        ZeroOptions(zero.stage, zero.shard_size, zero.gather, zero.reduce),
        units=[unit for stage in stages for unit in stage.units()],
        separable=[unit for stage in stages for unit in stage.passing_units()],
        groups=_groups(config, stages, names),
        reduce_dtype=DTYPES[config.precision.reduce] if config.precision.reduce else None,
    )
    dataset = dataset or read_dataset(config)
    dp = mesh[Axis.DP]
    where = {"dp_rank": dp.rank, "dp_size": dp.size, "vocab": config.model.vocab}
    batch = {"micro_size": config.batch.micro_size} | where
    histories = fresh_histories(dataset, config.batch.global_size)
    loader = _loader(config, dataset, histories, batch)
    validation = ValidationBatches(
        dataset.validation.samples,
        microbatches=loader.microbatches,
        limit=config.run.validate_samples,
        **batch,
    )
    step = TrainStep(
        mesh=mesh,
        loader=loader,
        pipeline=Pipeline(stages, schedule, mesh, on_last_backward=buckets.arm),
        buckets=buckets,
        optimizer=_optimizer(config, buckets),
        learning_rate=_learning_rate(config),
        clip_norm=config.optim.clip_norm,
        loss_scale=_loss_scale(config, mesh),
    )
    return Training(config, mesh, schedule, stages, step, Progress(), dataset, validation, histories)


def build_loop(
    training: Training,
    folder: RunFolder,
    stop: StopRequest,
    hooks: Hooks | None = None,
    resumed: Path | None = None,
    pid: int | None = None,
    start: str | None = None,
) -> Loop:
    """The loop of a run; the mesh's first rank records.

    Args:
        training: in the state that the run starts from.
        folder: what it writes into.
        stop: this rank's requests to stop.
        hooks: what to call on the way.
        resumed: the checkpoint that the state came from.
        pid: the process to signal when the run is to stop; this one if not given.
        start: what there is to say about this start of an elastic job.
    """
    config, mesh = training.config, training.mesh
    return Loop(
        options=LoopOptions(
            steps=config.run.steps,
            samples_per_step=config.batch.global_size,
            validate_every=config.run.validate_every,
            save_every=config.checkpoint.every,
            save_at_end=config.checkpoint.at_end,
            skip_nonfinite=config.run.on_nonfinite == "skip",
            dump_steps=tuple(config.observe.dump_steps),
        ),
        mesh=mesh,
        step=training.step,
        stages=training.stages,
        progress=training.progress,
        recorder=_recorder(training, folder, resumed, pid, start),
        stop=stop,
        folder=folder.path,
        saver=_saver(training, folder),
        state=training.state,
        dump=_dumper(training, folder),
        validation=training.validation,
        hooks=hooks or Hooks(),
        sample=_sampler(training),
    )


def _names(stages: Sequence[nn.Module]) -> list[str]:
    return [name for stage in stages for name, _ in stage.named_parameters()]


def _groups(config: TrainConfig, stages: Sequence[nn.Module], names: set[str]) -> dict[str, Any]:
    decays = {name: placement.decay for name, placement in stage_placements(stages).items()}
    rules = [GroupRule(group.pattern, group.lr_scale, group.weight_decay) for group in config.optim.groups]
    optim = config.optim
    return assign_groups(decays, weight_decay=optim.weight_decay, no_decay=optim.no_decay, rules=rules, names=names)


def _loader(
    config: TrainConfig, dataset: Dataset, histories: Histories, batch: Mapping[str, int]
) -> Loader | StagedLoader:
    global_size = config.batch.global_size
    orders = stage_orders(dataset, config.seed, histories, global_size)
    parts = [
        Loader(stage.data.train.samples, global_size=global_size, order=order, **batch)
        for stage, order in zip(dataset.stages, orders, strict=True)
    ]
    return StagedLoader([stage.from_step for stage in dataset.stages], parts) if dataset.later else parts[0]


def read_dataset(config: TrainConfig) -> Dataset:
    """The training and validation data of a configuration and of its later stages; needs no process group.

    Raises:
        DataError: about the first stage that cannot be used.
    """
    streams: Streams = {}
    first, *later = stage_configs(config)
    data = _read_stage(first.config, streams, scored=True)
    return replace(data, later=tuple(_read_later(stage, at, streams) for at, stage in enumerate(later)))


def _read_later(stage: StageConfig, at: int, streams: Streams) -> Later:
    try:
        return Later(stage.from_step, _read_stage(stage.config, streams, scored=False))
    except DataError as error:
        raise DataError(f"data.stages[{at}], after step {stage.from_step}: {error}") from error


def _read_stage(config: TrainConfig, streams: Streams, *, scored: bool) -> Dataset:
    data = config.data
    return build_dataset(
        source=data.source,
        paths=data.paths,
        blend=[Wanted(each.source, each.paths, each.weight) for each in data.blend],
        tokenizer=data.tokenizer,
        validation_fraction=data.validation_fraction,
        pack=data.pack,
        document_mask=data.document_mask,
        sequence_length=config.batch.sequence_length,
        vocab=config.model.vocab,
        read=streams,
        scored=scored,
    )


def _optimizer(config: TrainConfig, buckets: Gradients) -> Optimizer:
    optim = config.optim
    betas, offload = (optim.betas[0], optim.betas[1]), config.parallel.zero.offload
    options = OptimizerOptions(optim.name, betas, optim.eps, optim.momentum, offload=offload)
    return build_optimizer(buckets, options)


def _loss_scale(config: TrainConfig, mesh: Mesh) -> LossScale:
    fixed, dynamic = config.precision.loss_scale, config.precision.compute == "fp16"
    if fixed is not None:
        return LossScale(fixed, device=mesh.device)
    return LossScale(INITIAL if dynamic else None, dynamic=dynamic, device=mesh.device)


def _learning_rate(config: TrainConfig) -> LearningRate:
    lr = config.lr
    return LearningRate(
        schedule=lr.schedule,
        lr=config.optim.lr,
        warmup_steps=lr.warmup_steps,
        total_steps=lr.total_steps or config.run.steps,
        decay_steps=lr.decay_steps,
        floor=lr.floor,
    )


def _recorder(
    training: Training, folder: RunFolder, resumed: Path | None, pid: int | None, start: str | None
) -> Recorder:
    config, mesh = training.config, training.mesh
    records = mesh.rank == 0
    wanted = config.observe.tensorboard
    tensorboard = tensorboard_installed() if wanted is None else wanted
    split = training.dataset
    size, chosen = split.vocab, training.validation.chosen
    stages = stage_configs(config)
    flops = {stage.from_step: flops_per_token(stage.config) for stage in stages}
    return Recorder(
        steps=config.run.steps,
        devices=mesh.shape.world_size,
        flops_per_token=lambda step: flops[stage_at(stages, step).from_step],
        peak_flops=peak_flops(mesh.device, config.precision.compute),
        console=Console(enabled=records),
        log_every=config.run.log_every,
        metrics=MetricsWriter(folder.metrics, tensorboard=tensorboard) if records else None,
        status=folder.status if records else None,
        pid=os.getpid() if pid is None else pid,
        last_checkpoint=resumed,
        stages={stage.from_step: str(stage) for stage in stages[1:]},
        elastic=start,
        baseline=lambda: bigram_loss(split.train.samples, split.validation.samples, size, chosen=chosen),
    )


def _saver(training: Training, folder: RunFolder) -> Saver:
    options = training.config.checkpoint
    return Saver(
        folder.checkpoints,
        training.mesh,
        asynchronous=options.asynchronous,
        keep=options.keep_last,
        every=options.keep_every,
    )


def _sampler(training: Training) -> Callable[[], tuple[str, str]] | None:
    """A function that continues the run's prompt, refused here if the model cannot take it."""
    text = training.config.run.sample_prompt
    if text is None:
        return None
    tokenizer = training.dataset.tokenizer or load_tokenizer(training.config.data.tokenizer)
    prompt = [int(i) for i in tokenizer.encode([text.encode()])[0]]
    vocab, longest = training.config.model.vocab, longest_text(training.config)
    new = SAMPLE_TOKENS if longest is None else max(1, min(SAMPLE_TOKENS, longest - len(prompt)))
    try:
        check_prompts([prompt], new, vocab=vocab, longest=longest)
    except ConfigError as error:
        raise ConfigError(f"run.sample_prompt={text!r}: {error}") from None

    def sample() -> tuple[str, str]:
        (done,) = training.generator()([prompt], max_new_tokens=new, end=tokenizer.end)
        return text, tokenizer.decode([*prompt, *done.ids])[len(tokenizer.decode(prompt)) :]

    return sample


def _dumper(training: Training, folder: RunFolder) -> Callable[[int, str], None]:
    held: list[StateItem] = []

    def dump(step: int, what: str) -> None:
        if what == "gradients":
            copies = ((item, item.boxes[0]) for item in training.gradient_items())
            held[:] = [StateItem(item.name, item.shape, ((box, part.clone()),)) for item, (box, part) in copies]
            return
        weights = training.weight_items()
        named = [StateItem(f"weights/{item.name.removeprefix('model/')}", item.shape, item.boxes) for item in weights]
        write_dump(folder.dump(step), [*held, *named], training.mesh)
        held.clear()

    return dump
