"""A layer as a value: its parameters, the tensors it saves for backward, its FLOPs and its rules.

Each layer is built from its spec. Parameter counts, memory estimates, the split over stages and the rules of the
configuration add up the same specs, so each fact about a layer is stated once. Specs hold no tensor and import no
torch. This module defines the base class and the specs of the two layers that others consist of, linear layers and
norms.

Shapes: B microbatch, S sequence, D hidden, t tensor-parallel degree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, TypeVar

from megastack.errors import Violation
from megastack.mesh.shape import Axis
from megastack.placement.placement import Initialiser, Normal, Ones, Placement, Shard, Zeros

DEFAULT_INIT = Normal(0.02)


@dataclass(frozen=True)
class LocalMicrobatch:
    """One microbatch on one rank of a tensor-parallel group.

    Attributes:
        batch: B.
        sequence: S.
        rows: S/t if hidden states are split along the sequence, else S.
        tp: t.
        width: bytes of an activation.
        cpu: whether layers use the implementations for a CPU, which save more.
    """

    batch: int
    sequence: int
    rows: int
    tp: int
    width: int
    cpu: bool = True

    @property
    def wide(self) -> int:
        """Bytes of a value that is in fp32 or wider."""
        return max(self.width, 4)


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that a microbatch holds between its forward and its backward, or between its I and its W.

    Attributes:
        name: a description, unique in its unit.
        shape: the shape of this rank's part.
        width: bytes of an element.
        module: the name of the module in the block inside which it is saved; "" is the block itself.
        in_attend: whether it is saved inside ``attend``, which selective recompute runs again.
    """

    name: str
    shape: tuple[int, ...]
    width: int
    module: str = ""
    in_attend: bool = False

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.width

    def within(self, module: str) -> SavedTensor:
        """The same tensor, saved inside a module of this name."""
        return replace(self, module=module)


class LayerSpec(ABC):
    """Base class of layer specs; a subclass overrides the methods whose result is not zero or empty."""

    @abstractmethod
    def placements(self, tp: int = 1) -> dict[str, Placement]:
        """The parameters by name within the layer; ``tp`` determines the number of copies of a kv group."""

    def saved(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The tensors saved for backward in order of use, without the layer's input, which its parent counts."""
        return []

    def deferred(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The tensors held from I to W: inputs of inner linear layers, gradients of the outputs of all of them."""
        return []

    @property
    def matmul_parameters(self) -> int:
        """Weights that enter a matrix product with every token, without padding."""
        return 0

    @property
    def elements(self) -> int:
        """Elements of element-wise passes per token, a rough estimate for the split over stages."""
        return 0

    def flops(self, sequence: int, *, causal: bool = True) -> int:
        """Forward FLOPs per token of the matrix products; ``causal`` counts half of the attention scores."""
        return 2 * self.matmul_parameters

    def split_errors(self, tp: int) -> Iterator[str]:
        """The rules that degree ``tp`` violates, as text."""
        yield from ()

    def size_violations(self) -> list[Violation]:
        """The rules that the sizes violate on any number of ranks."""
        return []


Spec = TypeVar("Spec", bound=LayerSpec)


def spec_of(kind: type[Spec], options: object, **others: Any) -> Spec:
    """A spec whose fields come from attributes of the same names, except for the ``others``.

    A field that ``options`` does not have keeps its default. A new option of a layer therefore needs a field of its
    spec and a configuration key of the same name.
    """
    found = {each.name: getattr(options, each.name) for each in fields(kind) if hasattr(options, each.name)}  # type: ignore[arg-type]
    return kind(**found | others)


def named(prefix: str, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Placements with the name of a submodule as prefix."""
    return {f"{prefix}.{name}": placement for name, placement in placements.items()}


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, in order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


@dataclass(frozen=True)
class LinearSpec(LayerSpec):
    """A linear layer split over tp: by output features (column) or by input features (row).

    Args:
        in_features: the last dim of the input over all ranks.
        out_shape: the output dims over all ranks.
        shard: the dim of the weight ``(*out, in)`` that is split; the last one for a row-parallel layer.
        bias: whether there is a bias, initialised to zero, without weight decay.
        sequence_parallel: the input of a column-parallel layer, or the output of a row-parallel one, is split along the
            sequence over tp.
        init: the weight's initial values.
    """

    in_features: int
    out_shape: tuple[int, ...]
    shard: Shard
    bias: bool = False
    sequence_parallel: bool = False
    init: Initialiser = DEFAULT_INIT

    @property
    def is_row(self) -> bool:
        """Whether the input features are split."""
        return self.shard.dim == len(self.out_shape)

    def placements(self, tp: int = 1) -> dict[str, Placement]:
        """The weight ``(*out, in)`` and the bias ``(*out)``.

        A column-parallel bias is split like the output. A row-parallel bias is replicated and added after the
        reduction; under sequence parallelism each rank adds it to its own rows, so its gradient is partial over tp.
        """
        declared = {"weight": Placement((*self.out_shape, self.in_features), {Axis.TP: self.shard}, init=self.init)}
        if self.bias:
            shards = {} if self.is_row else {Axis.TP: self.shard}
            partial = sequence_partial(self.is_row and self.sequence_parallel)
            declared["bias"] = Placement(self.out_shape, shards, partial, Zeros(), decay=False)
        return declared

    @property
    def matmul_parameters(self) -> int:
        """All elements of the weight."""
        return prod(self.out_shape) * self.in_features


@dataclass(frozen=True)
class NormSpec(LayerSpec):
    """A norm over the last dim, with a replicated weight.

    Args:
        hidden: the size of the last dim.
        norm: ``rms`` (a weight) or ``layer`` (a weight and a bias).
        norm_eps: added to the mean square or the variance.
        sequence_parallel: the input is split over tp, so the gradients are partial over it.
    """

    hidden: int
    norm: str = "rms"
    norm_eps: float = 1e-5
    sequence_parallel: bool = False

    def placements(self, tp: int = 1) -> dict[str, Placement]:
        """The weight, initialised to one, and the bias, initialised to zero, both without weight decay."""
        partial, shape = sequence_partial(self.sequence_parallel), (self.hidden,)
        declared = {"weight": Placement(shape, partial=partial, init=Ones(), decay=False)}
        if self.norm == "layer":
            declared["bias"] = Placement(shape, partial=partial, init=Zeros(), decay=False)
        return declared

    def statistics(self, name: str, rows: tuple[int, ...], width: int) -> list[SavedTensor]:
        """One or two numbers for each row of an input ``(*rows, hidden)``."""
        kinds = ("mean", "scale") if self.norm == "layer" else ("scale",)
        return [SavedTensor(f"{name} {kind}", rows, width) for kind in kinds]

    @property
    def elements(self) -> int:
        """Two passes over the input, each of which reads and writes."""
        return 4 * self.hidden


def sequence_partial(sequence_parallel: bool) -> frozenset[Axis]:
    """The axes over which the gradient of a replicated parameter is partial, if its input is a split sequence."""
    return frozenset({Axis.TP} if sequence_parallel else ())
