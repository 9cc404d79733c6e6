"""The loop around a training: what it records, saves, dumps and says on the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megastack.assemble.data import configured_tokenizer
from megastack.assemble.inference import longest_text
from megastack.assemble.training import Training
from megastack.checkpoint.dump import write_dump
from megastack.checkpoint.items import StateItem
from megastack.checkpoint.manager import CheckpointManager
from megastack.config.phases import phase_at, phase_configs
from megastack.data.baseline import bigram_loss
from megastack.errors import ConfigError
from megastack.inference.generate import check_prompts
from megastack.models.profile import flops_per_token
from megastack.observe.console import Console
from megastack.observe.devices import peak_flops
from megastack.observe.folder import RunFolder
from megastack.observe.metrics import MetricsWriter, tensorboard_installed
from megastack.observe.ownership import OwnershipGuard
from megastack.training.hooks import Hooks
from megastack.training.loop import Loop, LoopOptions
from megastack.training.report import Recorder
from megastack.training.signals import StopRequest

SAMPLE_TOKENS = 32
"""Tokens that a sample during training adds to its prompt."""


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
    """The loop of a run; the mesh's first rank records.

    Args:
        training: in the state that the run starts from.
        folder: what it writes into.
        stop: this rank's requests to stop.
        hooks: what to call on the way.
        resumed: the checkpoint that the state came from.
        pid: the process to signal when the run is to stop; this one if not given.
        start: what there is to say about this start of an elastic job.
        guard: raises where the run folder has another owner by now.
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
        recorder=_recorder(training, folder, resumed, pid=pid, start=start, guard=guard),
        stop=stop,
        folder=folder.path,
        saver=_saver(training, folder, resumed, guard),
        state=training.state,
        dump=_dumper(training, folder),
        validation=training.validation,
        hooks=hooks or Hooks(),
        sample=_sampler(training),
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
    records = mesh.rank == 0
    wanted = config.observe.tensorboard
    tensorboard = tensorboard_installed() if wanted is None else wanted
    split = training.dataset
    size, chosen = split.vocab, training.validation.chosen
    stages = phase_configs(config)
    flops = {stage.from_step: flops_per_token(stage.config) for stage in stages}
    return Recorder(
        steps=config.run.steps,
        devices=mesh.shape.world_size,
        flops_per_token=lambda step: flops[phase_at(stages, step).from_step],
        peak_flops=peak_flops(mesh.device, config.precision.compute),
        console=Console(enabled=records),
        log_every=config.run.log_every,
        metrics=MetricsWriter(folder.metrics, tensorboard=tensorboard) if records else None,
        status=folder.status if records else None,
        pid=os.getpid() if pid is None else pid,
        last_checkpoint=resumed,
        stages={stage.from_step: str(stage) for stage in stages[1:]},
        elastic=start,
        guard=guard if records else None,
        baseline=lambda: bigram_loss(split.train.samples, split.validation.samples, size, chosen=chosen),
    )


def _saver(
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
    """A function that continues the run's prompt, refused here if the model cannot take it."""
    text = training.config.run.sample_prompt
    if text is None:
        return None
    tokenizer = training.dataset.tokenizer or configured_tokenizer(training.config)
    prompt = [int(i) for i in tokenizer.encode([text.encode()])[0]]
    vocab, longest = training.config.model.vocab, longest_text(training.config)
    new = SAMPLE_TOKENS if longest is None else max(1, min(SAMPLE_TOKENS, longest - len(prompt)))
    try:
        check_prompts([prompt], new, vocab=vocab, longest=longest)
    except ConfigError as error:
        raise ConfigError(f"run.sample_prompt={text!r}: {error}") from None

    said = False

    def sample() -> tuple[str, str]:
        nonlocal said
        generator = training.generator()
        if generator.uncached_because is not None and not said:
            said = True
            Console(enabled=training.mesh.rank == 0).line(
                f"note      samples without a cache: {generator.uncached_because}"
            )
        (done,) = generator([prompt], max_new_tokens=new, end=tokenizer.end)
        return text, tokenizer.decode([*prompt, *done.ids])[len(tokenizer.decode(prompt)) :]

    return sample


def _dumper(training: Training, folder: RunFolder) -> Callable[[int, str], None]:
    held: list[StateItem] = []

    def dump(step: int, what: str) -> None:
        if what == "gradients":
            held[:] = [
                StateItem(item.name, item.shape, tuple((box, part.clone()) for box, part in item.boxes))
                for item in training.gradient_items()
            ]
            return
        weights = training.weight_items()
        named = [StateItem(f"weights/{item.name.removeprefix('model/')}", item.shape, item.boxes) for item in weights]
        write_dump(folder.dump(step), [*held, *named], training.mesh)
        held.clear()

    return dump
