"""Rules about ``data.stages``: when they begin, what they change, and that what they name fits model and grid."""

from __future__ import annotations

from collections.abc import Iterator

from megastack.config.data_phases import phase_configs
from megastack.config.schema import TrainConfig
from megastack.config.value_rules import BYTE_IDS, source_fits
from megastack.errors import Violation, counted


def phases_are_ordered(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Stages begin one after the other within the run, and each says what changes."""
    before, steps = 0, config.run.steps
    for at, stage in enumerate(config.data.stages):
        key, begin = f"data.stages[{at}].from_step", stage.from_step
        if begin <= before:
            rule = f"must come after the stage before, which begins at step {before}"
            yield Violation(key, begin, rule, (f"{before + 1} or more",))
        elif begin >= steps:
            rule = f"never begins: run.steps={steps}"
            advice = (f"{steps - 1} or less",) if steps - 1 > before else ()
            yield Violation(key, begin, rule, (*advice, f"run.steps={begin + 1} or more"))
        named = {"source": stage.source, "paths": stage.paths, "blend": stage.blend}
        if stage.sequence_length is None and all(value is None for value in named.values()):
            rule = "changes neither the data nor the sequence length"
            yield Violation(f"data.stages[{at}]", {"from_step": begin}, rule, ("sequence_length", "paths", "blend"))
        before = max(before, begin)


def phases_have_data(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """The sources of a stage have the paths they read and suit the tokenizer, as those of the first stage do."""
    for at, (stage, found) in enumerate(zip(config.data.stages, phase_configs(config)[1:], strict=True)):
        prefix, data = f"data.stages[{at}].", found.config.data
        if stage.blend is not None and (stage.source is not None or stage.paths is not None):
            rule = "the stage names one source as well"
            yield Violation(f"{prefix}blend", [each.paths for each in stage.blend], rule, (None, "no source and paths"))
            continue
        if stage.blend == []:
            rule = "has no source"
            yield Violation(f"{prefix}blend", [], rule, (f"{prefix}paths=[FILE,…]", f"{prefix}source=builtin", None))
            continue
        if stage.blend is None and stage.source is None and stage.paths is None:
            continue
        yield from source_fits(found.config, prefix)
        kinds = {each.source for each in data.blend} or {data.source}
        if data.tokenizer == "byte" and config.model.vocab < BYTE_IDS and kinds != {"bin"}:
            rule = f"data.tokenizer=byte has {BYTE_IDS} ids and model.vocab={config.model.vocab} does not hold them"
            yield Violation(f"{prefix}source", sorted(kinds)[-1], rule, ("bin", f"model.vocab={BYTE_IDS} or more"))
        if "bin" in kinds and not data.pack:
            rule = "token files are packed, and data.pack=false"
            yield Violation(f"{prefix}source", "bin", rule, ("text", "jsonl", "data.pack=true"))


def phases_fit_the_model(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Sequences of a stage have learned positions, and a whole part of them for each tensor-parallel rank."""
    model, tp = config.model, config.parallel.tp
    positions = (model.max_positions or config.batch.sequence_length) if model.positions == "learned" else None
    for at, stage in enumerate(config.data.stages):
        key, length = f"data.stages[{at}].sequence_length", stage.sequence_length
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
