"""The buffers of a module: which of them are state, and how they are moved from the meta device to a real one.

A persistent buffer (``register_buffer`` without ``persistent=False``) is part of the training state, and checkpoints
store it with the weights. If ranks hold shards of it, or it was built on the meta device, the module that owns it
declares it in ``placements()``. Otherwise it is replicated: identical on every rank that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from megastack.placement.placement import Normal, Placement
from megastack.torch_private import is_persistent


def named_buffers(module: nn.Module, *, persistent: bool) -> Iterator[tuple[str, Tensor]]:
    """The persistent (or non-persistent) buffers of a module by full name; a shared one under each of its names."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if is_persistent(owner, name) is persistent:
                yield (f"{path}.{name}" if path else name), buffer


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers by global name; a shared one under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, buffer in named_buffers(module, persistent=True):
        found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


def unfillable_buffers(module: nn.Module, declared: Mapping[str, Placement]) -> Iterator[str]:
    """Yield a message for each buffer on the meta device without a declaration of its initial values.

    Args:
        module: the module.
        declared: its placements by full name.
    """
    everything = (*named_buffers(module, persistent=True), *named_buffers(module, persistent=False))
    for name, buffer in everything:
        if not buffer.is_meta:
            continue
        if name not in declared:
            yield (
                f"{name}: a buffer built on the meta device has no values and nothing to fill it; declare it in "
                "placements() with init=Zeros() or Ones(), build it with device='cpu', or compute it in forward"
            )
        elif isinstance(declared[name].init, Normal):
            yield (
                f"{name}: a buffer built on the meta device starts at the init of its placement, and is not random; "
                "use init=Zeros() or Ones(), or build it with device='cpu' and its values"
            )


def materialise_buffers_(
    module: nn.Module, device: torch.device | str | None, default: torch.device
) -> dict[str, Tensor]:
    """Replace buffers on the meta device by uninitialised ones, and move the others if a ``device`` is given.

    Buffers keep their dtype; a shared buffer stays shared.

    Returns:
        The uninitialised buffers, by their first name.
    """
    replacements: dict[int, tuple[Tensor, Tensor]] = {}  # holds the old tensors, so that no id is reused
    unfilled: dict[str, Tensor] = {}
    for path, owner in module.named_modules():
        for name, old in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if id(old) not in replacements:
                place = torch.device(device if device is not None else default if old.is_meta else old.device)
                new = torch.empty_like(old, device=place) if old.is_meta else old.to(place)
                replacements[id(old)] = old, new
                if old.is_meta:
                    unfilled[f"{path}.{name}" if path else name] = new
            setattr(owner, name, replacements[id(old)][1])
    return unfilled


def share_buffers_(module: nn.Module, source: nn.Module) -> None:
    """Let a module share the buffers of another module of the same structure."""
    for owner, other in zip(module.modules(), source.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False, remove_duplicate=False):
            setattr(owner, name, buffer)
