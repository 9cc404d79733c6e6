"""The device of a rank, the rules for the devices of all ranks, and an allocator setting that keeps freed host memory.

By default glibc returns free memory at the end of its heap to the system, and maps each large block separately. A step
allocates and frees the same activations for every microbatch, so every page would be returned, mapped again and zeroed.
This costs 5 % of the CPU time of a small model. A rank that computes on the CPU therefore keeps freed memory for the
next microbatch.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import deterministic

from megastack.errors import MeshError, RankEnvironmentError, counted
from megastack.mesh.environment import local_rank, read_environment
from megastack.torch_private import bind_to_numa, is_in_bad_fork

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of ``mallopt`` (glibc's ``malloc.h``)."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable of torch's allocator, and its name before torch 2.9."""
_MAX_THRESHOLD = 2**31 - 1
_LARGEST_ON_THE_HEAP = 32 * 2**20
"""The largest threshold that glibc accepts; larger blocks are mapped separately."""
_MOST_GPUS = 255


def pick_device(device: str) -> torch.device:
    """The device of this process; ``auto`` is its GPU if there is one, else the CPU.

    A GPU, including one with an index such as ``cuda:1``, becomes the current device of this process.

    Raises:
        MeshError: there is no GPU, or fewer GPUs than ranks on this machine, or this forked process cannot use one.
    """
    if device != "cpu" and is_in_bad_fork() and torch.cuda.device_count():
        raise MeshError(
            f"device={device}: this process was forked from one that had called the CUDA runtime, so it cannot use a "
            "GPU; use device=cpu, or fork before the first such call (torch.cuda.is_available() is one)"
        )
    name = device
    if device == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return select_device(torch.device(name))
    seen, local = torch.cuda.device_count(), local_rank()
    if local is None and seen > 1 and (launched := read_environment()) is not None and launched.world_size > 1:
        raise RankEnvironmentError(
            f"LOCAL_RANK: is not set, and this machine has {seen} GPUs; use torchrun or srun, or set LOCAL_RANK to the "
            "number of the rank on its machine"
        )
    local = local or 0
    index = 0 if seen == 1 else local  # a launcher may make only its own GPU visible to each rank
    if index >= seen:
        raise MeshError(
            f"device={device}: local rank {local} of this machine, which has {counted(seen, 'GPU')}; "
            "use device=cpu, or fewer ranks"
        )
    return select_device(torch.device("cuda", index))


def select_device(device: torch.device) -> torch.device:
    """Make a GPU the current device of this process, and return it with its index; other devices are returned as is.

    Torch allocates, keeps random states and creates FSDP2's groups on the current device.

    Raises:
        MeshError: there is no such GPU.
    """
    if device.type != "cuda":
        return device
    seen = torch.cuda.device_count()
    if (device.index or 0) >= seen:
        rule = f"this process sees {counted(seen, 'GPU')}"
        raise MeshError(f"device={device}: {rule}; use {f'cuda:0 to cuda:{seen - 1}' if seen else 'device=cpu'}")
    if device.index is not None:
        torch.cuda.set_device(device.index)
    return torch.device("cuda", torch.cuda.current_device())


def count_gpus() -> int:
    """The number of GPUs that a process started from this one can use.

    Makes no CUDA call in this process, so that processes forked from it can use CUDA. Without NVML, torch counts GPUs
    by initialising the CUDA runtime, so a forked child counts them.
    """
    if not torch.backends.cuda.is_built():
        return 0
    child = os.fork()
    if child == 0:
        os._exit(min(torch.cuda.device_count(), _MOST_GPUS))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass(frozen=True)
class DeviceDescription:
    """What other ranks need to know about the device of a rank.

    Attributes:
        kind: the type and, for a GPU, the compute capability.
        name: the model.
        identity: identifies a GPU among those of all machines; None on the CPU, which ranks share.
    """

    kind: str
    name: str
    identity: str | None

    @classmethod
    def of(cls, device: torch.device) -> DeviceDescription:
        """Describe a device of this process."""
        if device.type != "cuda":
            return cls(device.type, device.type, None)
        properties = torch.cuda.get_device_properties(device)
        kind = f"cuda, compute capability {properties.major}.{properties.minor}"
        return cls(kind, str(properties.name), str(properties.uuid))

    def __str__(self) -> str:
        return self.name if self.identity is None else f"{self.name} ({self.kind})"


def find_device_error(devices: Sequence[DeviceDescription]) -> str | None:
    """The error of ranks with these devices; None if they can train together."""
    first_of: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device.kind != devices[0].kind:
            return (
                f"device: rank 0 uses {devices[0]} and rank {rank} uses {device}; use machines with GPUs of one kind, "
                "set CUDA_VISIBLE_DEVICES to GPUs of one kind, or use device=cpu"
            )
        if device.identity is not None and (other := first_of.setdefault(device.identity, rank)) != rank:
            return (
                f"device: ranks {other} and {rank} use the same GPU, {device.name} {device.identity}; start at most as "
                "many ranks on a machine as it has GPUs, and check LOCAL_RANK and CUDA_VISIBLE_DEVICES"
            )
    return None


def keep_freed_memory(device: torch.device) -> None:
    """Keep the memory that a rank frees if it computes on the CPU with glibc; otherwise do nothing."""
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    library.mallopt(_TRIM_THRESHOLD, _MAX_THRESHOLD)
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_THE_HEAP)
    library.mallopt(_TOP_PAD, _LARGEST_ON_THE_HEAP)


def set_allocator_defaults(environment: MutableMapping[str, str] | None = None) -> None:
    """Let torch's CUDA allocator extend its segments, which avoids fragmentation, unless the user has configured it.

    Call it before the first use of CUDA; the allocator reads the variable once. Either of its two names is respected.
    """
    env = os.environ if environment is None else environment
    if not any(name in env for name in ALLOCATOR_VARIABLES):
        env[ALLOCATOR_VARIABLES[0 if torch.__version__ >= "2.9" else 1]] = "expandable_segments:True"


def use_deterministic_kernels(environment: MutableMapping[str, str] | None = None) -> None:
    """Make torch use only deterministic kernels, and raise where there is none. Call it before the first use of CUDA.

    cuBLAS needs a fixed workspace for it. New tensors are not filled, which torch would do in this mode: all of this
    package's are written before they are read.
    """
    env = os.environ if environment is None else environment
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def bind_to_cpus_near(device: torch.device, mode: str) -> None:
    """Bind this process to CPUs near its GPU, before it starts threads.

    Args:
        device: the device of the rank.
        mode: ``none``, or a mode of torch's NUMA binding (``node``, ``socket``, ``exclusive``, ``core_complex``).

    Raises:
        MeshError: the rank has no GPU.
    """
    if mode == "none":
        return
    if device.type != "cuda":
        raise MeshError(f"launch.numa_binding={mode}: this rank computes on the CPU; use launch.numa_binding=none")
    bind_to_numa(device.index or 0, mode.replace("_", "-"))
