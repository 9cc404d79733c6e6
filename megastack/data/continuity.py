"""What a checkpoint says of the data, and what stands against going on from it with other data.

Sample order and dropout follow from seed, batch and data, so these stay as they are from a run to its resume. Two
things may change: the weights of a blend, from the resume on, and the stages that have not begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megastack.data.blend import history_json, history_of, missing_sources
from megastack.data.dataset import Dataset
from megastack.data.phases import BlendHistories, fresh_histories

Record = Mapping[str, Any]


def identity(dataset: Dataset, *, seed: int, global_size: int, histories: BlendHistories = ()) -> dict[str, Any]:
    """What a checkpoint keeps of seed, batch and data: of the first stage, and of the later ones where there are."""
    histories = histories or fresh_histories(dataset, global_size)
    first, *rest = (
        {"data": stage.data.fingerprint} | ({"blend": history_json(history)} if stage.data.blended else {})
        for stage, history in zip(dataset.stages, histories, strict=True)
    )
    lengths = [stage.data.train.samples.sequence_length for stage in dataset.stages]
    batch = {"global_size": global_size, "sequence_length": lengths[0]}
    later = [
        {"from_step": stage.from_step, "sequence_length": length} | record
        for stage, length, record in zip(dataset.later, lengths[1:], rest, strict=True)
    ]
    return {"seed": seed, "batch": batch} | first | ({"stages": later} if later else {})


def identity_errors(trainer: Record, own: Record) -> list[str]:
    """What a checkpoint's trainer state has against being continued by a run of this :func:`identity`."""
    before = trainer.get("batch") or {}
    pairs = {"seed": (own["seed"], trainer.get("seed"))}
    pairs |= {f"batch.{name}": (value, before.get(name)) for name, value in own["batch"].items()}
    errors = list(_other_values(pairs))
    step = int(trainer.get("step", 0))
    theirs, ours = _begun(trainer, step), _begun(own, step)
    errors += _data_errors("data", trainer, own, over=bool(_begun(own, step + 1)))
    for at, (old, new) in enumerate(zip(theirs, ours, strict=False)):
        names, key = ("from_step", "sequence_length"), f"data.phases[{at}]"
        moved = list(_other_values({f"{key}.{name}": (new[name], old.get(name)) for name in names}))
        errors += moved or _data_errors(key, old, new, over=at + 1 < len(_begun(own, step + 1)))
    for extra in ours[len(theirs) :]:
        at, begin = ours.index(extra), extra["from_step"]
        rule = f"the checkpoint's run went on to step {step} without this stage"
        errors.append(f"data.phases[{at}].from_step={begin}: {rule}; use {step} or more")
    for lost in theirs[len(ours) :]:
        begin = lost["from_step"]
        errors.append(f"data.phases: the checkpoint's run has one from step {begin} on; use the same up to step {step}")
    return errors


def restored_histories(dataset: Dataset, trainer: Record, global_size: int) -> BlendHistories:
    """The weights of each stage of a run that goes on from a checkpoint that has nothing against it."""
    step = int(trainer["step"])
    begins = [stage.from_step for stage in dataset.stages]
    histories = []
    for stage, old, end in zip(dataset.stages, _padded(trainer, len(begins)), [*begins[1:], step + 1], strict=True):
        before = history_of(old.get("blend", ()))
        if stage.from_step >= step and stage.from_step:
            histories.append(stage.data.history(entry=stage.from_step * global_size))
        elif end <= step:
            histories.append(before)
        else:
            histories.append(stage.data.history(before, step * global_size))
    return tuple(histories)


def _padded(trainer: Record, count: int) -> list[Record]:
    """The records of the first `count` stages, empty where a checkpoint has none."""
    found: list[Record] = [trainer, *trainer.get("stages", ())]
    return (found + [{}] * count)[:count]


def _begun(record: Record, step: int) -> list[Record]:
    """The later stages that a run has taken a step in when it has done `step` steps."""
    return [stage for stage in record.get("stages", ()) if stage["from_step"] < step]


def _other_values(pairs: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for key, (new, old) in pairs.items():
        if new != old:
            yield f"{key}={new}: the checkpoint's run has {old}; use {old}"


def _data_errors(key: str, old: Record, new: Record, *, over: bool) -> Iterator[str]:
    """What the data of a stage that has begun has against it; `over`, a later stage has taken its place."""
    if old.get("data") != new["data"]:
        keys = f"{key}.*" if key == "data" else key
        yield f"{key}: not the samples of the checkpoint's run; use the same files, {keys} and sequence length"
        return
    history, present = history_of(old.get("blend", ())), _weights(new.get("blend", ()))
    if missing := missing_sources(history, present):
        rule = f"{missing} of the sources of the checkpoint's run are not in it, or have other files"
        yield f"{key}.blend: {rule}; keep them, with weight 0 where they are not to be drawn any more"
    elif over and history and _drawn(history[-1].weights) != _drawn(present):
        yield f"{key}.blend: its stage is over, other weights would do nothing; use those that it ended with"


def _weights(blend: Sequence[Record]) -> Mapping[str, float]:
    """The sources of a run with their weights."""
    return blend[-1]["weights"] if blend else {}


def _drawn(weights: Mapping[str, float]) -> dict[str, float]:
    return {digest: weight for digest, weight in weights.items() if weight}
