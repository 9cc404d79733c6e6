"""What is known of ``trainer.json``: the fields of a training run, where they are there, have their types.

A checkpoint may hold any JSON object as its trainer's state. Those of training runs are read by the trainer and by the
data, which rely on the types that are checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastack.records import integer, mapping, number, sequence

COUNTS = ("step", "consumed_tokens", "consumed_samples", "skipped")


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Check the types of the fields that a training run writes.

    Raises:
        RecordError: a field has another type.
    """
    for name in set(COUNTS) & set(trainer):
        integer(trainer, name)
    if trainer.get("batch") is not None:
        mapping(trainer, "batch")
    _check_blend(trainer)
    for stage in sequence(trainer, "stages") if "stages" in trainer else ():
        record = mapping({"stages": stage}, "stages")
        integer(record, "from_step")
        _check_blend(record)


def _check_blend(record: Mapping[str, Any]) -> None:
    for stretch in sequence(record, "blend") if "blend" in record else ():
        entry = mapping({"blend": stretch}, "blend")
        integer(entry, "begin")
        for weight in mapping(entry, "weights").values():
            number({"weights": weight}, "weights")
