"""The data state in a checkpoint, and the check that a resumed run continues with the same data.

Sample order and dropout depend on seed, batch and data, so a resume must keep them. Two things may change: the weights
of a blend, from the resume on, and data phases that have not begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megastack.data.blend_weights import history_from_json, history_to_json, missing_sources
from megastack.data.dataset import Dataset
from megastack.data.phases import BlendHistories, initial_histories

Record = Mapping[str, Any]

PHASES = "stages"
"""The key of later phases in a checkpoint's trainer record; an older name, kept so that old checkpoints load."""


def data_state(dataset: Dataset, *, seed: int, global_size: int, histories: BlendHistories = ()) -> dict[str, Any]:
    """Seed, batch and data as a checkpoint stores them, for the first phase and then for any later ones."""
    histories = histories or initial_histories(dataset, global_size)
    first, *rest = (
        {"data": phase.data.fingerprint} | ({"blend": history_to_json(history)} if phase.data.blended else {})
        for phase, history in zip(dataset.phases, histories, strict=True)
    )
    lengths = [phase.data.train.samples.sequence_length for phase in dataset.phases]
    batch = {"global_size": global_size, "sequence_length": lengths[0]}
    later = [
        {"from_step": phase.from_step, "sequence_length": length} | record
        for phase, length, record in zip(dataset.later_phases, lengths[1:], rest, strict=True)
    ]
    return {"seed": seed, "batch": batch} | first | ({PHASES: later} if later else {})


def resume_errors(trainer: Record, current: Record) -> list[str]:
    """Why a run with the :func:`data_state` `current` cannot continue from a checkpoint's trainer record."""
    before = trainer.get("batch") or {}
    pairs = {"seed": (current["seed"], trainer.get("seed"))}
    pairs |= {f"batch.{name}": (value, before.get(name)) for name, value in current["batch"].items()}
    errors = list(_changed_values(pairs))
    step = int(trainer.get("step", 0))
    theirs, ours = _begun_phases(trainer, step), _begun_phases(current, step)
    errors += _data_errors("data", trainer, current, over=bool(_begun_phases(current, step + 1)))
    for at, (old, new) in enumerate(zip(theirs, ours, strict=False)):
        names, key = ("from_step", "sequence_length"), f"data.phases[{at}]"
        changed = list(_changed_values({f"{key}.{name}": (new[name], old.get(name)) for name in names}))
        errors += changed or _data_errors(key, old, new, over=at + 1 < len(_begun_phases(current, step + 1)))
    for extra in ours[len(theirs) :]:
        at, begin = ours.index(extra), extra["from_step"]
        rule = f"the checkpoint's run reached step {step} without this phase"
        errors.append(f"data.phases[{at}].from_step={begin}: {rule}; use {step} or more")
    for lost in theirs[len(ours) :]:
        begin = lost["from_step"]
        errors.append(f"data.phases: the checkpoint's run has one from step {begin} on; use the same up to step {step}")
    return errors


def restored_histories(dataset: Dataset, trainer: Record, global_size: int) -> BlendHistories:
    """The blend history of each phase of a run that resumes from a checkpoint without :func:`resume_errors`."""
    step = int(trainer["step"])
    begins = [phase.from_step for phase in dataset.phases]
    histories = []
    for phase, old, end in zip(dataset.phases, _padded(trainer, len(begins)), [*begins[1:], step + 1], strict=True):
        before = history_from_json(old.get("blend", ()))
        if phase.from_step >= step and phase.from_step:
            histories.append(phase.data.history(entry=phase.from_step * global_size))
        elif end <= step:
            histories.append(before)
        else:
            histories.append(phase.data.history(before, step * global_size))
    return tuple(histories)


def _padded(trainer: Record, count: int) -> list[Record]:
    """The records of the first `count` phases, empty if the checkpoint has none."""
    found: list[Record] = [trainer, *trainer.get(PHASES, ())]
    return (found + [{}] * count)[:count]


def _begun_phases(record: Record, step: int) -> list[Record]:
    """The later phases in which a run has taken a step when it has completed `step` steps."""
    return [phase for phase in record.get(PHASES, ()) if phase["from_step"] < step]


def _changed_values(pairs: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    for key, (new, old) in pairs.items():
        if new != old:
            yield f"{key}={new}: the checkpoint's run has {old}; use {old}"


def _data_errors(key: str, old: Record, new: Record, *, over: bool) -> Iterator[str]:
    """Errors in the data of a phase that has begun; `over` is whether a later phase has replaced it."""
    if old.get("data") != new["data"]:
        keys = f"{key}.*" if key == "data" else key
        yield f"{key}: not the samples of the checkpoint's run; use the same files, {keys} and sequence length"
        return
    history, present = history_from_json(old.get("blend", ())), _weights(new.get("blend", ()))
    if missing := missing_sources(history, present):
        rule = f"{missing} of the sources of the checkpoint's run are missing, or have other files"
        yield f"{key}.blend: {rule}; keep them, with weight 0 to stop drawing from them"
    elif over and history and _positive(history[-1].weights) != _positive(present):
        yield f"{key}.blend: its phase is over, so new weights would have no effect; use the weights it ended with"


def _weights(blend: Sequence[Record]) -> Mapping[str, float]:
    """The current weight of each source, from a stored history."""
    return blend[-1]["weights"] if blend else {}


def _positive(weights: Mapping[str, float]) -> dict[str, float]:
    return {digest: weight for digest, weight in weights.items() if weight}
