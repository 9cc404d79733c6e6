"""What a key may be set to while the feature behind its other values is not built.

The schema has every key from the start, so that configurations, plans and documentation do not change shape. A feature
that is built takes its line out of :data:`WORKS`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megastack.config.convert import UNUSABLE, value_of
from megastack.config.schema import TrainConfig
from megastack.errors import Violation

WORKS: Mapping[str, tuple[Any, ...]] = {
    "compile": (False,),
    "parallel.cp": (1,),
    "parallel.ep": (1,),
    "schedule.memory_limit": (None,),
    "loss.chunked": (False,),
    "observe.trace_steps": ([],),
}
"""Key to the values that work today; a key that is not here takes every value its type and the rules allow."""


def not_available(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """A violation for each key that asks for a feature which is not built."""
    for key, works in WORKS.items():
        value = value_of(config, key)
        if value is not UNUSABLE and value not in works:
            yield Violation(key, value, "not available yet", works)
