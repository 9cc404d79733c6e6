"""Layers of a user's own, some of which can run with a key/value cache and some of which need the whole row."""

from __future__ import annotations

import torch
from torch import nn

from megastack.layers.attention import ParallelAttention
from megastack.layers.mlp import ParallelMLP
from megastack.models.block import Block


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Each token's row moved to the next token, with zeros for the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


class Windowed(ParallelAttention):
    """Mixes each key with the previous one, which needs the whole row."""

    def attend(self, q_BSHK, k_BSGK, v_BSGK, context):  # type: ignore[no-untyped-def]
        return super().attend(q_BSHK, k_BSGK + shifted(k_BSGK), v_BSGK, context)


class Tempered(ParallelAttention):
    """Declares that it works with a cache, and does."""

    uses_cache = True

    def attend(self, q_BSHK, k_BSGK, v_BSGK, context):  # type: ignore[no-untyped-def]
        return super().attend(q_BSHK * 0.5, k_BSGK, v_BSGK, context)


class Renamed(ParallelAttention):
    """Overrides nothing."""


class Outer(Block):
    """Overrides the forward of a block."""

    def forward(self, hidden_BSD, context=None, *values):  # type: ignore[no-untyped-def]
        return super().forward(hidden_BSD, context, *values)


class TokenShift(ParallelMLP):
    """Adds the previous token to the output of an MLP."""

    def forward(self, hidden_BSD, context=None):  # type: ignore[no-untyped-def]
        return super().forward(hidden_BSD, context) + shifted(hidden_BSD)


class ShiftedActivation(ParallelMLP):
    """Adds the previous token between the two projections of an MLP."""

    def activate(self, up):  # type: ignore[no-untyped-def]
        inner_BSF = super().activate(up)
        return inner_BSF + shifted(inner_BSF)


class ShiftMixin:
    """Adds the previous token to the input of the class it is mixed into."""

    def forward(self, hidden_BSD, *others):  # type: ignore[no-untyped-def]
        return super().forward(hidden_BSD + shifted(hidden_BSD), *others)  # type: ignore[misc]


class MixedMLP(ShiftMixin, ParallelMLP):
    """A built-in MLP with the mixin."""


class MixedAttention(ShiftMixin, ParallelAttention):
    """A built-in attention with the mixin."""


class MixedBlock(ShiftMixin, Block):
    """A built-in block with the mixin."""


class AttendMixin:
    """An ``attend`` that is not one of this package."""

    def attend(self, q_BSHK, k_BSGK, v_BSGK, context):  # type: ignore[no-untyped-def]
        return super().attend(q_BSHK, k_BSGK + shifted(k_BSGK), v_BSGK, context)  # type: ignore[misc]


class MixedAttend(AttendMixin, Tempered):
    """The declaration of Tempered does not cover a mixin in front of it."""


class WrappedMLP(nn.Module):
    """A built-in MLP inside a user's module."""

    def __init__(self, *args, **options):  # type: ignore[no-untyped-def]
        super().__init__()
        self.inner = ParallelMLP(*args, **options)

    def forward(self, hidden_BSD, context=None):  # type: ignore[no-untyped-def]
        return self.inner(hidden_BSD + shifted(hidden_BSD), context)


class HookedMLP(ParallelMLP):
    """A built-in MLP whose down projection has a hook."""

    def __init__(self, *args, **options):  # type: ignore[no-untyped-def]
        super().__init__(*args, **options)
        self.down.register_forward_hook(lambda module, given, out: out + shifted(out))


class DeclaredHookedMLP(HookedMLP):
    """The declaration of a class does not cover hooks."""

    uses_cache = True


class SetOnInstance(ParallelMLP):
    """A built-in MLP with a method set on the instance."""

    def __init__(self, *args, **options):  # type: ignore[no-untyped-def]
        super().__init__(*args, **options)
        usual = self.activate
        self.activate = lambda up: usual(up + shifted(up))  # type: ignore[method-assign]


class Doubled(ParallelMLP):
    """Works on each token independently and declares it."""

    uses_cache = True

    def __init__(self, hidden, ffn, mesh, **options):  # type: ignore[no-untyped-def]
        super().__init__(hidden, ffn, mesh, **options)
        self.scale = nn.Identity()

    def activate(self, up):  # type: ignore[no-untyped-def]
        return self.scale(super().activate(up) * 2)


class DoubledBehind(Doubled):
    """Inherits the declaration together with the methods."""
