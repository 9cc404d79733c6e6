"""An accelerator that computes shapes only: the device of a dry run.

Its tensors have a shape, a dtype and a device, but no data. :class:`ShapeDevice` sees every operation of torch. Those
on the CPU alone run as they are, so the host's part of the program (reading samples, planning, counting) is real. An
operation that involves the device computes shapes. Two kinds of them raise :class:`DryRunError`, which names the layer:

- the host reads a tensor of the device anywhere but in :data:`megastack.dryrun.host_reads.ALLOWED_READS`;
- tensors of the CPU and of the device meet, unless the former is a scalar.

A *kernel* is an operation of the device that is neither a view nor an allocation. An operation counts as one kernel
where torch's dispatcher sees it whole; those that torch decomposes on this device, such as
``scaled_dot_product_attention``, count as their parts, so layers call such kernels by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from megastack.dryrun.host_reads import PACKAGE, allowed_read, caller, frames
from megastack.errors import MegastackError
from megastack.torch_private import (
    NEEDS_VALUES,
    NO_DATA,
    SCALAR_READ,
    MixedDevices,
    TorchDispatchMode,
    is_view,
    lacks_data,
    returns_nothing,
    with_data,
)

DEVICE = NO_DATA
_ALLOCATIONS = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
        "_unsafe_view",
        "lift",
    }
)
_COLLECTIVES = "c10d"


class ImmediateStreams:
    """What FSDP2 requires of a device: streams and events, whose operations complete immediately."""

    class Stream:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def wait_stream(self, stream: Any) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            return ImmediateStreams.Event()

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, stream: Any = None) -> Any:
            return self

        def wait(self, stream: Any = None) -> None:
            pass

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Stream:
        return self.Stream()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()


class LiveBytes:
    """Counts the bytes of storages on one device from their first use until they are freed.

    These are the bytes that tensors hold, without what an allocator adds. Storages may be resized (FSDP2 frees gathered
    parameters so), so a new peak is counted exactly.

    Attributes:
        peak: the most bytes at once since the last :meth:`reset_peak`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}
        self._live = 0
        self.peak = 0

    @property
    def live(self) -> int:
        """The bytes held now."""
        for key, (storage, counted) in list(self._storages.items()):
            found = storage()
            held = 0 if found is None else found.nbytes()
            if held != counted:
                self._live += held - counted
                self._storages[key] = storage, held
        return self._live

    def reset_peak(self) -> None:
        """Start a new peak."""
        self.peak = self.live

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that were just computed."""
        for x in tensors:
            if x.device.type == self._device.type:
                self._add(x.untyped_storage())
        if self._live > self.peak:
            self.peak = max(self.peak, self.live)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, held = id(storage), storage.nbytes()
        _, counted = self._storages.get(key, (None, 0))
        if counted == held and key in self._storages:
            return
        self._storages[key] = ref(storage, lambda _: self._free(key)), held
        self._live += held - counted

    def _free(self, key: int) -> None:
        _, counted = self._storages.pop(key, (None, 0))
        self._live -= counted


class DryRunError(MegastackError):
    """An operation of a rank that would stop or fail on a device."""


class ShapeDevice(TorchDispatchMode):
    """Runs, checks and counts the operations of a rank while it is active.

    Args:
        describe: returns what the rank is doing in a phase, for error messages.

    Attributes:
        phase: the part of the step to which kernels are counted.
        kernels: the number of kernels by phase and operator.
        reads: the number of host reads by the ``what`` of their place.
        memory: the bytes of the device.
        names: the name of each module, for error messages.
    """

    def __init__(self, describe: Callable[[str], str] = str) -> None:
        super().__init__()
        self.phase = "build"
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.reads: Counter[str] = Counter()
        self.memory = LiveBytes(DEVICE)
        self.names: Mapping[nn.Module, str] = {}
        self._describe = describe
        self._counts = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager in which kernels and bytes are not counted."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator.namespace == "prim":
            return operator(*args, **kwargs)
        operands = list(_tensors((*args, *kwargs.values())))
        created = torch.device(kwargs.get("device") or "cpu").type
        if created != DEVICE.type and not any(map(lacks_data, operands)):
            with with_data():
                return operator(*args, **kwargs)
        if operator is SCALAR_READ:
            self._read(operator, "reads a scalar")
            return _zero(operands[0].dtype)
        result = self._run(operator, operands, args, kwargs)
        self._observe(operator, operands, result)
        return result

    def _run(self, operator: Any, operands: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if returns_nothing(operator):  # torch has no shape function for some of these
            devices = {x.device for x in operands if x.dim()}
            if len(devices) > 1:
                raise self._error(f"tensors of the CPU and of the device meet in {operator}")
            return None
        try:
            return operator(*args, **kwargs)
        except NEEDS_VALUES as error:
            raise self._error(f"the host needs the values of a tensor of the device ({operator})") from error
        except MixedDevices as error:
            raise self._error(f"tensors of the CPU and of the device meet in {operator}") from error

    def _observe(self, operator: Any, operands: list[Tensor], result: Any) -> None:
        results = list(_tensors((result,)))
        on_device = any(x.device.type == DEVICE.type for x in (*operands, *results))
        if not on_device:
            return  # the host's copy of device tensors
        target = operands[0] if operator.overloadpacket is torch.ops.aten.copy_ else next(iter(results), None)
        if target is not None and target.device.type == "cpu" and not is_view(operator):
            self._read(operator, "copies a tensor to the host")
        if not self._counts:
            return
        name = operator.overloadpacket.__name__
        if not is_view(operator) and name not in _ALLOCATIONS and operator.namespace != _COLLECTIVES:
            self.kernels[self.phase, name] += 1
        self.memory.add(results)

    def _read(self, operator: Any, action: str) -> None:
        place = allowed_read()
        if place is None:
            raise self._error(f"the host {action} of the device ({operator})")
        self.reads[place.what] += 1

    def _error(self, what: str) -> DryRunError:
        return DryRunError(f"{self._where()}: {what}")

    def _where(self) -> str:
        """The module that is running, the line, and the action of the schedule."""
        owners = (frame.f_locals.get("self") for frame in frames())
        module = next((x for x in owners if isinstance(x, nn.Module) and x in self.names), None)
        layer = "" if module is None else f"{self.names[module]} ({type(module).__qualname__})"
        return ", ".join(filter(None, (layer, _line(caller()), self._describe(self.phase))))


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    file = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")
    return f"{file}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operator, which may be lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _zero(dtype: torch.dtype) -> bool | int | float:
    """The number that an allowed read returns."""
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0
