"""FSDP units: how FSDP2's ``fully_shard`` is applied to them, and ranks that skip one.

``fully_shard`` is applied to the units of a stage and then to the stage, each over the shard group of its parameters.
An FSDP2 group has a single dtype and shard group. Modules of a unit whose parameters differ in either (norms that are
kept in fp32) therefore become groups inside the unit and are gathered with it. In a compiled unit FSDP2's hooks for
these groups run before and after the unit, since compiled code cannot communicate in hooks.

FSDP2 gathers a unit when it is called and reduces its gradients after its backward. A data-dependent branch may skip a
unit on some ranks, which would then start other collectives than the rest. Here a skipped unit acts as the identity:
FSDP2's hooks for it run on the tensors that are passed to the next unit, so its gather, and its reduction of zeros,
happen at the same time as on the other ranks. For the same reason, a unit that is called but uses no parameter gets an
output that requires a gradient if nothing before it is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from megastack.comm.collectives import CountedGather, CountedReduce
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError
from megastack.placement.module import ReshardPolicy
from megastack.torch_private import after_forward, before_forward, remove_forward_hooks
from megastack.weight_gradients import HAS_GRAD_DTYPE


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dim to shard.

    It is the first dim if the number of ranks divides its size, since joining the shards then copies nothing. Otherwise
    it is the last dim whose size they divide, or else the first, whose last shards are smaller and padded.
    """
    even = [dim for dim, size in enumerate(shape) if size % ranks == 0]
    return 0 if not even or even[0] == 0 else even[-1]


@dataclass(frozen=True)
class Compute:
    """The properties that all parameters of an FSDP2 group share: the compute dtype and the shard group."""

    dtype: torch.dtype
    shard: AxisGroup


class UnitSharder:
    """Applies ``fully_shard`` to stages, with one :class:`Compute` in each FSDP2 group.

    Args:
        compute: the :class:`Compute` of each parameter. Parameters that are already sharded have left their module.
        default: the :class:`Compute` of a stage without parameters.
        device: the device of the parameters.
        reduce_dtype: the dtype in which gradients are communicated; ``None`` for the dtype in which they accumulate.
        compiled: the modules whose ``forward`` runs as compiled code.
    """

    def __init__(
        self,
        compute: Mapping[nn.Parameter, Compute],
        default: Compute,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
        compiled: Collection[nn.Module] = (),
    ) -> None:
        self._compute, self._default = compute, default
        self._device, self._reduce_dtype = device, reduce_dtype
        self._compiled = frozenset(compiled)
        self._meshes: dict[AxisGroup, DeviceMesh] = {}

    def shard_stage(self, stage: nn.Module, units: Mapping[nn.Module, ReshardPolicy], *, gather: str) -> None:
        """Shard the parameters of a stage.

        Args:
            stage: the stage.
            units: its units in order of use, each with its reshard policy; units of other stages are ignored.
            gather: whether parameters are gathered once per ``step`` or for each ``microbatch``.
        """
        here = set(stage.modules())
        inner = [unit for unit, policy in units.items() if unit in here and policy is not ReshardPolicy.WITH_STAGE]
        inside = {
            unit: self._shard(
                unit,
                reshard_after_forward=gather == "microbatch" and units[unit] is not ReshardPolicy.AFTER_BACKWARD,
            )
            for unit in inner
        }
        inside[stage] = self._shard(stage, reshard_after_forward=False)
        for unit in inner:
            if units[unit] is ReshardPolicy.FORWARD_ONLY:
                cast(FSDPModule, unit).set_unshard_in_backward(False)
        _set_prefetch(inner, stage, inside)
        UnitCalls(stage, inner)
        paths = {module: path for path, module in stage.named_modules()}
        for module, groups in inside.items():
            if module not in self._compiled:
                require_calls(module, groups, paths)

    def _shard(self, unit: nn.Module, *, reshard_after_forward: bool) -> list[nn.Module]:
        """Shard the parameters of a unit that are not sharded yet. Returns the modules that became groups inside it.

        The unit's own group has the narrowest dtype, and the shard group of its first parameter of that dtype.
        """
        found, groups = self._computes(unit), []
        if len(found) > 1:
            own = min(found, key=lambda compute: compute.dtype.itemsize)
            for module in list(unit.modules()):
                here = self._computes(module, recurse=False)
                if module is not unit and len(here) == 1 and here[0] != own:
                    self._apply(module, reshard_after_forward, unit if unit in self._compiled else module)
                    groups.append(module)
        self._apply(unit, reshard_after_forward, unit)
        return groups

    def _computes(self, module: nn.Module, *, recurse: bool = True) -> list[Compute]:
        """The distinct :class:`Compute` values of a module's parameters, in order."""
        return list(dict.fromkeys(self._compute[p] for p in module.parameters(recurse) if p in self._compute))

    def _apply(self, module: nn.Module, reshard_after_forward: bool, called: nn.Module) -> None:
        """Make a group of a module's parameters, which is gathered when ``called`` is."""
        found = self._computes(module)
        _check_group(module, found)
        compute = next(iter(found), self._default)
        policy = MixedPrecisionPolicy(
            param_dtype=compute.dtype,
            reduce_dtype=torch.promote_types(compute.dtype, torch.float32),
            cast_forward_inputs=False,
        )
        if compute.shard not in self._meshes:
            self._meshes[compute.shard] = _device_mesh(compute.shard, self._device)
        own = [
            (x, name) for x in module.modules() for name, p in x.named_parameters(recurse=False) if p in self._compute
        ]
        sharded = fully_shard(
            module,
            mesh=self._meshes[compute.shard],
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(_placement, ranks=compute.shard.size),
            mp_policy=policy,
            ignored_params={parameter for parameter in module.parameters() if not parameter.numel()},
        )
        if unused := getattr(sharded, "set_reduce_scatter_unused_params", None):  # from torch 2.13 on
            unused(True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_custom_all_gather(cast(Any, CountedGather(compute.shard)))
        sharded.set_custom_reduce_scatter(cast(Any, CountedReduce(compute.shard, self._reduce_dtype)))
        if HAS_GRAD_DTYPE and compute.dtype.itemsize < torch.float32.itemsize:
            _Fp32Gradients(called, own)
        if called is not module:
            _move_hooks(module, called)


class _Fp32Gradients:
    """Hooks that let the gradients of a group in a lower precision accumulate in fp32 without being rounded first.

    FSDP2 itself converts the gradients of a backward when it is over. Here they begin as zeros in fp32 right before
    the backward of the module. From then on FSDP2 handles them like those of fp32 parameters.

    Args:
        module: the module in whose forward the parameters are used, already sharded.
        own: the parameters of the group, each as a module and the name in it.
    """

    def __init__(self, module: nn.Module, own: Sequence[tuple[nn.Module, str]]) -> None:
        self._own = own
        module.register_forward_pre_hook(self._set_dtypes)  # after FSDP2's, which gathers the parameters
        module.register_forward_hook(self._after_forward, prepend=True)  # before FSDP2's, which may free them

    def _gathered(self) -> list[nn.Parameter]:
        parameters = (getattr(module, name) for module, name in self._own)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _set_dtypes(self, module: nn.Module, args: Any) -> None:
        for parameter in self._gathered():
            parameter.grad_dtype = torch.float32

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        parameters = self._gathered()

        def before_backward(gradient: Tensor) -> None:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)

        for x in _tensors(output):
            if x.requires_grad:
                x.register_hook(before_backward)


def _move_hooks(group: nn.Module, unit: nn.Module) -> None:
    """Run FSDP2's hooks of a group inside a unit when the unit is called, inside those of the unit."""
    remove_forward_hooks(group)
    unit.register_forward_pre_hook(lambda unit, args, kwargs: before_forward(group, args, kwargs), with_kwargs=True)
    unit.register_forward_hook(lambda unit, args, output: after_forward(group, output))


def _check_group(module: nn.Module, found: Sequence[Compute]) -> None:
    if len(dtypes := {str(compute.dtype) for compute in found}) > 1:
        raise PlacementError(
            f"{type(module).__qualname__}: parameters of one module in {', '.join(sorted(dtypes))} cannot "
            "be cut over data ranks; let precision.keep_fp32 match all of them or none"
        )
    if len(found) > 1:
        raise PlacementError(
            f"{type(module).__qualname__}: parameters of one module with different data groups cannot be cut over "
            "data ranks; move them to modules of their own"
        )


def _device_mesh(group: AxisGroup, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(cast(dist.ProcessGroup, group.group), device.type)


def _placement(parameter: nn.Parameter, *, ranks: int) -> Shard:
    return Shard(shard_dim(parameter.shape, ranks))


def _set_prefetch(
    units: Sequence[nn.Module], stage: nn.Module, inside: Mapping[nn.Module, Iterable[nn.Module]]
) -> None:
    """Let each unit, in order of use, gather the next one during its forward and the previous one during its backward.

    FSDP2 itself prefetches the unit that ran before in the forward. With several microbatches that is the end of
    another microbatch, a useless gather. Groups inside a unit are gathered with it, whether they are called or not.
    """
    order = [cast(FSDPModule, module) for module in (*units, stage)]
    for previous, module in zip([order[0], *order], order, strict=False):
        module.set_modules_to_backward_prefetch([previous])
    following = {unit: [after] for unit, after in pairwise(order[:-1])}
    for module in order:
        groups = [cast(FSDPModule, group) for group in inside[cast(nn.Module, module)]]
        module.set_modules_to_forward_prefetch([*groups, *following.get(module, ())])


class UnitCalls:
    """Hooks that make skipped units of a sharded stage take part in its collectives.

    Args:
        stage: the stage; it is called for every microbatch.
        units: its units in order of use.
    """

    def __init__(self, stage: nn.Module, units: Sequence[nn.Module]) -> None:
        self._units = units
        self._next = len(units)
        stage.register_forward_pre_hook(self._begin, prepend=True)
        if _is_trained(stage):
            stage.register_forward_hook(_require_gradient, prepend=True)
        stage.register_forward_hook(self._end, prepend=True)  # runs before the one above, and both before FSDP2's
        for at, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._before, at), prepend=True, with_kwargs=True)
            if _is_trained(unit):
                unit.register_forward_hook(_require_gradient, prepend=True)

    def _begin(self, stage: nn.Module, args: Any) -> None:
        self._next = 0

    def _before(self, at: int, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        skipped = self._units[self._next : at]
        self._next = max(self._next, at + 1)
        return _skip(skipped, (args, kwargs))

    def _end(self, stage: nn.Module, args: Any, output: Any) -> Any:
        skipped = self._units[self._next :]
        self._next = len(self._units)
        (output,), _ = _skip(skipped, ((output,), {}))
        return output


def require_calls(module: nn.Module, groups: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> None:
    """Register hooks that raise if a forward skips an FSDP2 group inside a unit; the order of such groups is unknown.

    Args:
        module: a stage or a unit.
        groups: the modules inside it that are sharded on their own and gathered with it.
        names: the global name of each module.

    Raises:
        PlacementError: later, in the module's forward, on the rank that skips a group.
    """
    called: set[nn.Module] = set()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        missing = [names[group] for group in groups if group not in called]
        called.clear()
        if missing:
            raise PlacementError(
                f"{', '.join(missing)}: not called in this forward; a module whose dtype differs from the rest "
                "of its block (precision.keep_fp32) must be called on every data rank under parallel.zero.stage 2 and "
                "3; use parallel.zero.stage=1, or let precision.keep_fp32 match the whole block or nothing of it"
            )

    for group in groups:
        group.register_forward_pre_hook(lambda group, args: called.add(group))
        if _is_trained(group):
            group.register_forward_hook(_require_gradient, prepend=True)
    if groups:
        module.register_forward_hook(end, prepend=True)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _skip(units: Sequence[nn.Module], value: tuple[Any, Any]) -> tuple[Any, Any]:
    """Run FSDP2's hooks of skipped units on the arguments, whose values stay unchanged."""
    for unit in units:
        value = before_forward(unit, *value)
        if _is_trained(unit):
            value = _with_gradient(value)
        value = after_forward(unit, value)
    return value


def _require_gradient(unit: nn.Module, args: Any, output: Any) -> Any:
    return _with_gradient(output)


def _with_gradient(value: Any) -> Any:
    """The same values; if grad mode is on and no tensor requires a gradient, make one of them require it."""
    tensors = _tensors(value)
    if not torch.is_grad_enabled() or any(x.requires_grad for x in tensors):
        return value
    chosen = next((x for x in tensors if x.is_floating_point()), None)
    if chosen is None:
        return value
    return _replaced(value, chosen, _Attach.apply(chosen, torch.empty(0, requires_grad=True)))


class _Attach(torch.autograd.Function):
    """The identity, whose output requires a gradient; its backward returns none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for part in _parts(value) for x in _tensors(part)]


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(part, old, new) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_replaced(part, old, new) for part in value)
    if isinstance(value, dict):
        return {name: _replaced(part, old, new) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _replaced(getattr(value, field.name), old, new) for field in fields(value)}
        return replace(value, **parts) if any(parts[n] is not getattr(value, n) for n in parts) else value
    return value
