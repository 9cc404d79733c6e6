"""Averages of values that not every rank has: a stage's own figures, a hook's, whatever goes into a log."""

from __future__ import annotations

from collections.abc import Mapping

from megastack.comm.group import AxisGroup
from megastack.comm.objects import all_gather_objects


def average_by_key(values: Mapping[str, float], group: AxisGroup) -> dict[str, float]:
    """The mean of each key over the ranks that have it, on every rank of the group.

    One exchange whatever the keys, so that ranks may have different ones, in any order, or none; every rank of the
    group calls. The keys of the result are sorted.
    """
    found: dict[str, list[float]] = {}
    for of_rank in all_gather_objects(dict(values), group):
        for key, value in of_rank.items():
            found.setdefault(key, []).append(value)
    return {key: sum(found[key]) / len(found[key]) for key in sorted(found)}
