"""The private torch APIs that this package depends on.

None of them has a public equivalent. Each has a test in ``tests/test_torch_private.py`` that fails if torch changes it,
and ``pyproject.toml`` limits torch to the versions that pass these tests. No other module may use a private torch name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge
from torch.distributed import distributed_c10d
from torch.nn.modules import module as torch_module

# Autograd.

ACCUMULATES = "torch::autograd::AccumulateGrad"
"""Name of the autograd node that accumulates into ``.grad``; its ``variable`` is the leaf."""
VIEWS = frozenset({"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0"})
"""Nodes of views that keep all elements in order. They save no tensors, so they can run more than once."""
CASTS = frozenset({"ToCopyBackward0"})
"""Nodes of dtype casts, which save no tensors either."""


def will_execute(edge: GradientEdge) -> bool:
    """Whether the backward running on this thread executes the node of an edge.

    Raises:
        RuntimeError: ``torch.autograd.grad`` is running and the edge is one of its inputs.
    """
    return torch._C._will_engine_execute_node(edge.node)


def has_gradient_hooks(x: Tensor) -> bool:
    """Whether a tensor has hooks that see or change its gradient."""
    return bool(x._backward_hooks)


def accumulation_hooks(parameter: Tensor) -> Collection[Any]:
    """Return the hooks that run after a gradient is accumulated into a leaf, in order."""
    return (parameter._post_accumulate_grad_hooks or {}).values()


def accumulated_leaf(x: Tensor, through: Collection[str]) -> Tensor | None:
    """Return the leaf from which a chain of the named single-input nodes computes a tensor, or ``None``."""
    node = x.grad_fn
    while node is not None and node.name() in through:
        node = node.next_functions[0][0]
    if node is None or node.name() != ACCUMULATES:
        return None
    return cast(Tensor, cast(Any, node).variable)


def has_values(x: Tensor) -> bool:
    """Whether a tensor holds data; meta and fake tensors do not."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def version_of(x: Tensor) -> int:
    """Return the version counter of a tensor: in-place changes increment it, except through ``.data``."""
    return x._version


# Modules.

MODULE_CALL: dict[str, Callable[..., Any]] = {
    name: vars(nn.Module)[name] for name in ("__call__", "_wrapped_call_impl", "_call_impl")
}
"""The methods that torch runs between the call of a module and its ``forward``."""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled in place."""
    return module._compiled_call_impl is not None


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the module's ``forward``, global module hooks included."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
    )


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks see the gradients of the module's inputs or outputs, global module hooks included."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the mutable dict of a module's own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the mutable dict of a module's own buffers."""
    return module._buffers


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether one of a module's own buffers is part of its state dict."""
    return name not in module._non_persistent_buffers_set


# Operations on lists of tensors: on a GPU one kernel for many tensors. Empty lists are allowed.


def foreach_zero_(tensors: list[Tensor]) -> None:
    """Fill every tensor with zeros."""
    if tensors:
        torch._foreach_zero_(tensors)


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target; dtypes may differ. A copy from pinned memory does not block the host."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def foreach_div_(tensors: list[Tensor], divisor: Tensor) -> None:
    """Divide every tensor by a scalar tensor."""
    if tensors:
        torch._foreach_div_(tensors, divisor)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of every tensor, accumulated in a dtype."""
    return list(torch._foreach_norm(tensors, 2, dtype=dtype)) if tensors else []


# FSDP2.


def before_forward(unit: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run FSDP2's pre-forward of a unit, which gathers the parameters, and return the arguments."""
    return cast(tuple[Any, Any], cast(Any, unit)._get_fsdp_state()._pre_forward(unit, args, kwargs))


def after_forward(unit: nn.Module, output: Any) -> Any:
    """Run FSDP2's post-forward of a unit, and return the output."""
    return cast(Any, unit)._get_fsdp_state()._post_forward(unit, (), output)


# Distributed and CUDA.

_TORCH = f"{Path(torch.__file__).parent}/"
TRANSPORT_FILES = (f"{_TORCH}distributed/distributed_c10d.py", f"{_TORCH}distributed/_functional_collectives.py")
"""The files whose frames raise transport errors."""
DISPATCH_FILE = f"{_TORCH}_ops.py"
"""The file through which torch calls operators, including collectives."""


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the time-out of a process group."""
    distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def group_names(name_of: Callable[[list[int], Collection[str]], str]) -> Iterator[None]:
    """Name process groups created inside with ``use_local_synchronization`` by ``name_of(ranks, names in use)``."""
    usual = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name_of(ranks, distributed_c10d._world.pg_names.values())
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = usual


def is_in_bad_fork() -> bool:
    """Whether this process was forked after its parent initialised CUDA, and therefore cannot use CUDA."""
    return torch.cuda._is_in_bad_fork()
