"""One pre-norm Transformer block: attention and MLP, each after a norm and added to the residual stream.

A block receives its layers as factories that already hold their arguments, so it does not depend on their options, and
a user's block (``model.block={_target_: my_file.MyBlock}``) need not build them. If hidden states are split along the
sequence over tp, norms, dropout and residual additions operate on this rank's slice.

A block that passes more than hidden states to the next block names the values in ``boundary()``. It is then called with
them, in that order, and returns ``(hidden, *values)``; a value that no earlier block returned is None. The decoder
passes them on, also across pipeline stages. For example::

    class Counting(Block):
        def boundary(self) -> tuple[str, ...]:
            return ("count_BS",)

        def forward(self, hidden_BSD, context=None, count_BS=None):
            hidden_BSD = super().forward(hidden_BSD, context)
            return hidden_BSD, torch.ones_like(context.positions_BS) if count_BS is None else count_BS + 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from megastack.layers.context import Context
from megastack.layers.dropout import dropout
from megastack.layers.overrides import built_in
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.module import ParallelModule


class Block(ParallelModule):
    """A pre-norm block; only its two layers communicate.

    Args:
        hidden: width of the residual stream.
        mesh: the ranks to split over.
        layer: the block's global number, which is part of the names of its dropout sites.
        attention: builds the attention layer.
        mlp: builds the MLP.
        norm: builds a norm over ``hidden``.
        dropout: drop probability of the outputs of the two layers.
        sequence_parallel: hidden states are split along the sequence over tp.

    Attributes:
        uses_cache: a subclass that overrides a method sets it to True if generation may call it with only the new
            tokens, that is, if it mixes tokens only in its attention layers; earlier tokens are in ``context.cache``.
            The built-in class does not set it.
    """

    uses_cache: ClassVar[bool]

    def __init__(
        self,
        hidden: int,
        mesh: Mesh,
        *,
        layer: int,
        attention: Callable[[], nn.Module],
        mlp: Callable[[], nn.Module],
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.hidden = hidden
        self.layer = layer
        self.dropout = dropout
        self.sequence_group = mesh[Axis.TP] if sequence_parallel else None
        self.attention_norm = norm()
        self.attention = attention()
        self.mlp_norm = norm()
        self.mlp = mlp()

    @built_in
    def forward(self, hidden_BSD: Tensor, context: Context | None = None, *values: Any) -> Any:
        """Maps hidden states to hidden states; the values of :meth:`boundary` are returned unchanged after them."""
        if context is not None:  # reading the number would compile each block by itself
            context = context.within("blocks.*" if context.origin is not None else f"blocks.{self.layer}")
        attended_BSD = self.attention(self.attention_norm(hidden_BSD), context)
        hidden_BSD = hidden_BSD + self._drop(attended_BSD, context, "attention")
        hidden_BSD = hidden_BSD + self._drop(self.mlp(self.mlp_norm(hidden_BSD), context), context, "mlp")
        return (hidden_BSD, *values) if values else hidden_BSD

    @built_in
    def _drop(self, x_BSD: Tensor, context: Context | None, site: str) -> Tensor:
        return dropout(x_BSD, self.dropout, context, site, group=self.sequence_group, training=self.training)
