"""The configuration of a run as frozen dataclasses: the type, default, unit, range and meaning of every key.

Keys are defined only here. YAML files contain choices, never defaults or types; the reference page and ``megastack show
KEY`` are generated from the fields below. This module neither converts nor validates: ``convert.py`` converts plain
values to these classes, ``rules.py`` validates their combination, and ``compose.py`` reads YAML and overrides.

Fields are defined with ``option`` (with a default) or ``required`` (``???`` in the reference). Does not import torch.
"""

# ruff: noqa: RUF009  (option and required return dataclasses.field)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megastack.config.choices import (
    Activation,
    ComputeDtype,
    CpuTransport,
    Device,
    Family,
    LearningRateSchedule,
    Norm,
    NumaBinding,
    OnCorrupt,
    OnNonfinite,
    OptimizerName,
    Period,
    Positions,
    RecomputeMode,
    ReduceDtype,
    RopeScaling,
)
from megastack.config.data_schema import DataOptions
from megastack.config.fields import option, required

LONGEST_WAIT_S = 2e6
"""Longest time-out. In milliseconds, it still fits in a C int, the type that system calls accept."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run: folder, length, validation, console output."""

    root: str = option("outputs", "Parent folder; each run creates `<date>/<time>` in it.")
    name: str = option("train", "Name of the run in logs and tables.")
    dir: str | None = option(None, "Run folder; null creates one under `run.root`.")
    steps: int = required("Optimizer steps to train.", least=1)
    time_limit_s: float | None = option(
        None, "Seconds after which the run saves a checkpoint and stops; null for no limit.", above=0, limit=1e9
    )
    validate_every: int = option(100, "Optimizer steps between validations; 0 for the last step only.", least=0)
    validate_samples: int | None = option(None, "Validation samples to use; null for the whole split.", least=1)
    sample_prompt: str | None = option(None, "Prompt to continue by 32 tokens after each validation; null for none.")
    log_every: int = option(1, "Optimizer steps between console lines.", least=1)
    on_nonfinite: OnNonfinite = option(
        OnNonfinite.stop, "If the gradient norm of a step is not finite: end the run (stop) or skip the update (skip)."
    )
    deterministic: bool = option(
        False, "On a GPU, use only deterministic kernels, so that a run repeats bit for bit; slower. A CPU always does."
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Starting, monitoring and stopping ranks."""

    timeout_s: float = option(
        600.0, "Seconds that a rank waits for others before it fails.", above=0, limit=LONGEST_WAIT_S
    )
    grace_s: float = option(
        30.0, "Kill timeout: seconds between asking ranks to stop and killing them.", above=0, limit=LONGEST_WAIT_S
    )
    threads_per_rank: int | None = option(
        None,
        "CPU threads per rank; null uses `OMP_NUM_THREADS` if set, else an equal share of the CPUs for a model large "
        "enough to benefit.",
        least=1,
        limit=2**12,
    )
    numa_binding: NumaBinding = option(
        NumaBinding.none,
        "Bind the threads of a rank to CPUs near its GPU: of its NUMA node, of its socket, to a share of the node's "
        "cores (exclusive), or to cores with a common cache (core_complex).",
    )
    cpu_transport: CpuTransport = option(
        CpuTransport.auto,
        "How CPU ranks exchange tensors: through shared memory, which needs ranks on one host, or gloo. auto uses "
        "shared memory in groups of ranks that can map each other's memory.",
    )
    elastic: bool = option(
        False,
        "Under torchrun or srun, adapt to the number of ranks started: use the largest valid dp, at most "
        "`parallel.dp`, with the same global batch; remaining ranks stand by. Requires `resume=auto`.",
    )


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """ZeRO: sharding of optimizer state, gradients and parameters over the data-parallel ranks."""

    stage: int = option(
        0, "ZeRO level: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.", least=0, most=3
    )
    shard_size: int | None = option(None, "Ranks per sharding group; null for all dp·cp ranks.", least=1)
    gather: Period = option(Period.step, "Level 3: gather parameters per step, or per forward and backward.")
    reduce: Period = option(Period.step, "Levels 2 and 3: reduce gradients once per step or once per microbatch.")
    offload: bool = option(False, "Keep optimizer state in host memory.")


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallel degrees, and the division of the model over the ranks."""

    dp: int | None = option(
        None,
        "Data-parallel degree; null is the world size over pp·cp·tp under a launcher and 1 otherwise.",
        least=1,
        most=2**20,
    )
    tp: int = option(1, "Tensor-parallel degree.", least=1, most=2**20)
    pp: int = option(1, "Pipeline-parallel degree.", least=1, most=10_000)
    cp: int = option(1, "Context-parallel degree.", least=1, most=2**20)
    ep: int = option(1, "Expert-parallel degree; divides dp·cp, not a factor of the world size.", least=1, most=2**20)
    sequence_parallel: bool = option(True, "Split the sequence over tp between tensor-parallel layers.")
    allow_tp_across_nodes: bool = option(False, "Allow a tensor-parallel group to span nodes.")
    layers_per_stage: list[int] | None = option(
        None, "Layers of each of the pp·chunks stages, first to last; null balances the stages by cost.", least=0
    )
    bucket_size: int | None = option(
        None,
        "Gradient elements per bucket; null is max(40 million, 1 million · dp·cp) on a GPU and 6.5 million on a CPU. "
        "ZeRO levels 2 and 3 reduce by unit instead.",
        least=1,
        most=2**40,
    )
    zero: ZeroOptions = option(ZeroOptions, "Sharding over the data-parallel ranks.")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The pipeline schedule."""

    name: str = option("1f1b", "Name of a registered schedule, or `custom` for the file in `schedule.path`.")
    chunks: int = option(1, "Pipeline stages per rank (virtual stages).", least=1, most=10_000)
    round: int | None = option(
        None, "Interleaved schedules: consecutive microbatches per chunk; null lets the schedule choose.", least=1
    )
    path: str | None = option(None, "CSV file of actions, one line per rank, for `schedule.name=custom`.")
    memory_limit: float | None = option(
        None, "Peak activation memory, in microbatch activations of one rank; null is pp.", above=0
    )
    _target_: str | None = option(
        None,
        "Your schedule, the dotted path of a function `(pp, chunks, microbatches, *, …)`, instead of `schedule.name`.",
    )
    options: Any = option(None, "Options of your schedule; they may also stand directly beside `schedule._target_`.")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The batch of one optimizer step."""

    global_size: int = required("Sequences per optimizer step, over all ranks.", least=1, most=2**24)
    micro_size: int = option(1, "Sequences per microbatch on one rank.", least=1, most=2**24)
    sequence_length: int = required("Tokens per sequence.", least=1, most=2**31)


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """Rotary position embedding."""

    theta: float = option(1e4, "Base of the rotary frequencies.", least=1, limit=1e15)
    scaling: RopeScaling = option(RopeScaling.none, "Scaling of the rotary frequencies for longer contexts.")
    factor: float = option(1.0, "Ratio of the new to the original context length (linear, llama3).", least=1)
    low_freq_factor: float = option(1.0, "Wavelengths longer than original/this are scaled in full (llama3).", above=0)
    high_freq_factor: float = option(4.0, "Wavelengths shorter than original/this are not scaled (llama3).", above=0)
    original_max_positions: int = option(8192, "Context length in tokens before scaling (llama3).", least=1)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes and layers of the decoder (``model.…``)."""

    family: Family = option(Family.llama, "Name of the model family; only a label, the other keys define the model.")
    layers: int = required("Transformer blocks.", least=1, most=10_000)
    heads: int = required("Query heads.", least=1, most=2**20)
    hidden: int = required("Hidden size: width of the residual stream.", least=1, most=2**31)
    ffn: int = required("Intermediate size: inner width of the MLP.", least=1, most=2**31)
    vocab: int = required("Vocabulary size in tokens, without padding.", least=1, most=2**31)
    kv_groups: int | None = option(None, "Key and value heads; null is one per query head.", least=1, most=2**20)
    head_dim: int | None = option(None, "Width of one head; null is hidden/heads.", least=1, most=2**31)
    vocab_multiple: int = option(128, "Embedding rows are padded to a multiple of this.", least=1, most=2**31)
    norm: Norm = option(Norm.rms, "Normalization layer: RMSNorm or LayerNorm with bias.")
    norm_eps: float = option(1e-5, "Added to the variance in normalization layers.", above=0)
    activation: Activation = option(Activation.swiglu, "MLP: SwiGLU (gated, three matrices) or GELU (two matrices).")
    positions: Positions = option(Positions.rope, "Rotary or learned absolute positions.")
    max_positions: int | None = option(
        None, "Rows of the learned position table; null is `batch.sequence_length`.", least=1, most=2**31
    )
    rope: RopeOptions = option(RopeOptions, "Rotary position embedding.")
    qk_norm: bool = option(False, "Normalize queries and keys per head.")
    bias: bool = option(False, "Biases in the linear layers.")
    qkv_bias: bool = option(False, "Biases in the query, key and value projections only.")
    tied: bool = option(False, "The output head shares the weight of the embedding.")
    dropout: float = option(0.0, "Drop probability of embeddings and sublayer outputs.", least=0, below=1)
    attention_dropout: float = option(0.0, "Drop probability of attention weights; slower.", least=0, below=1)
    init_std: float = option(0.02, "Standard deviation of the initial weights.", above=0)
    depth_scaled_init: bool = option(True, "Divide initial residual projections by √(2·layers).")
    attention: Any = option(None, "Custom attention layer, `{_target_: module.Class, …}`; null for the built-in one.")
    mlp: Any = option(None, "Custom MLP, `{_target_: module.Class, …}`; null for the built-in one.")
    block: Any = option(None, "Custom block, `{_target_: module.Class, …}`; null for the built-in one.")


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The loss: cross-entropy, summed over tokens and divided by the number of valid tokens of the step."""

    label_smoothing: float = option(0.0, "Target probability spread over the vocabulary.", least=0, below=1)
    z_loss: float = option(0.0, "Coefficient of the z-loss, the squared log of the softmax denominator.", least=0)
    chunked: bool = option(
        True, "Compute the output head and the loss together, in chunks of tokens, where that saves memory."
    )


@dataclass(frozen=True, kw_only=True)
class OptimGroupOptions:
    """Other optimizer settings for the parameters whose global name matches a pattern."""

    pattern: str = required("Regular expression searched in global parameter names; the first match wins.")
    lr_scale: float = option(1.0, "Factor on the learning rate.", least=0)
    weight_decay: float | None = option(None, "Replaces `optim.weight_decay`; null keeps it.", least=0)


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """The optimizer."""

    name: OptimizerName = option(OptimizerName.adamw, "AdamW, or SGD with momentum.")
    lr: float = option(3e-4, "Peak learning rate.", least=0)
    betas: list[float] = option([0.9, 0.95], "Decay rates of AdamW's first and second moments.", least=0, below=1)
    eps: float = option(1e-8, "Added to the square root of AdamW's second moment.", above=0)
    weight_decay: float = option(0.1, "Decoupled weight decay, multiplied by the learning rate.", least=0)
    momentum: float = option(0.0, "Momentum of SGD.", least=0, below=1)
    clip_norm: float | None = option(1.0, "Maximum global gradient norm; null for no clipping.", above=0, limit=1e30)
    no_decay: list[str] = option(["norm", "bias"], "Patterns of parameters without weight decay.")
    freeze: list[str] = option([], "Patterns of parameters that are not trained.")
    groups: list[OptimGroupOptions] = option(
        [], "Other settings by pattern: `[{pattern: …, lr_scale: …, weight_decay: …}]`."
    )


@dataclass(frozen=True, kw_only=True)
class LearningRateOptions:
    """The learning rate over the steps: linear warm-up to `optim.lr`, then a schedule down to `optim.lr`·floor."""

    schedule: LearningRateSchedule = option(
        LearningRateSchedule.constant,
        "constant, cosine, linear, or wsd (warmup-stable-decay: constant, then linear over `lr.decay_steps`).",
    )
    warmup_steps: int = option(0, "Steps of the linear warm-up.", least=0)
    total_steps: int | None = option(None, "Step at which the schedule ends; null is `run.steps`.", least=1)
    decay_steps: int | None = option(None, "Steps of the decay in wsd; null is a fifth of the total.", least=1)
    floor: float = option(0.1, "Minimum learning-rate ratio: final over peak learning rate.", least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Data types."""

    compute: ComputeDtype = option(ComputeDtype.fp32, "Data type of weights and activations.")
    reduce: ReduceDtype | None = option(None, "Data type of gradients; null is the wider of compute and fp32.")
    keep_fp32: list[str] = option(["norm", "router"], "Patterns of parameters kept in fp32 if compute is lower.")
    loss_scale: float | None = option(
        None, "Fixed loss scale; null for a dynamic one with fp16 and none otherwise.", above=0, limit=2**60
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activation recomputation."""

    mode: RecomputeMode = option(
        RecomputeMode.none,
        "Activations that the backward recomputes: none, the attention core (selective), whole blocks (full), or "
        "modules by name (pattern).",
    )
    pattern: str | None = option(
        None, "Regular expression for the full names of the modules to recompute, such as `blocks\\.\\d+\\.mlp`."
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Saving and loading checkpoints."""

    every: int | None = option(
        None, "Steps between checkpoints; null for none. `checkpoint.at_end` adds one at the end.", least=1
    )
    at_end: bool = option(True, "Save a checkpoint when the run ends.")
    asynchronous: bool = option(False, "Write checkpoints while the next steps run.")
    keep_last: int | None = option(None, "Number of newest usable checkpoints to keep; null for all.", least=1)
    keep_every: int | None = option(
        None, "With `keep_last`, also keep checkpoints of steps divisible by this; null for none.", least=1
    )
    load_weights: str | None = option(
        None,
        "Start a new run from the weights of this checkpoint, of a run's newest checkpoint, or of an imported folder. "
        "With `resume=auto`, applies only while the run has no checkpoint.",
    )
    on_corrupt: OnCorrupt = option(
        OnCorrupt.previous,
        "If the checkpoint is corrupt and `resume` is auto or last: use the previous one, or raise an error (refuse).",
    )
    strict: bool = option(True, "Require that the checkpoint has exactly the names and shapes of the run.")


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Records beside `metrics.jsonl`."""

    tensorboard: bool | None = option(None, "Write TensorBoard events; null writes them if TensorBoard is installed.")
    trace_steps: list[int] = option([], "Steps (1-based) whose actions are timed and drawn.", least=1)
    profile_steps: list[int] = option(
        [], "Steps (1-based) that torch.profiler records, one Chrome trace per rank in `profile/`.", least=1
    )
    dump_steps: list[int] = option(
        [],
        "Steps (1-based) whose gradients before clipping and weights after the update are written to files.",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The machines."""

    name: str = option("local", "Name of the cluster description.")
    nodes: int = option(1, "Number of machines.", least=1, most=2**20)
    ranks_per_node: int | None = option(
        None, "Ranks per machine; null is the launcher's number, else the world size over nodes.", least=1
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a run."""

    seed: int = option(0, "Seed of initial weights, data order and dropout.", least=0, limit=2**63 - 1)
    device: Device = option(Device.auto, "Device of the ranks; auto uses CUDA if it is available.")
    resume: str | None = option(
        None,
        "null starts a new run; `auto` continues in `run.dir` if it holds a checkpoint; `last` continues the newest "
        "run under `run.root`; a path continues from that checkpoint, or from a run folder's newest, in a new folder.",
    )
    compile: bool = option(
        False, "Compile the blocks of the decoder with `torch.compile`; the first step then takes longer."
    )
    run: RunOptions = required("The run: folder, length, validation, console output.")
    launch: LaunchOptions = option(LaunchOptions, "Starting, monitoring and stopping ranks.")
    parallel: ParallelOptions = option(ParallelOptions, "Parallel degrees, and the division of the model.")
    schedule: ScheduleOptions = option(ScheduleOptions, "The pipeline schedule.")
    batch: BatchOptions = required("The batch of one optimizer step.")
    model: ModelOptions = required("The decoder.")
    loss: LossOptions = option(LossOptions, "The loss.")
    optim: OptimOptions = option(OptimOptions, "The optimizer.")
    lr: LearningRateOptions = option(LearningRateOptions, "The learning rate over the steps.")
    precision: PrecisionOptions = option(PrecisionOptions, "Data types.")
    recompute: RecomputeOptions = option(RecomputeOptions, "Activation recomputation.")
    data: DataOptions = option(DataOptions, "Documents, tokens and sequences.")
    checkpoint: CheckpointOptions = option(CheckpointOptions, "Saving and loading checkpoints.")
    observe: ObserveOptions = option(ObserveOptions, "Records beside the metrics.")
    cluster: ClusterOptions = option(ClusterOptions, "The machines.")
