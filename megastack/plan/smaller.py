"""Settings of a run that need less memory, proposed when a rank has run out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megastack.config.convert import replace_values
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig

PROPOSED = 4
"""The number of proposals that a report shows."""


def smaller_settings(config: TrainConfig, world_size: int) -> list[str]:
    """Return overrides that need less memory, each valid on the same number of ranks, the cheapest in time first.

    A proposal is one change of the given configuration, such as ``recompute.mode=selective``; several can be combined.
    """
    found = []
    for changes in _candidates(config, world_size):
        if not violations(replace_values(config, changes), world_size):
            found.append(" ".join(f"{key}={_plain(value)}" for key, value in changes.items()))
    return found[:PROPOSED]


def _candidates(config: TrainConfig, world_size: int) -> Iterator[Mapping[str, Any]]:
    parallel = config.parallel
    dp = parallel.dp or world_size // (parallel.pp * parallel.cp * parallel.tp)
    if not config.loss.chunked:
        yield {"loss.chunked": True}
    if config.batch.micro_size > 1:
        yield {"batch.micro_size": config.batch.micro_size // 2}
    if parallel.zero.stage == 0 and dp > 1:
        yield {"parallel.zero.stage": 1}
    if config.recompute.mode == "none":
        yield {"recompute.mode": "selective"}
    if config.recompute.mode in ("none", "selective"):
        yield {"recompute.mode": "full"}
    if parallel.zero.stage in (1, 2) and dp > 1:
        yield {"parallel.zero.stage": parallel.zero.stage + 1}
    if dp % 2 == 0:
        yield {"parallel.tp": parallel.tp * 2, "parallel.dp": dp // 2}
        yield {"parallel.pp": parallel.pp * 2, "parallel.dp": dp // 2}
    if not parallel.zero.offload:
        yield {"parallel.zero.offload": True}


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
