"""The training loop of a run, with its records, checkpoints, dumps and console output."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megastack.assemble.data import configured_tokenizer
from megastack.assemble.inference import longest_text
from megastack.assemble.training import Training
from megastack.checkpoint.manager import CheckpointManager
from megastack.checkpoint.state import StateItem, write_dump
from megastack.comm.observer import annotated
from megastack.config.phases import phase_at, phase_configs
from megastack.data.validation import bigram_loss
from megastack.errors import ConfigError
from megastack.inference.generate import check_prompts
from megastack.mesh.shape import describe_coordinates
from megastack.models.profile import flops_per_token
from megastack.observe.console import Console
from megastack.observe.devices import peak_flops
from megastack.observe.folder import RunFolder
from megastack.observe.metrics import MetricsWriter, tensorboard_installed
from megastack.observe.ownership import OwnershipGuard
from megastack.observe.profiler import StepProfiler
from megastack.training.loop import Loop, LoopOptions
from megastack.training.report import Recorder
from megastack.training.signals import StopRequest
from megastack.training.state import Hooks

SAMPLE_TOKENS = 32
"""Number of tokens generated for the sample prompt during training."""


def build_loop(
    training: Training,
    folder: RunFolder,
    stop: StopRequest,
    hooks: Hooks | None = None,
    resumed: Path | None = None,
    *,
    pid: int | None = None,
    start: str | None = None,
    guard: OwnershipGuard | None = None,
) -> Loop:
    """Build the training loop of a run; the first rank of the mesh writes its records.

    Args:
        training: the training, in the state from which the run starts.
        folder: the run folder.
        stop: this rank's stop request.
        hooks: the user's callbacks.
        resumed: the checkpoint that was restored.
        pid: the process to signal to stop the run; this one by default.
        start: a description of this start of an elastic job.
        guard: raises if another process owns the run folder.
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
            profile_steps=tuple(config.observe.profile_steps),
        ),
        mesh=mesh,
        step=training.step,
        stages=training.stages,
        progress=training.progress,
        recorder=_recorder(training, folder, resumed, pid=pid, start=start, guard=guard),
        stop=stop,
        folder=folder.path,
        manager=_checkpoint_manager(training, folder, resumed, guard),
        state=training.state,
        dump=_dumper(training, folder),
        validation=training.validation,
        hooks=hooks or Hooks(),
        sample=_sampler(training),
        profiled=StepProfiler(
            config.observe.profile_steps,
            lambda step: folder.profile(step, mesh.rank),
            mesh.device,
            f"rank {mesh.rank} | {describe_coordinates(mesh.coordinates)}",
            lambda: annotated(mesh.observer),
        ).around,
    )


def _recorder(
    training: Training,
    folder: RunFolder,
    resumed: Path | None,
    *,
    pid: int | None,
    start: str | None,
    guard: OwnershipGuard | None,
) -> Recorder:
    config, mesh = training.config, training.mesh
    writes = mesh.rank == 0
    tensorboard = config.observe.tensorboard
    if tensorboard is None:
        tensorboard = tensorboard_installed()
    dataset = training.dataset
    vocab, chosen = dataset.vocab, training.validation.chosen
    phases, compiled = phase_configs(config), training.stages[0].compiled_blocks
    flops = {phase.from_step: flops_per_token(phase.config) for phase in phases}
    return Recorder(
        steps=config.run.steps,
        devices=mesh.shape.world_size,
        flops_per_token=lambda step: flops[phase_at(phases, step).from_step],
        peak_flops=peak_flops(mesh.device, config.precision.compute),
        console=Console(enabled=writes, on_gpu=mesh.device.type != "cpu"),
        log_every=config.run.log_every,
        metrics=MetricsWriter(folder.metrics, tensorboard=tensorboard) if writes else None,
        status=folder.status if writes else None,
        pid=os.getpid() if pid is None else pid,
        last_checkpoint=resumed,
        compile_cache=None if compiled is None else compiled.cache,
        phases={phase.from_step: str(phase) for phase in phases[1:]},
        elastic=start,
        guard=guard if writes else None,
        baseline=lambda: bigram_loss(dataset.train.samples, dataset.validation.samples, vocab, chosen=chosen),
    )


def _checkpoint_manager(
    training: Training, folder: RunFolder, resumed: Path | None, guard: OwnershipGuard | None
) -> CheckpointManager:
    options = training.config.checkpoint
    return CheckpointManager(
        folder.checkpoints,
        training.mesh,
        asynchronous=options.asynchronous,
        keep=options.keep_last,
        every=options.keep_every,
        guard=None if guard is None else guard.now,
        loaded=resumed,
    )


def _sampler(training: Training) -> Callable[[], tuple[str, str]] | None:
    """Return a function that continues the sample prompt of the run.

    Raises:
        ConfigError: the model cannot continue this prompt.
    """
    text = training.config.run.sample_prompt
    if text is None:
        return None
    tokenizer = training.dataset.tokenizer or configured_tokenizer(training.config)
    prompt = [int(i) for i in tokenizer.encode([text.encode()])[0]]
    vocab, longest = training.config.model.vocab, longest_text(training.config)
    new = SAMPLE_TOKENS if longest is None else max(1, min(SAMPLE_TOKENS, longest - len(prompt)))
    try:
        check_prompts([prompt], new, vocab=vocab, max_positions=longest)
    except ConfigError as error:
        raise ConfigError(f"run.sample_prompt={text!r}: {error}") from None

    noted = False

    def sample() -> tuple[str, str]:
        nonlocal noted
        generator = training.generator()
        if generator.uncached_because is not None and not noted:
            noted = True
            Console(enabled=training.mesh.rank == 0).line(
                f"note      samples without a cache: {generator.uncached_because}"
            )
        (completion,) = generator([prompt], max_new_tokens=new, end=tokenizer.end)
        return text, tokenizer.decode([*prompt, *completion.ids])[len(tokenizer.decode(prompt)) :]

    return sample


def _dumper(training: Training, folder: RunFolder) -> Callable[[int, str], None]:
    gradients: list[StateItem] = []

    def dump(step: int, what: str) -> None:
        if what == "gradients":
            gradients[:] = [
                StateItem(item.name, item.shape, tuple((box, part.clone()) for box, part in item.boxes))
                for item in training.gradient_items()
            ]
            return
        weights = training.weight_items()
        named = [StateItem(f"weights/{item.name.removeprefix('model/')}", item.shape, item.boxes) for item in weights]
        write_dump(folder.dump(step), [*gradients, *named], training.mesh)
        gradients.clear()

    return dump
