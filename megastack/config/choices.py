"""The enumerations of the configuration: the values that a key with a fixed set of choices can take.

``StrEnum`` with lower-case member names equal to their values, so ``config.model.norm == "rms"`` and a YAML file writes
``norm: rms``. Names that a registry adds to, such as schedules, are strings instead.
"""

from __future__ import annotations

from enum import StrEnum


class Device(StrEnum):
    """Where a rank computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class OnNonfinite(StrEnum):
    """What to do about a step whose gradient norm is not finite."""

    stop = "stop"
    skip = "skip"


class Period(StrEnum):
    """How often sharded state is gathered or reduced."""

    step = "step"
    microbatch = "microbatch"


class Family(StrEnum):
    """The decoder family."""

    llama = "llama"
    gpt2 = "gpt2"


class Norm(StrEnum):
    """The normalisation layer."""

    rms = "rms"
    layer = "layer"


class Activation(StrEnum):
    """The MLP's non-linearity."""

    swiglu = "swiglu"
    gelu = "gelu"


class Positions(StrEnum):
    """How a token's position enters the model."""

    rope = "rope"
    learned = "learned"


class RopeScaling(StrEnum):
    """How rotary frequencies are stretched to longer contexts."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"


class OptimizerName(StrEnum):
    """The optimizer."""

    adamw = "adamw"
    sgd = "sgd"


class LearningRateSchedule(StrEnum):
    """The shape of the learning rate after warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"


class ComputeDtype(StrEnum):
    """The number format of weights and activations in the forward and backward."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ReduceDtype(StrEnum):
    """The number format in which gradients accumulate and are reduced."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"


class RecomputeMode(StrEnum):
    """What the backward computes again instead of keeping."""

    none = "none"
    selective = "selective"
    full = "full"
    pattern = "pattern"


class DataSource(StrEnum):
    """Where documents come from."""

    builtin = "builtin"
    text = "text"
    jsonl = "jsonl"
    bin = "bin"


class OnCorrupt(StrEnum):
    """What to do about a corrupt or incomplete checkpoint."""

    previous = "previous"
    refuse = "refuse"
