"""The feed-forward layer as a value: parameters, saved tensors, FLOPs and rules; torch-free.

The layer is :class:`megastack.layers.mlp.ParallelMLP`. Shapes: B microbatch, S sequence, D hidden, F inner features,
t tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megastack.errors import Violation
from megastack.layers.spec import DEFAULT_INIT, LayerSpec, LinearSpec, LocalMicrobatch, SavedTensor, named
from megastack.placement.placement import Initialiser, Placement, Shard

GATED = {"swiglu": True, "gelu": False}
"""The activations, and whether the up projection has a gate."""


@dataclass(frozen=True)
class MLPSpec(LayerSpec):
    """An up projection, a non-linearity and a down projection; fields as for ``ParallelMLP``.

    Args:
        hidden: D.
        ffn: F.
        activation: ``swiglu`` or ``gelu``.
        bias: biases in both projections.
        sequence_parallel: input and output are split along the sequence over tp.
        init: initial values of the up projection.
        out_init: initial values of the down projection; None means ``init``.
    """

    hidden: int
    ffn: int
    activation: str = "swiglu"
    bias: bool = False
    sequence_parallel: bool = False
    init: Initialiser = DEFAULT_INIT
    out_init: Initialiser | None = None

    @property
    def gated(self) -> bool:
        """Whether the up projection produces a gate and a value."""
        return GATED[self.activation]

    @property
    def up(self) -> LinearSpec:
        """The up projection, split on F so that each rank holds matching features of gate and value."""
        out_shape = (2, self.ffn) if self.gated else (self.ffn,)
        shard = Shard(len(out_shape) - 1)
        return LinearSpec(self.hidden, out_shape, shard, self.bias, self.sequence_parallel, self.init)

    @property
    def down(self) -> LinearSpec:
        """The down projection."""
        init = self.out_init or self.init
        return LinearSpec(self.ffn, (self.hidden,), Shard(1), self.bias, self.sequence_parallel, init)

    def placements(self, tp: int = 1) -> dict[str, Placement]:
        """The two projections."""
        return named("up", self.up.placements()) | named("down", self.down.placements())

    def saved(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The output of the up projection, and the activated features, which the down projection reads."""
        up, inner = self._up_shape(microbatch), self._inner_shape(microbatch)
        name = "gate and up" if self.gated else "up"
        return [SavedTensor(name, up, microbatch.width), SavedTensor("activated", inner, microbatch.width)]

    def deferred(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The gradients of both outputs and the input of the down projection."""
        whole, width = (microbatch.batch, microbatch.sequence, self.hidden), microbatch.width
        name = "gradient of gate and up" if self.gated else "gradient of up"
        return [
            SavedTensor(name, self._up_shape(microbatch), width),
            SavedTensor("activated", self._inner_shape(microbatch), width),
            SavedTensor("gradient of mlp", whole, width),
        ]

    def _inner_shape(self, microbatch: LocalMicrobatch) -> tuple[int, ...]:
        return microbatch.batch, microbatch.sequence, self.ffn // microbatch.tp

    def _up_shape(self, microbatch: LocalMicrobatch) -> tuple[int, ...]:
        inner = self._inner_shape(microbatch)
        return (*inner[:2], 2, inner[2]) if self.gated else inner

    @property
    def matmul_parameters(self) -> int:
        """The two projections."""
        return self.up.matmul_parameters + self.down.matmul_parameters

    @property
    def elements(self) -> int:
        """The activation."""
        return 4 * self.ffn

    def split_errors(self, tp: int) -> Iterator[str]:
        """Inner features must be split evenly."""
        if self.ffn % tp:
            yield f"must divide model.ffn={self.ffn}"

    def size_violations(self) -> list[Violation]:
        """The activation must be a built-in one."""
        if self.activation in GATED:
            return []
        return [Violation("model.activation", self.activation, "unknown", (*GATED, "a subclass of ParallelMLP"))]
