"""Which degrees of tensor parallelism the layers can be split over: predicates without torch, configuration or ranks.

The layers raise when they are built on sizes that do not fit; these say the same before anything is built, and which
degrees would fit. Sizes come by keyword under the layers' own argument names; ``name`` turns those into the names that
the reader of the message knows.

Shapes: S sequence, D hidden, F ffn, H heads, G kv groups, K head dim, V vocab, t tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megastack.errors import Violation

Name = Callable[[str], str]


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, in order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def padded_vocab(vocab: int, vocab_multiple: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple that does not depend on the degree."""
    return -(-vocab // vocab_multiple) * vocab_multiple


@dataclass(frozen=True)
class SplitSizes:
    """The sizes that tensor parallelism cuts.

    Args:
        heads: H.
        kv_groups: G.
        ffn: F.
        vocab: V.
        vocab_multiple: the embedding's rows are padded to a multiple of this.
        sequence: S where it is split over tp between the layers, else None.
    """

    heads: int
    kv_groups: int
    ffn: int
    vocab: int
    vocab_multiple: int = 128
    sequence: int | None = None

    def fits(self, tp: int) -> bool:
        """Whether every layer can be split over ``tp`` ranks."""
        return not any(True for _ in self.broken(tp))

    def degrees(self) -> list[int]:
        """Every degree over which all layers can be split."""
        return [tp for tp in divisors(self.heads) if self.fits(tp)]

    def broken(self, tp: int, name: Name = str) -> Iterator[str]:
        """The rules that degree ``tp`` breaks, in words."""
        if self.heads % tp:
            yield f"must divide {name('heads')}={self.heads}"
        if self.kv_groups % tp and tp % self.kv_groups:
            yield f"must divide {name('kv_groups')}={self.kv_groups} or be a multiple of it"
        if self.ffn % tp:
            yield f"must divide {name('ffn')}={self.ffn}"
        rows = padded_vocab(self.vocab, self.vocab_multiple)
        if rows % tp:
            yield f"must divide {name('vocab')}={self.vocab} padded to {rows} by {name('vocab_multiple')}"
        if self.sequence is not None and self.sequence % tp:
            yield f"must divide {name('sequence')}={self.sequence} with {name('sequence_parallel')}=true"


def split_violations(sizes: SplitSizes, tp: int, name: Name = str) -> list[Violation]:
    """What stands against splitting layers of these sizes over ``tp`` ranks, with the degrees that would do."""
    legal = tuple(sizes.degrees())
    return [Violation(name("tp"), tp, rule, legal) for rule in sizes.broken(tp, name)]


def head_violations(
    hidden: int, heads: int, kv_groups: int | None, head_dim: int | None, *, rotary: bool, name: Name = str
) -> list[Violation]:
    """What stands against attention with these sizes on any number of ranks."""
    found = []
    if kv_groups is not None and heads % kv_groups:
        rule = f"must divide {name('heads')}={heads}"
        found.append(Violation(name("kv_groups"), kv_groups, rule, tuple(divisors(heads))))
    if head_dim is None and hidden % heads:
        rule = f"must divide {name('hidden')}={hidden} where {name('head_dim')} is null"
        found.append(Violation(name("heads"), heads, rule, tuple(divisors(hidden))))
    width = head_dim or hidden // heads
    if rotary and width % 2:
        rule = f"rotary positions pair components, so the width of a head ({width}) must be even"
        found.append(Violation(name("head_dim"), head_dim, rule, (width + 1,)))
    return found
