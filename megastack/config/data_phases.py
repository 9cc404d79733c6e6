"""What a run's data and sequence length are from which step on: ``data.stages`` with everything filled in.

Each stage is given as the configuration that a run of it alone would have, so that whatever asks a configuration (the
rules, FLOPs, activations, the data itself) can be asked about a stage. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megastack.config.schema import DataOptions, DataPhaseOptions, DataSource, TrainConfig
from megastack.data.blend_weights import normalized
from megastack.errors import counted


@dataclass(frozen=True)
class PhaseConfig:
    """One stage: the completed steps at which it begins, and a configuration without other stages."""

    from_step: int
    config: TrainConfig

    @property
    def sequence_length(self) -> int:
        """Tokens of one sequence."""
        return self.config.batch.sequence_length

    def __str__(self) -> str:
        return f"{source_text(self.config)}; sequences of {counted(self.sequence_length, 'token')}"


def phase_configs(config: TrainConfig) -> list[PhaseConfig]:
    """The stages of a run in order, the first of them from step 0 on."""
    first = replace(config, data=replace(config.data, stages=[]))
    found = [PhaseConfig(0, first)]
    for stage in config.data.stages:
        before = found[-1].config
        length = before.batch.sequence_length if stage.sequence_length is None else stage.sequence_length
        batch = replace(before.batch, sequence_length=length)
        found.append(PhaseConfig(stage.from_step, replace(before, batch=batch, data=_data(before.data, stage))))
    return found


def _data(before: DataOptions, stage: DataPhaseOptions) -> DataOptions:
    """What a stage names takes the place of what was there: a blend that of one source, and the reverse."""
    if stage.blend is not None:
        return replace(before, blend=stage.blend, source=DataSource.builtin, paths=[])
    if stage.paths is None and stage.source is None:
        return before
    paths = [] if stage.paths is None else stage.paths
    return replace(before, blend=[], source=before.source if stage.source is None else stage.source, paths=paths)


def phase_at(stages: list[PhaseConfig], step: int) -> PhaseConfig:
    """The stage of the 0-based ``step``."""
    return next(stage for stage in reversed(stages) if stage.from_step <= step)


def longest(config: TrainConfig) -> TrainConfig:
    """The configuration of the stage with the longest sequence, the first of these."""
    return max(phase_configs(config), key=lambda stage: stage.sequence_length).config


def source_text(config: TrainConfig) -> str:
    """The training data of a configuration, e.g. ``bin corpus/web 70.0% + bin corpus/books 30.0%``."""
    data = config.data
    if not data.blend:
        return " ".join([data.source.value, *data.paths])
    drawn = zip(data.blend, normalized([each.weight for each in data.blend]), strict=True)
    return " + ".join(f"{each.source.value} {' '.join(each.paths)} {part:.1%}" for each, part in drawn)
