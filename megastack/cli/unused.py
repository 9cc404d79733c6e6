"""Overrides that a verb accepts but does not use.

Every verb composes and validates a whole configuration, so overrides of a training command can be kept. A verb that
does not train lists the given keys that have no effect on its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_RUN = ("dir", "log_every", "name", "on_nonfinite", "root", "sample_prompt", "time_limit_s", "validate_every")
_RECORDS = ("checkpoint", "observe", "resume", *(f"run.{name}" for name in _RUN))
_TRAINING = (
    *_RECORDS,
    *("compile", "lr", "optim", "recompute", "run.steps"),
    *("launch.elastic", "parallel.bucket_size", "parallel.zero", "precision.loss_scale", "precision.reduce"),
)
_READING = ("blend", "document_mask", "pack", "paths", "phases", "source", "validation_fraction")
_DATA = (*(f"data.{name}" for name in _READING), "run.validate_samples")

UNUSED: Mapping[str, Sequence[str]] = {
    "verify": (
        *_RECORDS,
        *("cluster", "precision.loss_scale", "precision.reduce", "run.deterministic", "run.validate_samples"),
        *("launch.elastic", "launch.grace_s", "launch.numa_binding", "launch.threads_per_rank"),
    ),
    "generate": (*_TRAINING, *_DATA, "loss", "seed"),
    "evaluate": _TRAINING,
    "evaluate --file": (*_TRAINING, *_DATA),
    "export": (*_TRAINING, *_DATA, "device", "launch", "loss", "parallel", "run", "schedule", "seed"),
}
"""The keys and sections without effect, by verb. ``verify`` reports ``compile``, ``device`` and ``precision.compute``
itself, by value."""


def unused_keys(verb: str, overrides: Sequence[str]) -> list[str]:
    """Return the keys and groups among the overrides that have no effect on a verb of :data:`UNUSED`."""
    given = dict.fromkeys(override.partition("=")[0].lstrip("+~") for override in overrides)
    return [key for key in given if any(f"{key}.".startswith(f"{unused}.") for unused in UNUSED[verb])]


def unused_note(verb: str, overrides: Sequence[str]) -> str | None:
    """Return a note that lists the overrides without effect on a verb; None if there are none."""
    found = unused_keys(verb, overrides)
    return f"{verb} does not use {', '.join(found)}" if found else None
