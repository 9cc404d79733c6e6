"""Data phases: ``data.phases`` as one complete configuration per phase, and the rules about them.

Each phase is represented by the configuration of a run that consists of this phase alone. Code that accepts a
configuration (rules, FLOPs, activation sizes, datasets) can therefore be applied to a phase. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megastack.config.choices import DataSource
from megastack.config.data_schema import DataOptions, DataPhaseOptions
from megastack.config.schema import TrainConfig
from megastack.config.value_rules import BYTE_IDS, source_fits
from megastack.data.blend_weights import normalized
from megastack.errors import Violation, counted


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of a run.

    Args:
        from_step: number of completed optimizer steps at which the phase begins.
        config: the configuration of a run that consists of this phase alone; its ``data.phases`` is empty.
    """

    from_step: int
    config: TrainConfig

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""
        return self.config.batch.sequence_length

    def __str__(self) -> str:
        return f"{source_text(self.config)}; sequences of {counted(self.sequence_length, 'token')}"


def phase_configs(config: TrainConfig) -> list[PhaseConfig]:
    """Return the phases of a run in order; the first begins at step 0."""
    found = [PhaseConfig(0, replace(config, data=replace(config.data, phases=[])))]
    for phase in config.data.phases:
        before = found[-1].config
        length = before.batch.sequence_length if phase.sequence_length is None else phase.sequence_length
        batch = replace(before.batch, sequence_length=length)
        found.append(PhaseConfig(phase.from_step, replace(before, batch=batch, data=_data(before.data, phase))))
    return found


def _data(before: DataOptions, phase: DataPhaseOptions) -> DataOptions:
    """Return the data of a phase: its settings replace the previous ones; a blend replaces a source and vice versa."""
    if phase.blend is not None:
        return replace(before, blend=phase.blend, source=DataSource.builtin, paths=[])
    if phase.paths is None and phase.source is None:
        return before
    paths = [] if phase.paths is None else phase.paths
    return replace(before, blend=[], source=before.source if phase.source is None else phase.source, paths=paths)


def phase_at(phases: Sequence[PhaseConfig], step: int) -> PhaseConfig:
    """Return the phase of the 0-based ``step``."""
    return next(phase for phase in reversed(phases) if phase.from_step <= step)


def longest(config: TrainConfig) -> TrainConfig:
    """Return the configuration of the first phase with the longest sequence."""
    return max(phase_configs(config), key=lambda phase: phase.sequence_length).config


def source_text(config: TrainConfig) -> str:
    """Describe the training data of a configuration, e.g. ``bin corpus/web 70.0% + bin corpus/books 30.0%``."""
    data = config.data
    if not data.blend:
        return " ".join([data.source.value, *data.paths])
    drawn = zip(data.blend, normalized([each.weight for each in data.blend]), strict=True)
    return " + ".join(f"{each.source.value} {' '.join(each.paths)} {part:.1%}" for each, part in drawn)


def phases_are_ordered(config: TrainConfig) -> Iterator[Violation]:
    """Phases begin in increasing order within the run, and each one changes a setting."""
    before, steps = 0, config.run.steps
    for at, phase in enumerate(config.data.phases):
        key, begin = f"data.phases[{at}].from_step", phase.from_step
        if begin <= before:
            rule = f"must come after the previous phase, which begins at step {before}"
            yield Violation(key, begin, rule, (f"{before + 1} or more",))
        elif begin >= steps:
            rule = f"never begins: run.steps={steps}"
            advice = (f"{steps - 1} or less",) if steps - 1 > before else ()
            yield Violation(key, begin, rule, (*advice, f"run.steps={begin + 1} or more"))
        settings = (phase.sequence_length, phase.source, phase.paths, phase.blend)
        if all(value is None for value in settings):
            rule = "changes neither the data nor the sequence length"
            yield Violation(f"data.phases[{at}]", {"from_step": begin}, rule, ("sequence_length", "paths", "blend"))
        before = max(before, begin)


def phases_have_data(config: TrainConfig) -> Iterator[Violation]:
    """The sources of a later phase have the paths they need and match the tokenizer, as in the first phase."""
    for at, (phase, found) in enumerate(zip(config.data.phases, phase_configs(config)[1:], strict=True)):
        prefix, data = f"data.phases[{at}].", found.config.data
        if phase.blend is not None and (phase.source is not None or phase.paths is not None):
            rule = "the phase also sets a single source"
            yield Violation(f"{prefix}blend", [each.paths for each in phase.blend], rule, (None, "no source and paths"))
            continue
        if phase.blend == []:
            rule = "has no source"
            yield Violation(f"{prefix}blend", [], rule, (f"{prefix}paths=[FILE,…]", f"{prefix}source=builtin", None))
            continue
        if phase.blend is None and phase.source is None and phase.paths is None:
            continue
        yield from source_fits(found.config, prefix)
        kinds = {each.source for each in data.blend} or {data.source}
        if data.tokenizer == "byte" and config.model.vocab < BYTE_IDS and kinds != {"bin"}:
            rule = f"data.tokenizer=byte has {BYTE_IDS} ids, more than model.vocab={config.model.vocab}"
            yield Violation(f"{prefix}source", sorted(kinds)[-1], rule, ("bin", f"model.vocab={BYTE_IDS} or more"))
        if "bin" in kinds and not data.pack:
            rule = "token files are packed, and data.pack=false"
            yield Violation(f"{prefix}source", "bin", rule, ("text", "jsonl", "data.pack=true"))


def phases_fit_the_model(config: TrainConfig) -> Iterator[Violation]:
    """Sequences of each phase fit the learned positions and are divisible by the tensor-parallel degree."""
    model, tp = config.model, config.parallel.tp
    positions = (model.max_positions or config.batch.sequence_length) if model.positions == "learned" else None
    for at, phase in enumerate(config.data.phases):
        key, length = f"data.phases[{at}].sequence_length", phase.sequence_length
        if length is None:
            continue
        if positions is not None and length > positions:
            rule = f"the model has {counted(positions, 'learned position')}"
            yield Violation(key, length, rule, (f"{positions} or less", f"model.max_positions={length} or more"))
        if config.parallel.sequence_parallel and length % tp:
            rule = f"must be a multiple of parallel.tp={tp} with parallel.sequence_parallel=true"
            below = length // tp * tp
            advice = (below, below + tp) if below else (tp,)
            yield Violation(key, length, rule, (*advice, "parallel.sequence_parallel=false"))


PHASE_RULES = (phases_are_ordered, phases_have_data, phases_fit_the_model)
