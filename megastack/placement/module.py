"""Modules that declare their parameters: placements by global name, and initial values.

A :class:`ParallelModule` declares every parameter it owns in :meth:`~ParallelModule.placements`; users subclass it or
one of the layers built on it. :func:`placements_of` collects the declarations of a model and checks them against its
tensors, and :func:`initialise_` sets the initial values. Global names are the model's own parameter names, so a model
that keys its blocks by the global layer number has the same names on every stage. A sharded persistent buffer is
declared in the same way (:func:`buffer_placements_of`).

Initial values are a function of the seed, the parameter's global name and each element's global index, so every layout
starts from the same weights and a rank evaluates only its own shard. Padding is zero.

Example::

    class Scale(ParallelModule):
        def __init__(self, hidden: int, mesh: Mesh) -> None:
            super().__init__(mesh)
            self.hidden = hidden
            self.create_parameters()

        def placements(self) -> dict[str, Placement]:
            return {"weight": Placement((self.hidden,), init=Ones())}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import TypeVar

import torch
from torch import Tensor, nn

from megastack.errors import PlacementError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import Box, divisibility_errors, local_box, local_shape
from megastack.placement.buffers import (
    materialise_buffers_,
    named_buffers,
    persistent_buffers,
    unfillable_buffers,
)
from megastack.placement.placement import Normal, Ones, Placement, Zeros
from megastack.random import counter_normal
from megastack.torch_private import buffers_of, parameters_of

BoxView = tuple[Box, Tensor]
"""A box of a tensor, and a view of its elements."""


class ReshardPolicy(Enum):
    """When FSDP frees the gathered parameters of a unit, under ``parallel.zero.gather=microbatch``.

    A unit is a sub-module whose parameters are used only by calling it: an embedding, a block, a head.
    """

    AFTER_FORWARD = auto()
    """Free them after the forward; gather them again for the backward."""
    FORWARD_ONLY = auto()
    """Free them after the forward; the backward reads no parameter (a lookup)."""
    AFTER_BACKWARD = auto()
    """Keep them from the forward to the backward, which follows immediately."""
    WITH_STAGE = auto()
    """Shard, gather and keep them with the stage's own parameters: FSDP does not wrap the unit."""


class ParallelModule(nn.Module):
    """A module that has a mesh and declares the placement of each parameter it owns.

    Subclasses override :meth:`placements` and call :meth:`create_parameters` at the end of their ``__init__``.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def placements(self) -> dict[str, Placement]:
        """The placement of each parameter of this module, and of each buffer that needs one, by local name.

        A dotted name declares a parameter or buffer of a plain ``nn.Module`` child.
        """
        return {}

    def boundary(self) -> tuple[str, ...]:
        """The names of the values, besides hidden states, that this block reads and returns; stages pass them on."""
        return ()

    def create_parameters(self) -> None:
        """Allocate the declared parameters of this module itself, with their local shapes and initial values.

        Skips names that are registered as buffers. Uses the default dtype and device. The values are drawn with seed 0
        and the local name, which is enough to try a layer on its own; :func:`initialise_` sets the values of a model.
        On the meta device nothing is filled.
        """
        for name, placement in self.placements().items():
            if "." in name or name in buffers_of(self):
                continue
            tensor = torch.empty(local_shape(placement, self.mesh.shape))
            fill_(tensor, placement, self.mesh.shape, self.mesh.coordinates, seed=0, name=name)
            self.register_parameter(name, nn.Parameter(tensor))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As in torch; a declared buffer replaces the parameter that the base class created from its declaration."""
        if name in parameters_of(self) and name in self.placements():
            del parameters_of(self)[name]
        super().register_buffer(name, tensor, persistent)


def placements_of(module: nn.Module) -> dict[str, Placement]:
    """The placement of every parameter of a model by global name; a tied parameter once, under its first name.

    Raises:
        PlacementError: lists every error in one message: parameters without a placement, with a wrong local shape, with
            a dim that the mesh does not divide or with conflicting declarations; declarations that match neither a
            parameter nor a persistent buffer; invalid declarations of buffers.
    """
    declared, errors = _declarations(module)
    names = _aliases(module.named_parameters(remove_duplicate=False))
    buffers = _aliases(named_buffers(module, persistent=True))
    known = {name for aliases in (*names.values(), *buffers.values()) for name in aliases}
    transient = {name for name, _ in named_buffers(module, persistent=False)}
    errors += [
        f"{name}: declared, but the buffer is not persistent and in no checkpoint; drop the one or the other"
        if name in transient
        else f"{name}: declared, but the module has no such parameter or persistent buffer"
        for name in declared
        if name not in known
    ]
    errors += [error for buffer, aliases in buffers.items() for error in _buffer_errors(aliases, buffer, declared)]
    found: dict[str, Placement] = {}
    for parameter, aliases in names.items():
        declarations = [declared[name] for name in aliases if name in declared]
        if not declarations:
            errors.append(f"{aliases[0]}: has no placement; declare it in placements() of the module that owns it")
            continue
        found[aliases[0]] = declarations[0][0]
        errors += _tensor_errors(aliases, parameter, declarations)
    if errors:
        raise PlacementError("\n".join(errors))
    return found


def buffer_placements_of(module: nn.Module) -> dict[str, Placement]:
    """The placement of every persistent buffer by global name: as declared, or replicated on every rank."""
    declared, _ = _declarations(module)
    aliases = _aliases(named_buffers(module, persistent=True))
    found = {}
    for name, buffer in persistent_buffers(module).items():
        placement = next((declared[alias][0] for alias in aliases[buffer] if alias in declared), None)
        found[name] = placement or Placement(tuple(buffer.shape), init=Zeros())
    return found


def check_buffers(module: nn.Module) -> None:
    """Check that every buffer has values, or a declaration of its initial values.

    Raises:
        PlacementError: lists each buffer on the meta device without declared initial values.
    """
    declared, _ = _declarations(module)
    if errors := list(unfillable_buffers(module, {name: placement for name, (placement, _) in declared.items()})):
        raise PlacementError("\n".join(errors))


def initialise_(
    module: nn.Module,
    mesh: Mesh,
    seed: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Set every parameter to its initial values: a function of the seed, the global name and the global index.

    Parameters on the meta device are allocated first, on ``device`` or else the mesh's device; other parameters are
    moved if a ``device`` or ``dtype`` is given. Buffers keep their dtype and values and are moved with them; buffers on
    the meta device are filled by the ``init`` of their placement. Tied parameters stay tied. Nothing is communicated.

    Raises:
        PlacementError: see :func:`placements_of` and :func:`check_buffers`.
    """
    placements = placements_of(module)
    check_buffers(module)
    _materialise_(module, dtype, device, mesh.device)
    unfilled = materialise_buffers_(module, device, mesh.device)
    placements |= buffer_placements_of(module) if unfilled else {}
    tensors = dict(module.named_parameters()) | unfilled
    for name, tensor in tensors.items():
        fill_(tensor.detach(), placements[name], mesh.shape, mesh.coordinates, seed=seed, name=name)


@torch.no_grad()
def fill_(
    tensor: Tensor,
    placement: Placement,
    mesh_shape: MeshShape,
    coordinates: Mapping[Axis, int],
    *,
    seed: int,
    name: str,
) -> None:
    """Fill the local tensor of a parameter with its initial values, in place; on the meta device, do nothing.

    Args:
        tensor: the local tensor, of shape ``local_shape``.
        placement: the parameter's placement.
        mesh_shape: the degrees of the mesh.
        coordinates: this rank's coordinates.
        seed: the run's seed.
        name: the parameter's global name.

    Raises:
        PlacementError: the tensor does not have the local shape, for example because it was built for another mesh.
    """
    expected = local_shape(placement, mesh_shape)
    if tuple(tensor.shape) != expected:
        raise PlacementError(
            f"{name}: its local shape is {tuple(tensor.shape)}, but on {mesh_shape} it is {expected}; "
            "build the module on this mesh"
        )
    if tensor.is_meta:
        return
    box = local_box(placement, mesh_shape, coordinates)
    logical = tensor[tuple(slice(size) for size in box.size)]
    if logical.shape != tensor.shape:
        tensor.zero_()
    match placement.init:
        case Normal(std=std):
            values = counter_normal(seed, name, placement.shape, box, std=std, dtype=tensor.dtype, device=tensor.device)
            logical.copy_(values)
        case Ones():
            logical.fill_(1)
        case _:
            logical.zero_()


_Declaration = tuple[Placement, ParallelModule]
_T = TypeVar("_T", bound=Tensor)


def _declarations(module: nn.Module) -> tuple[dict[str, _Declaration], list[str]]:
    """Each declared placement by full name, with the module that declares it, and an error for each conflict."""
    declared: dict[str, _Declaration] = {}
    errors = []
    for path, owner in module.named_modules(remove_duplicate=False):
        if not isinstance(owner, ParallelModule):
            continue
        for local, placement in owner.placements().items():
            name = f"{path}.{local}" if path else local
            first, _ = declared.setdefault(name, (placement, owner))
            if first != placement:
                errors.append(f"{name}: declared twice, as {first} and as {placement}; declare it once")
    return declared, errors


def _aliases(named: Iterable[tuple[str, _T]]) -> dict[_T, list[str]]:
    """All names of each tensor."""
    names: dict[_T, list[str]] = {}
    for name, tensor in named:
        names.setdefault(tensor, []).append(name)
    return names


def _tensor_errors(aliases: list[str], tensor: Tensor, declared: list[_Declaration]) -> Iterator[str]:
    """Check one parameter or buffer against its declarations (several if it is tied)."""
    name, (placement, owner) = aliases[0], declared[0]
    if any(other != placement for other, _ in declared):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        yield f"{', '.join(aliases)}: one tied {kind} with different placements; declare the same placement for each"
    shape = owner.mesh.shape
    if uneven := divisibility_errors(placement, shape):
        yield from (f"{name}: {error}" for error in uneven)
    elif (expected := local_shape(placement, shape)) != tuple(tensor.shape):
        yield (
            f"{name}: its local shape is {tuple(tensor.shape)}, but its placement {placement.allocated_shape} "
            f"on {shape} gives {expected}; allocate it with local_shape(placement, mesh.shape)"
        )


def _buffer_errors(aliases: list[str], buffer: Tensor, declared: dict[str, _Declaration]) -> Iterator[str]:
    """Check the declarations of a persistent buffer, which needs none."""
    declarations = [declared[name] for name in aliases if name in declared]
    if not declarations:
        return
    if declarations[0][0].partial:
        yield f"{aliases[0]}: a buffer has no gradient that could be partial; declare it without partial"
    yield from _tensor_errors(aliases, buffer, declarations)


def _materialise_(
    module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None, default: torch.device
) -> None:
    """Replace each parameter on the meta device, or of another dtype or device, by an uninitialised one; keep ties."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in replacements:
                place = device if device is not None else (default if old.is_meta else old.device)
                replacements[old] = _uninitialised(old, dtype or old.dtype, torch.device(place))
            owner.register_parameter(name, replacements[old])


def _uninitialised(old: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    if old.dtype == dtype and old.device == device:
        return old
    return nn.Parameter(torch.empty(old.shape, dtype=dtype, device=device), requires_grad=old.requires_grad)
