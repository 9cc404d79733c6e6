"""The rotary part of a ``config.json``: ``rope_theta`` at the top, ``rope_scaling`` and ``rope_parameters``.

Files of transformers 4 have the first two, those of transformers 5 the last; a file may have all three as long as they
say the same. Every key inside is read or refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastack.config.choices import RopeScaling
from megastack.config.schema import RopeOptions
from megastack.interop.fields import Fields, key

KINDS = ("default", "linear", "llama3")
OLD, NEW = "rope_scaling", "rope_parameters"
ORIGINAL = "original_max_position_embeddings"
_FACTOR, _LENGTH = key("number"), key("size")
USED: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "default": {},
    "linear": {"factor": ("factor", _FACTOR)},
    "llama3": {
        "factor": ("factor", _FACTOR),
        "low_freq_factor": ("low_freq_factor", _FACTOR),
        "high_freq_factor": ("high_freq_factor", _FACTOR),
        ORIGINAL: ("original_max_positions", _LENGTH),
    },
}
"""The keys that each kind of scaling needs: the option that each becomes, and what it has to be."""
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(fields: Fields) -> RopeOptions:
    """The rotary options of a file; what cannot be followed is noted as a fault."""
    theta = fields.get("rope_theta")
    read = [found for name in (NEW, OLD) if (found := _read(fields, name, theta)) is not None]
    if not read:
        return RopeOptions(theta=theta)
    _compare(fields, theta, read)
    given, options = read[0]
    return options or RopeOptions(theta=given["rope_theta"])


Read = tuple[dict[str, Any], RopeOptions | None]
"""What an object says, completed, and the options that it means; None where it has faults."""


def _read(fields: Fields, name: str, theta: float) -> Read | None:
    values: dict[str, Any] = dict(fields.get(name) or {})
    if not values:
        return None
    before = len(fields.errors)
    given: dict[str, Any] = {"rope_theta": theta, "rope_type": _kind(fields, name, values)}
    if "rope_theta" in values:
        given["rope_theta"] = fields.checked(f"{name}.rope_theta", values["rope_theta"], key("number", theta))
    used = USED.get(given["rope_type"])
    if used is None:
        fields.error(
            f"{name}.rope_type", given["rope_type"], "this scaling of the rotary frequencies is not built", KINDS
        )
        return given, None
    options: dict[str, Any] = {}
    for theirs, (ours, wanted) in used.items():
        value = values.get(theirs, _original(fields, theirs))
        if value is None:
            fields.error(f"{name}.{theirs}", None, f"rope_type={given['rope_type']} needs it")
        else:
            given[theirs] = options[ours] = fields.checked(f"{name}.{theirs}", value, wanted)
    _refuse_unread(fields, name, values, given)
    if len(fields.errors) > before:
        return given, None
    scaling = RopeScaling.none if given["rope_type"] == "default" else RopeScaling(given["rope_type"])
    return given, RopeOptions(theta=given["rope_theta"], scaling=scaling, **options)


def _kind(fields: Fields, name: str, values: Mapping[str, Any]) -> str:
    """``rope_type``, or ``type`` as it was called first."""
    kinds = [values[each] for each in ("rope_type", "type") if values.get(each) is not None]
    if len({str(kind) for kind in kinds}) > 1:
        fields.error(f"{name}.type", kinds[1], f"{name}.rope_type is {kinds[0]}", (kinds[0],))
    return str(kinds[0]) if kinds else "default"


def _original(fields: Fields, name: str) -> Any:
    """The length before stretching where the object does not say it: at the top, or the context, as in the class."""
    if name != ORIGINAL:
        return None
    return fields.values.get(ORIGINAL, fields.get("max_position_embeddings"))


def _refuse_unread(fields: Fields, name: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for other, value in values.items():
        where = f"{name}.{other}"
        if other in LAYER_TYPES:
            fields.error(where, value, "one rotation serves all layers")
        elif other == "partial_rotary_factor":
            if value is not None and (isinstance(value, bool) or value != 1):
                fields.error(where, value, "the whole head is rotated", (1.0, None))
        elif other not in given and other != "type" and value is not None:
            fields.error(where, value, f"not read for rope_type={given['rope_type']}; remove it")


def _compare(fields: Fields, theta: float, read: list[Read]) -> None:
    """Whoever reads the file must find the same in each place."""
    first = read[0][0]
    where = NEW if fields.get(NEW) else OLD
    if ORIGINAL in first:
        fields.absent(ORIGINAL, (first[ORIGINAL],), f"{where} says {first[ORIGINAL]}")
    if fields.has("rope_theta") and theta != first["rope_theta"]:
        fields.error("rope_theta", theta, f"{where} says {first['rope_theta']}", (first["rope_theta"],))
    for other, _ in read[1:]:
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                rule = f"{NEW}.{name} is {first.get(name)}; they must say the same"
                fields.error(f"{OLD}.{name}", other.get(name), rule)
