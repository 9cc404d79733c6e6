"""Fault localization: the first module whose inputs match the reference on every rank while its output does not.

One rank alone cannot decide this. A layer that uses a local index as a global one is correct on the first rank, where
only the modules after it look wrong. Ranks therefore exchange, for every module, whether its tensors match their part
of the reference, and all reach the same conclusion.

A wrong value that an enclosing module corrects (a partial sum that is reduced there) is not a fault. A module whose
class is not user-defined (a layer of the package or of torch) is at fault only if no enclosing class is user-defined:
the code that calls the package's layers chooses their inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from megastack.comm.objects import all_gather_objects
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.testing.module_trace import ModuleTrace, TensorKey, TPRank, relative_difference, tp_shard

Side = Literal["forward", "backward"]
LIBRARIES = ("megastack", "torch")
"""Packages whose classes are not user-defined."""


@dataclass(frozen=True)
class ModuleClasses:
    """The class of every module by its name in the model, and the modules with a user-defined class.

    The outermost module has an empty name.
    """

    by_name: Mapping[str, str]
    user: frozenset[str] = frozenset()

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> ModuleClasses:
        """The classes as written in the source, without the wrappers of FSDP2 or of a parametrization."""
        written = {name: _written_class(module) for name, module in modules.items()}
        user = frozenset(name for name, each in written.items() if _top_package(each) not in LIBRARIES)
        return cls({name: each.__name__ for name, each in written.items()}, user)

    @classmethod
    def merged(cls, parts: Sequence[ModuleClasses]) -> ModuleClasses:
        """The classes of several ranks."""
        by_name = {name: each for part in parts for name, each in part.by_name.items()}
        return cls(by_name, frozenset().union(*(part.user for part in parts)))

    def user_module(self, name: str) -> str | None:
        """The innermost user-defined module that encloses ``name`` or is ``name``."""
        return next((outer for outer in enclosing(name) if outer in self.user), None)

    def responsible_class(self, name: str) -> str | None:
        """The class of :meth:`user_module`, or else the module's own."""
        module = self.user_module(name)
        return self.by_name.get(name if module is None else module)

    def label(self, name: str) -> str:
        """The name with its class."""
        kind = self.by_name.get(name)
        return f"{name or 'the layer'} ({kind})" if kind else name


def _written_class(module: nn.Module) -> type:
    candidates = (each for each in type(module).__mro__ if _top_package(each) != "torch" and each is not object)
    return next(candidates, type(module))


def _top_package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def is_packaged(module: nn.Module) -> bool:
    """Whether a module's class belongs to megastack."""
    return _top_package(_written_class(module)) == "megastack"


def enclosing(name: str) -> Iterator[str]:
    """A module's name and the names of the modules that enclose it, innermost first; the outermost is empty."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def is_within(name: str, outer: str) -> bool:
    """Whether a module is ``outer`` or a submodule of it."""
    return name == outer or not outer or name.startswith(outer + ".")


@dataclass(frozen=True)
class Agreement:
    """Whether the tensors of a module match the reference; None if unknown.

    The received tensors (``inputs``, ``output_gradients``) match only if all of them can be compared.
    """

    inputs: bool | None
    outputs: bool | None
    output_gradients: bool | None = None
    input_gradients: bool | None = None


class ComparedTensor(NamedTuple):
    """A tensor of this rank, the same part of the reference, and the relative difference."""

    relative: float
    actual: Tensor
    expected: Tensor


def compare_tensors(
    expected: Mapping[TensorKey, Tensor], actual: Mapping[TensorKey, Tensor], place: TPRank
) -> dict[TensorKey, ComparedTensor]:
    """The tensors that can be compared with a part of the reference."""
    compared = {}
    for key, x in actual.items():
        part = tp_shard(expected[key], x.shape, place) if key in expected else None
        if part is not None and x.numel():
            compared[key] = ComparedTensor(relative_difference(part, x, expected[key]), x, part)
    return compared


def agreements(expected: ModuleTrace, actual: ModuleTrace, place: TPRank, tolerance: float) -> dict[str, Agreement]:
    """The agreement of every module in both traces, in the order of the reference."""

    def matches(name: str, what: str, *, all_of_it: bool) -> bool | None:
        local: Mapping[TensorKey, Tensor] = getattr(actual[name], what)
        compared = compare_tensors(getattr(expected[name], what), local, place)
        if not all(each.relative <= tolerance for each in compared.values()):
            return False
        return True if compared and (len(compared) == len(local) or not all_of_it) else None

    return {
        name: Agreement(
            matches(name, "inputs", all_of_it=True),
            matches(name, "outputs", all_of_it=False),
            matches(name, "output_gradients", all_of_it=True),
            matches(name, "input_gradients", all_of_it=False),
        )
        for name in expected
        if name in actual
    }


def merge_agreements(parts: Sequence[Mapping[str, Agreement]], order: Sequence[str]) -> dict[str, Agreement]:
    """The agreement over several ranks: a tensor matches if it does on all of them, and differs if it does on one."""

    def combined(flags: Collection[bool | None]) -> bool | None:
        return False if False in flags else None if None in flags else True

    merged = {}
    for name in order:
        by_rank = [part[name] for part in parts if name in part]
        if by_rank:
            sides = zip(*((a.inputs, a.outputs, a.output_gradients, a.input_gradients) for a in by_rank), strict=True)
            merged[name] = Agreement(*(combined(flags) for flags in sides))
    return merged


@dataclass(frozen=True)
class FaultyModule:
    """A module at fault.

    Attributes:
        module: its name.
        side: ``forward`` or ``backward``.
        proven: whether everything it receives matches the reference, so that the fault must be its own.
        first: the first module inside (or itself) with correct inputs and a wrong output.
        misfed: the first module inside that already receives wrong inputs, which code of ``module`` passes; if any.
    """

    module: str
    side: Side
    proven: bool
    first: str
    misfed: str | None = None


def localize_forward(merged: Mapping[str, Agreement], classes: ModuleClasses) -> FaultyModule | None:
    """The first module at fault in the forward pass, from the merged agreements in the order of the reference."""
    wrong = [name for name, a in merged.items() if a.outputs is False and not _is_corrected(name, merged)]
    proven = [name for name in wrong if merged[name].inputs]
    if not wrong:
        return None
    first = (proven or wrong)[0]
    candidates = [name for name, a in merged.items() if a.outputs is not True and a.inputs is not False]
    module = _innermost_user_module(first, candidates, classes)
    misfed = next((name for name, a in merged.items() if _is_inside(name, module) and a.inputs is False), None)
    return FaultyModule(module, "forward", bool(proven), first, misfed if first == module else None)


def localize_backward(merged: Mapping[str, Agreement], classes: ModuleClasses) -> FaultyModule | None:
    """The first module at fault in the backward pass, which starts from the loss.

    The gradient of its output is correct, and the gradient of its input is wrong.
    """
    wrong = [name for name, a in reversed(list(merged.items())) if a.input_gradients is False and a.output_gradients]
    if not wrong:
        return None
    first = wrong[0]
    while inner := [name for name in wrong if _is_inside(name, first)]:
        first = inner[0]
    return FaultyModule(_innermost_user_module(first, wrong, classes), "backward", True, first)


def _is_corrected(name: str, merged: Mapping[str, Agreement]) -> bool:
    return any(outer in merged and merged[outer].outputs for outer in enclosing(name) if outer != name)


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and is_within(name, outer)


def _innermost_user_module(name: str, candidates: Collection[str], classes: ModuleClasses) -> str:
    return next((outer for outer in enclosing(name) if outer in candidates and outer in classes.user), name)


@dataclass(frozen=True)
class Deviation:
    """A module at fault on one rank: the tensors it produced, compared with the reference."""

    faulty: FaultyModule
    tensors: Mapping[TensorKey, ComparedTensor]

    @property
    def relative(self) -> float:
        """The largest difference relative to the largest element of the reference."""
        return max((each.relative for each in self.tensors.values()), default=0.0)


@dataclass(frozen=True)
class RankDeviations:
    """The deviations on one rank, its replicated vectors in that forward, and the classes of all ranks."""

    coordinates: Mapping[Axis, int]
    deviations: Sequence[Deviation]
    vectors: Mapping[str, Tensor]
    classes: ModuleClasses


def find_deviations(
    mesh: Mesh, classes: ModuleClasses, traces: Sequence[tuple[ModuleTrace, ModuleTrace]], tolerance: float
) -> tuple[list[Deviation], ModuleClasses]:
    """Find the modules at fault in the forward and in the backward pass. Must be called on all ranks.

    Args:
        mesh: the mesh.
        classes: the classes of this rank's modules.
        traces: for each watched microbatch the trace of the reference and the trace of this rank; the same number on
            every rank.
        tolerance: the relative difference that rounding may cause.

    Returns:
        At most one deviation for each pass, and the classes of all ranks.
    """
    tp = mesh[Axis.TP]
    place = TPRank(tp.rank, tp.size)
    local = [agreements(expected, actual, place, tolerance) for expected, actual in traces]
    by_rank = all_gather_objects((local, classes), mesh.world)
    everywhere = ModuleClasses.merged([theirs for _, theirs in by_rank])
    deviations: dict[Side, Deviation] = {}
    for at, (expected, actual) in enumerate(traces):
        merged = merge_agreements([theirs[at] for theirs, _ in by_rank], list(expected))
        for faulty in (localize_forward(merged, everywhere), localize_backward(merged, everywhere)):
            before = deviations.get(faulty.side) if faulty else None
            if faulty and (before is None or (faulty.proven and not before.faulty.proven)):
                deviations[faulty.side] = Deviation(faulty, _produced(faulty, expected, actual, place))
    return list(deviations.values()), everywhere


def _produced(
    faulty: FaultyModule, expected: ModuleTrace, actual: ModuleTrace, place: TPRank
) -> dict[TensorKey, ComparedTensor]:
    """The tensors that a module at fault produced on this rank: its outputs, or the gradients of its inputs."""
    if faulty.module not in actual:
        return {}
    reference, call = expected[faulty.module], actual[faulty.module]
    if faulty.side == "forward":
        return compare_tensors(reference.outputs, call.outputs, place)
    return compare_tensors(reference.input_gradients, call.input_gradients, place)
