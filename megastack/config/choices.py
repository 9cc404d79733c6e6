"""Enumerations of the configuration: the values of keys with a fixed set of choices.

Members of these ``StrEnum`` classes compare equal to their lower-case values, so ``config.model.norm == "rms"`` holds
and YAML files contain ``norm: rms``. Open sets of names, such as registered schedules, are strings instead.
"""

from __future__ import annotations

from enum import StrEnum


class Device(StrEnum):
    """Device of a rank."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class OnNonfinite(StrEnum):
    """Action on a step whose gradient norm is not finite."""

    stop = "stop"
    skip = "skip"


class Period(StrEnum):
    """How often sharded state is gathered or reduced."""

    step = "step"
    microbatch = "microbatch"


class Family(StrEnum):
    """Model family."""

    llama = "llama"
    gpt2 = "gpt2"


class Norm(StrEnum):
    """Normalization layer."""

    rms = "rms"
    layer = "layer"


class Activation(StrEnum):
    """Activation function of the MLP."""

    swiglu = "swiglu"
    gelu = "gelu"


class Positions(StrEnum):
    """Position encoding."""

    rope = "rope"
    learned = "learned"


class RopeScaling(StrEnum):
    """Scaling of rotary frequencies for longer contexts."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"


class OptimizerName(StrEnum):
    """Optimizer."""

    adamw = "adamw"
    sgd = "sgd"


class LearningRateSchedule(StrEnum):
    """Learning-rate schedule after warm-up; ``wsd`` is warmup-stable-decay."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"


class ComputeDtype(StrEnum):
    """Data type of weights and activations in the forward and backward."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ReduceDtype(StrEnum):
    """Data type in which gradients are accumulated and reduced."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"


class RecomputeMode(StrEnum):
    """Activations that the backward recomputes."""

    none = "none"
    selective = "selective"
    full = "full"
    pattern = "pattern"


class DataSource(StrEnum):
    """Source of documents."""

    builtin = "builtin"
    text = "text"
    jsonl = "jsonl"
    bin = "bin"


class NumaBinding(StrEnum):
    """CPUs that a rank may use, chosen by its GPU; torch documents the modes under ``torch.numa``."""

    none = "none"
    node = "node"
    socket = "socket"
    exclusive = "exclusive"
    core_complex = "core_complex"


class CpuTransport(StrEnum):
    """How CPU ranks exchange tensors."""

    auto = "auto"
    shared_memory = "shared_memory"
    gloo = "gloo"


class OnCorrupt(StrEnum):
    """Action on a corrupt or incomplete checkpoint."""

    previous = "previous"
    refuse = "refuse"
