"""The private torch APIs that this package depends on.

None of them has a public equivalent. Each has a test in ``tests/test_torch_private.py`` that fails if torch changes it,
and ``pyproject.toml`` limits torch to the versions that pass these tests. No other module may use a private torch name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Autograd.

ACCUMULATES = "torch::autograd::AccumulateGrad"
"""Name of the autograd node that accumulates into ``.grad``; its ``variable`` is the leaf."""
VIEWS = frozenset({"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0"})
"""Nodes of views that keep all elements in order. They save no tensors, so they can run more than once."""
CASTS = frozenset({"ToCopyBackward0"})
"""Nodes of dtype casts, which save no tensors either."""


will_execute: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Whether the backward running on this thread executes a node.

Raises RuntimeError if ``torch.autograd.grad`` is running and the node's edge is one of its inputs.
"""


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


unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = torch.ops.aten._unsafe_view.default
"""A tensor in another shape that autograd does not treat as a view; the caller drops the tensor itself.

A view that an autograd function returns cannot be changed in place.
"""


def has_values(x: Tensor) -> bool:
    """Whether a tensor holds data; meta and fake tensors do not."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def version_of(x: Tensor) -> int:
    """Return the version counter of a tensor: in-place changes increment it, except through ``.data``."""
    return x._version


# Attention kernels, which scaled_dot_product_attention selects by itself only on their own devices.


def flash_attention(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
    """Causal FlashAttention of a GPU, with grouped queries."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q_BHSK, k_BGSK, v_BGSK, 0.0, True)[0]


def efficient_attention(q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, bias: Tensor | None) -> Tensor:
    """Memory-efficient attention of a GPU, with a bias or else causal."""
    operands = (q_BHSK, k_BHSK, v_BHSK, bias)
    return torch.ops.aten._scaled_dot_product_efficient_attention(*operands, True, 0.0, bias is None)[0]


def cpu_attention(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fused attention of a CPU, with a bias or else causal; returns the output and the log-sum-exp, (B, H, S)."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q_BHSK, k_BGSK, v_BGSK, 0.0, bias is None, attn_mask=bias)


def cpu_attention_backward(
    grad_BHSK: Tensor, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from the results of :func:`cpu_attention`."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad_BHSK, q_BHSK, k_BGSK, v_BGSK, out, lse, 0.0, bias is None, attn_mask=bias)


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
    everywhere = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or everywhere)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks see the gradients of the module's inputs or outputs, global module hooks included."""
    everywhere = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    return bool(module._backward_hooks or module._backward_pre_hooks or everywhere)


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


def remove_forward_hooks(module: nn.Module) -> None:
    """Remove the hooks that run before and after the module's ``forward``."""
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    module._forward_hooks.clear()


# Operators and autocast.


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dim, and the scale of each row; one kernel on a GPU. Both inputs have one dtype."""
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)


def fused_rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the input and of the weight; on a GPU only."""
    backward = torch.ops.aten._fused_rms_norm_backward
    grad_x, grad_weight = backward(grad, x, weight.shape, scale, weight, [True, True])
    return grad_x, grad_weight


is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device on this thread."""
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of ``torch.func`` is running on this thread."""


# Distributed and CUDA.

_TORCH = f"{Path(torch.__file__).parent}/"
TRANSPORT_FILES = (f"{_TORCH}distributed/distributed_c10d.py", f"{_TORCH}distributed/_functional_collectives.py")
"""The files whose frames raise transport errors."""
DISPATCH_FILE = f"{_TORCH}_ops.py"
"""The file through which torch calls operators, including collectives."""


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the time-out of a process group."""
    distributed_c10d._set_pg_timeout(timeout, group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The time-out of a process group's operations on the CPU."""
    return cast(timedelta, group._get_backend(torch.device("cpu")).options._timeout)


@contextmanager
def group_names(name_of: Callable[[list[int], Collection[str]], str]) -> Iterator[None]:
    """Name process groups created inside with ``use_local_synchronization`` by ``name_of(ranks, names in use)``."""
    usual = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name_of(ranks, distributed_c10d._world.pg_names.values())
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = usual


def bind_to_numa(gpu: int, mode: str) -> None:
    """Bind all threads of this process to CPUs near a GPU; ``mode`` is a value of torch's ``AffinityMode``."""
    from torch.numa import binding

    options = binding.NumaOptions(binding.AffinityMode(mode))
    binding._maybe_apply_numa_binding_to_current_process(gpu_index=gpu, numa_options=options)


def dump_cuda_memory(path: Path) -> None:
    """Write a snapshot of the CUDA allocator's state."""
    torch.cuda.memory._dump_snapshot(str(path))


def is_in_bad_fork() -> bool:
    """Whether this process was forked after its parent initialised CUDA, and therefore cannot use CUDA."""
    return torch.cuda._is_in_bad_fork()


# A device without data, and a process group without peers, for dry runs.

NO_DATA = torch.device("lazy", 0)
"""The device of tensors without data. Of torch's device types, this one runs backwards on the calling thread and needs
no registration, which would last as long as the process and start a thread, so that the process could not fork."""
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised by an operation on tensors without data whose result depends on their values."""
SCALAR_READ = torch.ops.aten._local_scalar_dense.default
"""The operator by which the host reads a scalar."""
MixedDevices = FakeTensorDeviceMismatchError
"""Raised by an operation on tensors without data of several devices."""


@contextmanager
def without_data(module: object) -> Iterator[None]:
    """Create the tensors of ``NO_DATA`` without data inside; operations on them compute shapes, dtypes and devices.

    ``module`` has the functions of the device that FSDP2 calls, as ``torch.cuda`` has.

    Tensors of the CPU are accepted as operands. A CPU tensor and one of ``NO_DATA`` do not mix, as on a GPU, unless the
    former is a scalar.
    """
    if not hasattr(torch, NO_DATA.type):
        torch._register_device_module(NO_DATA.type, module)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def with_data() -> AbstractContextManager[Any]:
    """Context manager that suspends :func:`without_data`."""
    return unset_fake_temporarily()


def lacks_data(x: object) -> bool:
    """Whether this is a tensor without data."""
    return isinstance(x, FakeTensor)


@contextmanager
def world_without_peers(rank: int, world_size: int) -> Iterator[None]:
    """Open a default process group whose other ranks do not exist: its operations complete immediately."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def is_view(operator: OpOverload) -> bool:
    """Whether an operator returns views of its inputs and computes nothing."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.arguments)


def returns_nothing(operator: OpOverload) -> bool:
    """Whether an operator has no result; it changes its inputs."""
    return not operator._schema.returns


default_store: Callable[[], dist.Store] = distributed_c10d._get_default_store
"""Return the store of the default process group."""


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this process."""
    return list(distributed_c10d._world.pg_map)


def nccl_trace() -> bytes | None:
    """Return the contents of NCCL's flight recorder, pickled; None in a build without NCCL."""
    dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return dump and dump()


# torch.compile. Importing it takes seconds, so only runs that compile do.


def allow_variants(most: int = 256) -> None:
    """Allow this many variants of one compiled function, by structure of a block and shapes of its inputs."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, most)
    # Cached functions are traced; those of this package have no side effects.
    warnings.filterwarnings("ignore", ".*`functools.lru_cache`-wrapped", UserWarning)


def keep_operands() -> None:
    """Let code that is compiled from now on not reuse the memory of its tensors, so that an operator may keep one."""
    from torch._functorch import config as autograd_config
    from torch._inductor import config

    autograd_config.donated_buffer = False
    config.allow_buffer_reuse = config.inplace_buffers = False


def compile_errors() -> tuple[type[Exception], ...]:
    """The errors of a function that cannot be traced or compiled."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def traced_frames(error: Exception) -> Iterator[tuple[str, int]]:
    """File and line of the frames that were traced when one of :func:`compile_errors` was raised, outermost first."""
    for frame in getattr(error, "real_stack", None) or ():
        yield frame.filename, frame.lineno


def missing_compiler(device: torch.device) -> str | None:
    """What inductor needs on a device but does not find, as a sentence with advice; None if nothing is missing."""
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else f"inductor needs Triton on {device.type}; install triton"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "inductor needs a C++ compiler on a CPU and finds none; install g++, or name one in CXX"
    return None


def compile_cache() -> Path:
    """The directory in which inductor keeps compiled kernels: ``TORCHINDUCTOR_CACHE_DIR``, or its default."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir())
