"""The configuration of a run as frozen dataclasses: every key's type, default, unit, range and meaning.

This module is the only place where a key is defined. YAML files state choices, never defaults or types; the reference
page and ``megastack show KEY`` are printed from the fields below. It converts and checks nothing: ``convert.py`` turns
plain values into these classes, ``rules.py`` says which of them are legal together, ``compose.py`` reads YAML and
overrides.

A field is made by ``option`` (with a default) or ``required`` (written ``???`` in the reference). Imports no torch.
"""

# ruff: noqa: RUF009  (option and required return dataclasses.field)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megastack.config.choices import Activation as Activation
from megastack.config.choices import ComputeDtype as ComputeDtype
from megastack.config.choices import DataSource as DataSource
from megastack.config.choices import Device as Device
from megastack.config.choices import Family as Family
from megastack.config.choices import LearningRateSchedule as LearningRateSchedule
from megastack.config.choices import Norm as Norm
from megastack.config.choices import OnCorrupt as OnCorrupt
from megastack.config.choices import OnNonfinite as OnNonfinite
from megastack.config.choices import OptimizerName as OptimizerName
from megastack.config.choices import Period as Period
from megastack.config.choices import Positions as Positions
from megastack.config.choices import RecomputeMode as RecomputeMode
from megastack.config.choices import ReduceDtype as ReduceDtype
from megastack.config.choices import RopeScaling as RopeScaling
from megastack.config.fields import option, required

LONGEST_WAIT_S = 2e6
"""In milliseconds still a C int, which is how calls of the system take a time."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run: its folder, its length, what it reports and when it stops."""

    root: str = option("outputs", "Folder under which runs make their own `<date>/<time>` folder.")
    name: str = option("train", "Name of the run, for logs and tables.")
    dir: str | None = option(None, "The run folder itself; null makes one under `run.root`.")
    steps: int = required("Optimizer steps to train.", least=1)
    time_limit_s: float | None = option(
        None, "Stop resumably after this many seconds; null for no limit.", above=0, limit=1e9
    )
    validate_every: int = option(100, "Optimizer steps between validations; 0 for none but the last.", least=0)
    validate_samples: int | None = option(None, "Validation samples to score; null for the whole split.", least=1)
    sample_prompt: str | None = option(
        None, "A text that is continued for 32 tokens after each validation; null for none."
    )
    log_every: int = option(1, "Optimizer steps between lines on the console.", least=1)
    on_nonfinite: OnNonfinite = option(
        OnNonfinite.stop,
        "A step with a non-finite gradient norm ends the run (stop) or leaves the weights alone (skip).",
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Starting, watching and ending the ranks."""

    timeout_s: float = option(
        600.0, "Seconds after which a rank that waits for another gives up.", above=0, limit=LONGEST_WAIT_S
    )
    grace_s: float = option(
        30.0, "Seconds between asking the ranks to end and killing them.", above=0, limit=LONGEST_WAIT_S
    )
    threads_per_rank: int | None = option(
        None,
        "CPU threads of each rank; null takes `OMP_NUM_THREADS`, else a share of the CPUs, if the model is large "
        "enough to profit.",
        least=1,
        limit=2**12,
    )
    elastic: bool = option(
        False,
        "Under torchrun or srun, take the ranks that there are: the largest legal dp, at most `parallel.dp`, with the "
        "global batch kept; ranks that are left over wait. Needs `resume=auto`.",
    )


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Sharding of optimizer state, gradients and parameters over the data-parallel ranks."""

    stage: int = option(0, "0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.", least=0, most=3)
    shard_size: int | None = option(None, "Ranks among which state is sharded; null for all dp·cp ranks.", least=1)
    gather: Period = option(
        Period.step, "Stage 3: parameters are gathered once per step, or for each forward and backward."
    )
    reduce: Period = option(Period.step, "Stages 2 and 3: gradients are reduced once per step or per microbatch.")
    offload: bool = option(False, "Keep optimizer state in host memory.")


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The grid of ranks: how many there are along each axis, and how the model is cut."""

    dp: int | None = option(
        None, "Data-parallel degree; null is world/(pp·cp·tp) under a launcher and 1 otherwise.", least=1, most=2**20
    )
    tp: int = option(1, "Tensor-parallel degree.", least=1, most=2**20)
    pp: int = option(1, "Pipeline-parallel degree.", least=1, most=10_000)
    cp: int = option(1, "Context-parallel degree.", least=1, most=2**20)
    ep: int = option(1, "Expert-parallel degree; it divides dp·cp and is no factor of the world.", least=1, most=2**20)
    sequence_parallel: bool = option(
        True, "Split the sequence over the tp ranks between the tensor-parallel layers; nothing to do when tp is 1."
    )
    allow_tp_across_nodes: bool = option(False, "Allow a tensor-parallel group to span nodes.")
    layers_per_stage: list[int] | None = option(
        None, "Layers of each of the pp·chunks stages, first to last; null balances them by cost.", least=0
    )
    zero: ZeroOptions = option(ZeroOptions, "Sharding over the data-parallel ranks.")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The pipeline schedule."""

    name: str = option("1f1b", "A registered schedule, or `custom` for the file in `schedule.path`.")
    chunks: int = option(1, "Stages of each rank (virtual stages).", least=1, most=10_000)
    round: int | None = option(
        None, "Microbatches an interleaved schedule takes through a chunk at a time; null lets it choose.", least=1
    )
    path: str | None = option(None, "CSV file of actions, one line per rank, for `schedule.name=custom`.")
    memory_limit: float | None = option(
        None, "Peak activations in one rank's microbatch activations; null is pp.", above=0
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The batch of one optimizer step."""

    global_size: int = required(
        "Sequences of one optimizer step, over all ranks and microbatches.", least=1, most=2**24
    )
    micro_size: int = option(1, "Sequences of one microbatch on one rank.", least=1, most=2**24)
    sequence_length: int = required("Tokens of one sequence.", least=1, most=2**31)


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """Rotary position embedding."""

    theta: float = option(1e4, "Base of the rotary frequencies.", least=1, limit=1e15)
    scaling: RopeScaling = option(RopeScaling.none, "Stretching of the frequencies to longer contexts.")
    factor: float = option(1.0, "How many times longer the context becomes (linear, llama3).", least=1)
    low_freq_factor: float = option(1.0, "Wavelengths above original/this are stretched in full (llama3).", above=0)
    high_freq_factor: float = option(4.0, "Wavelengths below original/this are left alone (llama3).", above=0)
    original_max_positions: int = option(8192, "Context length in tokens before stretching (llama3).", least=1)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The decoder."""

    family: Family = option(Family.llama, "The family's name; what is built follows from the other keys alone.")
    layers: int = required("Transformer blocks.", least=1, most=10_000)
    heads: int = required("Query heads.", least=1, most=2**20)
    hidden: int = required("Width of the residual stream.", least=1, most=2**31)
    ffn: int = required("Inner width of the MLP.", least=1, most=2**31)
    vocab: int = required("Tokens of the vocabulary, without padding.", least=1, most=2**31)
    kv_groups: int | None = option(None, "Key and value heads; null is one per query head.", least=1, most=2**20)
    head_dim: int | None = option(None, "Width of a head; null is hidden/heads.", least=1, most=2**31)
    vocab_multiple: int = option(128, "The embedding's rows are padded to a multiple of this.", least=1, most=2**31)
    norm: Norm = option(Norm.rms, "Normalisation: root mean square or LayerNorm with bias.")
    norm_eps: float = option(1e-5, "Added to the variance in the norms.", above=0)
    activation: Activation = option(Activation.swiglu, "SwiGLU (gated, three matrices) or GELU (two).")
    positions: Positions = option(Positions.rope, "Rotary or learned absolute positions.")
    max_positions: int | None = option(
        None, "Rows of the learned position table; null is `batch.sequence_length`.", least=1, most=2**31
    )
    rope: RopeOptions = option(RopeOptions, "Rotary position embedding.")
    qk_norm: bool = option(False, "Normalise queries and keys per head.")
    bias: bool = option(False, "Biases in the linear layers.")
    qkv_bias: bool = option(False, "Biases in the query, key and value projections only.")
    tied: bool = option(False, "The output head is the embedding.")
    dropout: float = option(0.0, "Drop probability of embeddings and sub-layer outputs.", least=0, below=1)
    attention_dropout: float = option(0.0, "Drop probability of attention weights (a slower path).", least=0, below=1)
    init_std: float = option(0.02, "Standard deviation of the initial weights.", above=0)
    depth_scaled_init: bool = option(True, "Divide the initial residual projections by √(2·layers).")
    attention: Any = option(
        None, "Your attention layer, `{_target_: module.Class, …}` with further arguments; null for the built-in one."
    )
    mlp: Any = option(
        None, "Your MLP, `{_target_: module.Class, …}` with further arguments; null for the built-in one."
    )
    block: Any = option(
        None, "Your block, `{_target_: module.Class, …}` with further arguments; null for the built-in one."
    )


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The loss: cross-entropy, summed over tokens and divided by the valid tokens of the whole step."""

    label_smoothing: float = option(0.0, "Share of the target spread over the vocabulary.", least=0, below=1)
    z_loss: float = option(0.0, "Weight of the squared log of the softmax's denominator.", least=0)
    chunked: bool = option(False, "Compute output head and loss together, a part of the tokens at a time.")


@dataclass(frozen=True, kw_only=True)
class OptimGroupOptions:
    """Other optimizer settings for the parameters whose global name a pattern matches."""

    pattern: str = required(
        "Regular expression searched in the global parameter name; the first group that matches wins."
    )
    lr_scale: float = option(1.0, "Multiplies the learning rate.", least=0)
    weight_decay: float | None = option(None, "Replaces `optim.weight_decay`; null keeps it.", least=0)


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """The optimizer."""

    name: OptimizerName = option(OptimizerName.adamw, "AdamW, or SGD with momentum.")
    lr: float = option(3e-4, "Peak learning rate.", least=0)
    betas: list[float] = option([0.9, 0.95], "Decay rates of AdamW's first and second moments.", least=0, below=1)
    eps: float = option(1e-8, "Added to the root of AdamW's second moment.", above=0)
    weight_decay: float = option(
        0.1, "Decoupled weight decay, times the learning rate, of weights that decay.", least=0
    )
    momentum: float = option(0.0, "SGD's momentum.", least=0, below=1)
    clip_norm: float | None = option(
        1.0, "Largest norm of the whole gradient; null for no clipping.", above=0, limit=1e30
    )
    no_decay: list[str] = option(["norm", "bias"], "Patterns of parameters without weight decay.")
    freeze: list[str] = option([], "Patterns of parameters that are not trained.")
    groups: list[OptimGroupOptions] = option(
        [], "Other settings by pattern: `[{pattern: …, lr_scale: …, weight_decay: …}]`."
    )


@dataclass(frozen=True, kw_only=True)
class LearningRateOptions:
    """The learning rate over the steps: linear warm-up, then a shape from `optim.lr` to `optim.lr`·floor."""

    schedule: LearningRateSchedule = option(
        LearningRateSchedule.constant, "constant, cosine, linear, or wsd (constant, then linear over `lr.decay_steps`)."
    )
    warmup_steps: int = option(0, "Steps of the linear warm-up.", least=0)
    total_steps: int | None = option(None, "Step at which the shape ends; null is `run.steps`.", least=1)
    decay_steps: int | None = option(None, "Steps of wsd's final decay; null is a fifth of the total.", least=1)
    floor: float = option(0.1, "Final learning rate as a share of the peak.", least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Number formats."""

    compute: ComputeDtype = option(ComputeDtype.fp32, "Weights and activations.")
    reduce: ReduceDtype | None = option(None, "Gradients; null is the wider of `precision.compute` and fp32.")
    keep_fp32: list[str] = option(["norm", "router"], "Patterns of parameters kept in fp32 when compute is lower.")
    loss_scale: float | None = option(
        None, "Fixed loss scale; null for a dynamic one with fp16 and none otherwise.", above=0, limit=2**60
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activation recomputation."""

    mode: RecomputeMode = option(
        RecomputeMode.none,
        "What the backward computes again instead of keeping: the attention core, whole blocks, or modules by name.",
    )
    pattern: str | None = option(
        None,
        "Regular expression that matches the whole name of each module to recompute, such as `blocks\\.\\d+\\.mlp`.",
    )


@dataclass(frozen=True, kw_only=True)
class BlendSource:
    """One source of a blend."""

    paths: list[str] = option([], "Files, folders or globs of the source; prefixes of `.bin/.idx` pairs.")
    weight: float = required(
        "Its part of the samples, relative to the other weights; 0 draws none.", least=0, limit=1e15
    )
    source: DataSource = option(DataSource.bin, "What the paths are, as in `data.source`.")


@dataclass(frozen=True, kw_only=True)
class DataPhaseOptions:
    """A stage of the training data: from a step on, what it names replaces what the stage before it had."""

    from_step: int = required("Completed optimizer steps at which it begins.", least=1)
    sequence_length: int | None = option(
        None, "Tokens of one sequence, as in `batch.sequence_length`; null keeps it.", least=1, most=2**31
    )
    source: DataSource | None = option(None, "What the paths are, as in `data.source`; null keeps it.")
    paths: list[str] | None = option(None, "Files, folders or globs of the source; null keeps the data.")
    blend: list[BlendSource] | None = option(
        None, "Several sources, drawn by weight, instead of `source` and `paths`; null keeps the data."
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Documents, tokens and how they are cut into sequences."""

    source: DataSource = option(
        DataSource.builtin, "The corpus in the standard library, text files, JSON lines, or token files."
    )
    paths: list[str] = option([], "Files, folders or globs of the source; prefixes of `.bin/.idx` pairs.")
    blend: list[BlendSource] = option(
        [],
        "Several sources, drawn by weight, instead of `data.source` and `data.paths`: `[{paths: […], weight: …}]`. "
        "Weights may change at a resume.",
    )
    stages: list[DataPhaseOptions] = option(
        [],
        "Other data or another sequence length from a step on: `[{from_step: …, sequence_length: …, paths: […]}]`; "
        "the other keys are the first stage.",
    )
    tokenizer: str = option("byte", "`byte`, or the path of a `tokenizer.json`.")
    allow_special_tokens: bool = option(
        False,
        "Text, and prompts, that spell a special token of the tokenizer, such as `</s>`, become its id; false takes "
        "them as text.",
    )
    validation_fraction: float = option(
        0.05, "Share of documents held out: by their hash, of token files in blocks.", least=0, below=1
    )
    pack: bool = option(True, "Fill sequences with several documents instead of one each.")
    document_mask: bool = option(True, "A token attends only to its own document.")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Saving and loading."""

    every: int | None = option(
        None, "Optimizer steps between checkpoints, the last step included; null for none.", least=1
    )
    at_end: bool = option(True, "Save when the run ends.")
    asynchronous: bool = option(False, "Write while the next steps run.")
    keep_last: int | None = option(None, "How many of the newest usable checkpoints stay; null for all.", least=1)
    keep_every: int | None = option(
        None, "Checkpoints of steps that this divides stay beside `keep_last`; null for none.", least=1
    )
    load_weights: str | None = option(
        None,
        "Start a new run from the weights of this checkpoint (or of a run's newest, or of an imported folder); with "
        "`resume=auto`, while there is none of its own.",
    )
    on_corrupt: OnCorrupt = option(
        OnCorrupt.previous, "Where `resume` is auto or last: fall back to the previous checkpoint, or refuse."
    )
    strict: bool = option(True, "Names and shapes of the checkpoint have to be exactly those of the run.")


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """What is recorded beside `metrics.jsonl`."""

    tensorboard: bool | None = option(None, "Write TensorBoard events; null does so when it is installed.")
    trace_steps: list[int] = option([], "Steps (1-based) whose actions are timed and drawn.", least=1)
    dump_steps: list[int] = option(
        [], "Steps (1-based) whose gradients before clipping and weights after the update are written out.", least=1
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The machines."""

    name: str = option("local", "Name of the cluster description.")
    nodes: int = option(1, "Machines.", least=1, most=2**20)
    ranks_per_node: int | None = option(
        None, "Ranks of one machine; null is the launcher's count, else world/nodes.", least=1
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run is made from."""

    seed: int = option(0, "Seed of initial weights, data order and dropout.", least=0, limit=2**63 - 1)
    device: Device = option(Device.auto, "Where the ranks compute; auto takes CUDA when it is there.")
    resume: str | None = option(
        None,
        "null starts fresh; `auto` continues in `run.dir` when it holds a checkpoint; `last` continues the newest run "
        "under `run.root`; a path continues that checkpoint, or the newest of that run folder, in a new folder.",
    )
    compile: bool = option(False, "Compile the blocks.")
    run: RunOptions = required("The run: its folder, its length, what it reports and when it stops.")
    launch: LaunchOptions = option(LaunchOptions, "Starting, watching and ending the ranks.")
    parallel: ParallelOptions = option(ParallelOptions, "The grid of ranks.")
    schedule: ScheduleOptions = option(ScheduleOptions, "The pipeline schedule.")
    batch: BatchOptions = required("The batch of one optimizer step.")
    model: ModelOptions = required("The decoder.")
    loss: LossOptions = option(LossOptions, "The loss.")
    optim: OptimOptions = option(OptimOptions, "The optimizer.")
    lr: LearningRateOptions = option(LearningRateOptions, "The learning rate over the steps.")
    precision: PrecisionOptions = option(PrecisionOptions, "Number formats.")
    recompute: RecomputeOptions = option(RecomputeOptions, "Activation recomputation.")
    data: DataOptions = option(DataOptions, "Documents, tokens and sequences.")
    checkpoint: CheckpointOptions = option(CheckpointOptions, "Saving and loading.")
    observe: ObserveOptions = option(ObserveOptions, "What is recorded beside the metrics.")
    cluster: ClusterOptions = option(ClusterOptions, "The machines.")
