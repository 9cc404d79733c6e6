"""Which module is at fault: the first whose inputs agree with the reference on every rank, and whose output does not.

One rank alone cannot tell. A layer that uses a local index for a global one is right on the first rank, and there
only what comes after it looks wrong. So ranks exchange, for every module, whether its tensors agree with their part of
the reference, and all of them draw the same conclusion.

A wrong value that the module around it puts right (a partial sum that is reduced there) is no fault. A module without a
class of its own in the user's code (a layer of the package, of torch) is at fault only where no class of the user
around it is: what the package computes with is given to it by whoever calls it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from megastack.comm.objects import all_gather_objects
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.testing.module_trace import ModuleTrace, Place, TensorKey, relative_difference, share_of

Side = Literal["forward", "backward"]
FOREIGN = ("megastack", "torch")
"""Packages whose classes are not the user's."""


@dataclass(frozen=True)
class Classes:
    """The class of every module by its name in the model, and which of them are the user's.

    The name of the outermost module is empty.
    """

    by_name: Mapping[str, str]
    own: frozenset[str] = frozenset()

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> Classes:
        """The classes of modules, as they were written: without what FSDP2 or a parametrization puts around them."""
        written = {name: _written(module) for name, module in modules.items()}
        own = frozenset(name for name, each in written.items() if not _foreign(each))
        return cls({name: each.__name__ for name, each in written.items()}, own)

    @classmethod
    def merged(cls, parts: Sequence[Classes]) -> Classes:
        """Those of several ranks."""
        by_name = {name: each for part in parts for name, each in part.by_name.items()}
        return cls(by_name, frozenset().union(*(part.own for part in parts)))

    def owner(self, name: str) -> str | None:
        """The innermost module of a class of the user's around ``name``, itself included."""
        return next((outer for outer in around(name) if outer in self.own), None)

    def owner_class(self, name: str) -> str | None:
        """The class of :meth:`owner`, or else the module's own."""
        own = self.owner(name)
        return self.by_name.get(name if own is None else own)

    def label(self, name: str) -> str:
        """The name with its class."""
        kind = self.by_name.get(name)
        return f"{name or 'the layer'} ({kind})" if kind else name


def _written(module: nn.Module) -> type:
    found = (each for each in type(module).__mro__ if each.__module__.partition(".")[0] != "torch")
    return next((each for each in found if each is not object), type(module))


def is_packaged(module: nn.Module) -> bool:
    """Whether a module's class is the package's."""
    return _written(module).__module__.partition(".")[0] == "megastack"


def _foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in FOREIGN


def around(name: str) -> Iterator[str]:
    """A module's name and those of the modules around it, innermost first; the outermost has an empty one."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def inside(name: str, outer: str) -> bool:
    """Whether a module is another one or a part of it."""
    return name == outer or not outer or name.startswith(outer + ".")


@dataclass(frozen=True)
class Agreement:
    """Whether the tensors of a module agree with the reference; None where that cannot be said.

    What it was given (``inputs``, ``output_gradients``) agrees only if all of it can be compared.
    """

    inputs: bool | None
    outputs: bool | None
    output_gradients: bool | None = None
    input_gradients: bool | None = None


Pair = tuple[float, Tensor, Tensor]
"""How far a tensor of this rank is off, it, and the same part of the reference."""


def pairs_of(
    expected: Mapping[TensorKey, Tensor], actual: Mapping[TensorKey, Tensor], place: Place
) -> dict[TensorKey, Pair]:
    """The tensors that can be compared."""
    found = {}
    for slot, x in actual.items():
        piece = share_of(expected[slot], x.shape, place) if slot in expected else None
        if piece is not None and x.numel():
            found[slot] = (relative_difference(piece, x, expected[slot]), x, piece)
    return found


def agreements(expected: ModuleTrace, actual: ModuleTrace, place: Place, tolerance: float) -> dict[str, Agreement]:
    """Of every module that both traces have, in the order of the reference."""

    def agrees(name: str, what: str, *, wholly: bool) -> bool | None:
        here: Mapping[TensorKey, Tensor] = getattr(actual[name], what)
        found = pairs_of(getattr(expected[name], what), here, place)
        if not all(off <= tolerance for off, _, _ in found.values()):
            return False
        return True if found and (len(found) == len(here) or not wholly) else None

    return {
        name: Agreement(
            agrees(name, "inputs", wholly=True),
            agrees(name, "outputs", wholly=False),
            agrees(name, "output_gradients", wholly=True),
            agrees(name, "input_gradients", wholly=False),
        )
        for name in expected
        if name in actual
    }


def merge(parts: Sequence[Mapping[str, Agreement]], order: Sequence[str]) -> dict[str, Agreement]:
    """What several ranks say of each module: it agrees if it does on all of them, and differs if it does on one."""

    def together(flags: Collection[bool | None]) -> bool | None:
        return False if False in flags else None if None in flags else True

    found = {}
    for name in order:
        here = [part[name] for part in parts if name in part]
        if here:
            sides = zip(*((a.inputs, a.outputs, a.output_gradients, a.input_gradients) for a in here), strict=True)
            found[name] = Agreement(*(together(flags) for flags in sides))
    return found


@dataclass(frozen=True)
class Blame:
    """A module that is at fault.

    Attributes:
        module: its name.
        side: ``forward`` or ``backward``.
        proven: whether everything that it was given agrees, so that the fault is its own.
        first: the first module inside (or itself) that is given what is right and gives what is wrong.
        handed: the first module inside that is given what is wrong already, by code of ``module`` then; if any.
    """

    module: str
    side: Side
    proven: bool
    first: str
    handed: str | None = None


def blame_forward(found: Mapping[str, Agreement], classes: Classes) -> Blame | None:
    """The first module at fault in the forward, from the merged agreements in the order of the reference."""
    wrong = [name for name, a in found.items() if a.outputs is False and not _put_right(name, found)]
    proven = [name for name in wrong if found[name].inputs]
    if not wrong:
        return None
    first = (proven or wrong)[0]
    able = [name for name, a in found.items() if a.outputs is not True and a.inputs is not False]
    module = _innermost_own(first, able, classes)
    handed = next((name for name, a in found.items() if _within(name, module) and a.inputs is False), None)
    return Blame(module, "forward", bool(proven), first, handed if first == module else None)


def blame_backward(found: Mapping[str, Agreement], classes: Classes) -> Blame | None:
    """The innermost module around the first break seen from the loss.

    The gradient of its output is right, and the one that it sends to its input is wrong.
    """
    broken = [name for name, a in reversed(list(found.items())) if a.input_gradients is False and a.output_gradients]
    if not broken:
        return None
    first = broken[0]
    while inner := [name for name in broken if _within(name, first)]:
        first = inner[0]
    return Blame(_innermost_own(first, broken, classes), "backward", True, first)


def _put_right(name: str, found: Mapping[str, Agreement]) -> bool:
    return any(outer in found and found[outer].outputs for outer in around(name) if outer != name)


def _within(name: str, outer: str) -> bool:
    return name != outer and inside(name, outer)


def _innermost_own(name: str, able: Collection[str], classes: Classes) -> str:
    return next((outer for outer in around(name) if outer in able and outer in classes.own), name)


@dataclass(frozen=True)
class Deviation:
    """A module at fault as one rank sees it: what it gave, and what it should have given, by slot."""

    blame: Blame
    tensors: Mapping[TensorKey, Pair]

    @property
    def relative(self) -> float:
        """The largest difference over the largest element of the reference."""
        return max((off for off, _, _ in self.tensors.values()), default=0.0)


@dataclass(frozen=True)
class RankDeviations:
    """The modules at fault with this rank's tensors, its replicated vectors as they were then, and all classes."""

    coordinates: Mapping[Axis, int]
    errors: Sequence[Deviation]
    vectors: Mapping[str, Tensor]
    classes: Classes


def find_deviations(
    mesh: Mesh, classes: Classes, traces: Sequence[tuple[ModuleTrace, ModuleTrace]], tolerance: float
) -> tuple[list[Deviation], Classes]:
    """The modules at fault in the forward and in the backward, if any, and the classes of all ranks; all ranks call.

    Args:
        mesh: the layout.
        classes: of this rank's modules.
        traces: for each watched microbatch the reference's trace and this rank's, on all ranks equally many.
        tolerance: the relative difference that rounding may make.
    """
    tp = mesh[Axis.TP]
    place = Place(tp.rank, tp.size)
    found = [agreements(expected, actual, place, tolerance) for expected, actual in traces]
    by_rank = all_gather_objects((found, classes), mesh.world)
    everywhere = Classes.merged([theirs for _, theirs in by_rank])
    errors: dict[Side, Deviation] = {}
    for at, (expected, actual) in enumerate(traces):
        merged = merge([theirs[at] for theirs, _ in by_rank], list(expected))
        for blame in (blame_forward(merged, everywhere), blame_backward(merged, everywhere)):
            before = errors.get(blame.side) if blame else None
            if blame and (before is None or (blame.proven and not before.blame.proven)):
                errors[blame.side] = Deviation(blame, _tensors(blame, expected, actual, place))
    return list(errors.values()), everywhere


def _tensors(blame: Blame, expected: ModuleTrace, actual: ModuleTrace, place: Place) -> dict[TensorKey, Pair]:
    if blame.module not in actual:
        return {}
    what = "outputs" if blame.side == "forward" else "input_gradients"
    return pairs_of(getattr(expected[blame.module], what), getattr(actual[blame.module], what), place)
