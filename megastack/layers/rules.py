"""The tensor-parallel degrees over which all layers of a model can be split; torch-free.

Each layer's spec defines its own rules. This module combines them and lists the degrees that satisfy all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megastack.errors import Violation
from megastack.layers.attention_spec import AttentionSpec
from megastack.layers.spec import LayerSpec, divisors


def split_violations(
    attention: AttentionSpec, others: Sequence[LayerSpec], tp: int, *, sequence: int | None = None
) -> list[Violation]:
    """The rules that a split of these layers over ``tp`` ranks violates, each with the degrees that satisfy all rules.

    Args:
        attention: the attention layer; no degree exceeds its number of heads.
        others: the other layers.
        tp: the degree.
        sequence: S if hidden states are split along the sequence, else None.
    """
    layers = (attention, *others)
    legal = tuple(degree for degree in divisors(attention.heads) if not any(_split_errors(layers, degree, sequence)))
    return [Violation("parallel.tp", tp, rule, legal) for rule in _split_errors(layers, tp, sequence)]


def _split_errors(layers: Sequence[LayerSpec], tp: int, sequence: int | None) -> Iterator[str]:
    for layer in layers:
        yield from layer.split_errors(tp)
    if sequence is not None and sequence % tp:
        yield f"must divide batch.sequence_length={sequence} with parallel.sequence_parallel=true"
