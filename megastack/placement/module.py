"""Modules that own parameters, and what a model of them declares: placements by global name, and initial values.

A :class:`ParallelModule` declares every parameter it owns in :meth:`~ParallelModule.placements`; users subclass it, or
one of the layers built on it. :func:`placements_of` collects the declarations of a whole model and holds them against
its tensors; :func:`initialise_` gives every parameter its values. Global names are the model's own parameter names, so
a model that keys its blocks by the global layer number names them alike on every stage.

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

from collections.abc import Iterator

import torch
from torch import nn

from megastack.errors import PlacementError
from megastack.mesh.mesh import Mesh
from megastack.placement.boxes import divisibility_faults, local_shape
from megastack.placement.init import fill_
from megastack.placement.placement import Placement


class ParallelModule(nn.Module):
    """A module that knows its mesh and declares the placement of each parameter it owns.

    Subclasses override :meth:`placements` and call :meth:`create_parameters` at the end of their ``__init__``.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def placements(self) -> dict[str, Placement]:
        """The placement of each parameter of this module by its local name.

        A dotted name declares a parameter of a plain ``nn.Module`` child, which cannot declare its own.
        """
        return {}

    def boundary(self) -> tuple[str, ...]:
        """The names of the values that this block takes and gives beside the hidden states, for stages to pass on."""
        return ()

    def create_parameters(self) -> None:
        """Allocates the declared parameters of this module itself, with their local shapes and initial values.

        Uses the default dtype and device. Values are those of seed 0 under the local name, good for trying a layer
        alone; :func:`initialise_` gives a model its real ones. On the meta device nothing is filled.
        """
        for name, placement in self.placements().items():
            if "." in name:
                continue
            tensor = torch.empty(local_shape(placement, self.mesh.shape))
            fill_(tensor, placement, self.mesh.shape, self.mesh.coordinates, seed=0, name=name)
            self.register_parameter(name, nn.Parameter(tensor))


def placements_of(module: nn.Module) -> dict[str, Placement]:
    """The placement of every parameter of a model by global name; a tied parameter once, under its first name.

    Raises:
        PlacementError: names in one message every parameter without a placement, with a wrong local shape, with a cut
            that the mesh does not divide or with two different declarations, and every declaration of no parameter.
    """
    declared, faults = _declarations(module)
    names = _names_by_parameter(module)
    known = {name for aliases in names.values() for name in aliases}
    faults += [f"{name}: declared, but the module has no such parameter" for name in declared if name not in known]
    found: dict[str, Placement] = {}
    for parameter, aliases in names.items():
        own = [declared[name] for name in aliases if name in declared]
        if not own:
            faults.append(f"{aliases[0]}: has no placement; declare it in placements() of the module that owns it")
            continue
        found[aliases[0]] = own[0][0]
        faults += _parameter_faults(aliases, parameter, own)
    if faults:
        raise PlacementError("\n".join(faults))
    return found


def initialise_(
    module: nn.Module,
    mesh: Mesh,
    seed: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Gives every parameter its initial values: a function of the seed, the global name and the global index.

    Parameters on the meta device are allocated first, on ``device`` or else the mesh's device; others move there if a
    ``device`` or ``dtype`` is given. Tied parameters stay tied. Communicates nothing.

    Raises:
        PlacementError: as :func:`placements_of`, or for a buffer on the meta device, which nothing could fill.
    """
    placements = placements_of(module)
    _refuse_meta_buffers(module)
    _materialise_(module, dtype, device, mesh.device)
    parameters = dict(module.named_parameters())
    for name, placement in placements.items():
        fill_(parameters[name].detach(), placement, mesh.shape, mesh.coordinates, seed=seed, name=name)


_Declaration = tuple[Placement, ParallelModule]


def _declarations(module: nn.Module) -> tuple[dict[str, _Declaration], list[str]]:
    """Each declared placement by full name with the module that declares it, and the names declared twice, unlike."""
    declared: dict[str, _Declaration] = {}
    faults = []
    for path, owner in module.named_modules(remove_duplicate=False):
        if not isinstance(owner, ParallelModule):
            continue
        for local, placement in owner.placements().items():
            name = f"{path}.{local}" if path else local
            first, _ = declared.setdefault(name, (placement, owner))
            if first != placement:
                faults.append(f"{name}: declared twice, as {first} and as {placement}; declare it once")
    return declared, faults


def _names_by_parameter(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _parameter_faults(aliases: list[str], parameter: nn.Parameter, declared: list[_Declaration]) -> Iterator[str]:
    """What is wrong between one parameter and its declarations (several where it is tied)."""
    name, (placement, owner) = aliases[0], declared[0]
    if any(other != placement for other, _ in declared):
        yield f"{', '.join(aliases)}: one tied parameter with different placements; declare them alike"
    shape = owner.mesh.shape
    if uneven := divisibility_faults(placement, shape):
        yield from (f"{name}: {fault}" for fault in uneven)
    elif (expected := local_shape(placement, shape)) != tuple(parameter.shape):
        yield (
            f"{name}: its local shape is {tuple(parameter.shape)}, but its placement {placement.allocated_shape} "
            f"on {shape} gives {expected}; allocate it with local_shape(placement, mesh.shape)"
        )


def _refuse_meta_buffers(module: nn.Module) -> None:
    faults = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if faults:
        raise PlacementError(
            f"{', '.join(faults)}: a buffer built on the meta device has no values and nothing to fill it; "
            "compute it in forward, or build the module on a real device"
        )


def _materialise_(
    module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None, default: torch.device
) -> None:
    """Replaces each parameter that is on meta, or of another dtype or device, by an unfilled one; ties survive."""
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in fresh:
                place = device if device is not None else (default if old.is_meta else old.device)
                fresh[old] = _unfilled(old, dtype or old.dtype, torch.device(place))
            owner.register_parameter(name, fresh[old])


def _unfilled(old: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    if old.dtype == dtype and old.device == device:
        return old
    return nn.Parameter(torch.empty(old.shape, dtype=dtype, device=device), requires_grad=old.requires_grad)
