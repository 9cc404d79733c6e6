"""Rules about the parallel layout: degrees, nodes, and how layers, schedule, batch and optimizer state are divided.

Packages that own a rule export it without torch (``layers.rules``, the schedule registry); this module maps the
argument names of those rules to configuration keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megastack.config.convert import INVALID
from megastack.config.schema import ScheduleOptions, TrainConfig
from megastack.errors import Violation, counted
from megastack.layers.attention_spec import AttentionSpec
from megastack.layers.mlp_spec import MLPSpec
from megastack.layers.rules import split_violations
from megastack.layers.spec import LayerSpec, divisors, spec_of
from megastack.layers.vocabulary_spec import VocabularySpec
from megastack.mesh.shape import MeshShape
from megastack.pipeline.schedules.registry import batching_error, schedule_violations, splits_backward


def data_parallel_degree(config: TrainConfig, world_size: int | None = None) -> int:
    """Return ``parallel.dp``; if it is null, the world size divided by pp·cp·tp, or 1 without a launcher."""
    parallel = config.parallel
    if parallel.dp is not None:
        return parallel.dp
    return 1 if world_size is None else max(1, world_size // (parallel.pp * parallel.cp * parallel.tp))


def mesh_shape(config: TrainConfig, world_size: int | None = None) -> MeshShape:
    """Return the mesh shape of a valid configuration.

    Args:
        config: a configuration without violations for this world size.
        world_size: ranks started by a launcher; None derives it from the degrees.
    """
    parallel, dp = config.parallel, data_parallel_degree(config, world_size)
    return MeshShape(pp=parallel.pp, dp=dp, cp=parallel.cp, tp=parallel.tp, ep=parallel.ep)


@dataclass(frozen=True)
class Degrees:
    """The parallel degrees that layout rules share, for one configuration and world size.

    Each degree is computed when a rule reads it, so an invalid value only affects the rules that depend on it.

    Args:
        config: the configuration, not necessarily valid.
        world_size: ranks started by a launcher; None derives it from the degrees.
    """

    config: TrainConfig
    world_size: int | None

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return data_parallel_degree(self.config, self.world_size)

    @property
    def data_ranks(self) -> int:
        """dp·cp: ranks over which gradients are reduced."""
        return self.dp * self.config.parallel.cp

    @property
    def uses_fsdp(self) -> bool:
        """Whether parameters are sharded by FSDP units instead of being in buckets."""
        zero = self.config.parallel.zero
        return zero.stage >= 2 and (zero.shard_size or self.data_ranks) > 1

    @property
    def replica_ranks(self) -> int:
        """pp·cp·tp: ranks of one data-parallel replica."""
        parallel = self.config.parallel
        return parallel.pp * parallel.cp * parallel.tp

    @property
    def stages(self) -> int:
        """pp·chunks: pipeline stages of the whole model."""
        return self.config.parallel.pp * self.config.schedule.chunks


def degrees_fit_world(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """The product of the degrees is the world size, and ep divides dp·cp."""
    parallel, world_size, replica = config.parallel, degrees.world_size, degrees.replica_ranks
    if degrees.data_ranks % parallel.ep:
        rule = f"must divide dp·cp = {degrees.data_ranks}"
        yield Violation("parallel.ep", parallel.ep, rule, tuple(divisors(degrees.data_ranks)))
    if world_size is None or replica * degrees.dp == world_size:
        return
    if parallel.dp is None:
        rule = f"pp·cp·tp = {replica} must divide the world of {counted(world_size, 'rank')}"
        yield Violation("parallel.dp", None, rule, (f"a world that is a multiple of {replica}", "other degrees"))
        return
    rule = f"pp·dp·cp·tp = {replica * degrees.dp} must be the world of {counted(world_size, 'rank')}"
    fitting = (world_size // replica,) if world_size % replica == 0 else ("other degrees",)
    yield Violation("parallel.dp", parallel.dp, rule, fitting)


def degrees_fit_nodes(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """Every node has the same number of ranks, and no tensor-parallel group spans nodes unless that is allowed."""
    parallel, cluster = config.parallel, config.cluster
    world = degrees.world_size or degrees.replica_ranks * degrees.dp
    if cluster.ranks_per_node is None and world % cluster.nodes:
        rule = f"must divide the world of {counted(world, 'rank')}"
        yield Violation("cluster.nodes", cluster.nodes, rule, tuple(divisors(world)))
        return
    ranks = cluster.ranks_per_node or world // cluster.nodes
    if cluster.nodes > 1 and ranks * cluster.nodes != world:
        rule = f"cluster.nodes={cluster.nodes} times this must be the world of {counted(world, 'rank')}"
        yield Violation("cluster.ranks_per_node", ranks, rule, (None,))
        return
    if ranks < world and ranks % parallel.tp and not parallel.allow_tp_across_nodes:
        rule = f"must divide the {counted(ranks, 'rank')} of a node, so that no tensor-parallel group spans nodes"
        yield Violation("parallel.tp", parallel.tp, rule, (*divisors(ranks), "parallel.allow_tp_across_nodes=true"))


def tensor_parallel_fits(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """Heads, KV groups, FFN size, vocabulary and sequence length are divisible by tp."""
    split_sequence = config.parallel.sequence_parallel and config.parallel.tp > 1
    sequence = _valid_or_0(config.batch.sequence_length) if split_sequence else None
    yield from split_violations(*_split_layers(config), config.parallel.tp, sequence=sequence)


def _split_layers(config: TrainConfig) -> tuple[AttentionSpec, list[LayerSpec]]:
    """Return the layers that tensor parallelism splits; an invalid size becomes 0, which every degree divides."""
    model = config.model
    valid_rows = not any(size is INVALID for size in (model.vocab, model.vocab_multiple))
    rows = {} if valid_rows else {"vocab": 0, "vocab_multiple": 1}
    groups = None if model.kv_groups is None else _valid_or_0(model.kv_groups)
    attention = spec_of(AttentionSpec, model, kv_groups=groups)
    return attention, [spec_of(MLPSpec, model, ffn=_valid_or_0(model.ffn)), spec_of(VocabularySpec, model, **rows)]


def _valid_or_0(size: int) -> int:
    return 0 if size is INVALID else size


def heads_fit(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """Query heads, KV groups and head width are consistent."""
    rotary = config.model.positions == "rope"
    yield from spec_of(AttentionSpec, config.model, rotary=rotary).size_violations()


def layers_fit(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """Every stage has a layer, unless ``parallel.layers_per_stage`` lists them; the list covers all layers."""
    listed, layers, stages = config.parallel.layers_per_stage, config.model.layers, degrees.stages
    if listed is None:
        if stages > layers:
            rule = f"model.layers={layers} leaves some of the pp·chunks = {stages} stages without a layer"
            most = layers // config.schedule.chunks
            legal = (f"at most {most}",) if most else ()
            yield Violation("parallel.pp", config.parallel.pp, rule, (*legal, "parallel.layers_per_stage=[…]"))
        return
    sums = (f"{counted(stages, 'number')} with the sum {layers}", None)
    if len(listed) != stages:
        rule = f"must list the layers of each of the pp·chunks = {counted(stages, 'stage')}, not of {len(listed)}"
        yield Violation("parallel.layers_per_stage", listed, rule, sums)
    elif sum(listed) != layers:
        rule = f"must sum to model.layers={layers}, not {sum(listed)}"
        yield Violation("parallel.layers_per_stage", listed, rule, sums)


def batch_fits(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """The global batch is a whole number of microbatches on every data-parallel rank."""
    batch, dp = config.batch, degrees.dp
    samples = batch.micro_size * dp
    if batch.global_size % samples:
        rule = f"must be a multiple of batch.micro_size={batch.micro_size} times dp={dp}"
        below = batch.global_size // samples * samples
        legal = (below, below + samples) if below else (samples,)
        yield Violation("batch.global_size", batch.global_size, rule, legal)


def schedule_fits(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """The schedule is registered and supports these sizes and options; reads the file of a custom schedule."""
    schedule, batch = config.schedule, config.batch
    microbatches = max(1, batch.global_size // (batch.micro_size * degrees.dp))  # batch_fits reports 0
    if schedule.options is not None and not isinstance(schedule.options, dict):
        yield Violation("schedule.options", schedule.options, "must be a mapping", ("{name: value}", None))
        return
    name, options = chosen_schedule(schedule)
    if schedule._target_ is not None and "." not in name:
        yield Violation("schedule._target_", name, "must be a dotted path", (f"my_file.{name}",))
        return
    if fixed := [key for key in ("name", "pp", "chunks", "microbatches") if key in options]:
        rule = "must not be an option; the schedule gets it from the layout"
        yield Violation(f"schedule.{fixed[0]}", options[fixed[0]], rule, ("another name for the option",))
        return
    sizes = (name, config.parallel.pp, schedule.chunks, microbatches)
    if found := schedule_violations(*sizes, **options):
        yield from found
        return
    key = "schedule.name" if schedule._target_ is None else "schedule._target_"
    if config.device == "cuda" and (error := batching_error(*sizes, **options)):
        rule = f"lists messages in an order that can deadlock on GPUs ({error})"
        yield Violation(key, name, rule, ("lists without sends and receives, which are then added", "device=cpu"))
    if degrees.uses_fsdp and splits_backward(*sizes, **options):
        unsplit = "1f1b" if schedule.chunks == 1 else "interleaved"
        stage = config.parallel.zero.stage
        rule = f"parallel.zero.stage={stage} reduces gradients after I and misses the weight gradients of W"
        yield Violation(key, name, rule, (unsplit, "parallel.zero.stage=1"))


def chosen_schedule(schedule: ScheduleOptions) -> tuple[str, dict[str, Any]]:
    """Return the name or dotted path of a configured schedule, and its options; None for an option that is not set."""
    path = None if schedule.path is None else str(schedule.path)
    name = schedule.name if schedule._target_ is None else schedule._target_
    return name, {"round": schedule.round, "path": path, **(schedule.options or {})}


def shard_size_fits(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """``parallel.zero.shard_size`` divides the data ranks, and ZeRO is on."""
    zero = config.parallel.zero
    if zero.shard_size is None:
        return
    if zero.stage == 0:
        rule = "parallel.zero.stage=0 shards nothing"
        yield Violation("parallel.zero.shard_size", zero.shard_size, rule, (None, "parallel.zero.stage=1"))
    elif degrees.data_ranks % zero.shard_size:
        rule = f"must divide dp·cp = {degrees.data_ranks}"
        yield Violation("parallel.zero.shard_size", zero.shard_size, rule, tuple(divisors(degrees.data_ranks)))


def zero_level_fits(config: TrainConfig, degrees: Degrees) -> Iterator[Violation]:
    """Periods, buckets, tied weights and sampling are possible at this ZeRO level."""
    zero = config.parallel.zero
    if zero.gather == "microbatch" and zero.stage < 3:
        rule = f"parallel.zero.stage={zero.stage} does not shard parameters"
        yield Violation("parallel.zero.gather", zero.gather, rule, ("step", "parallel.zero.stage=3"))
    if zero.reduce == "microbatch" and zero.stage < 2:
        rule = f"parallel.zero.stage={zero.stage} reduces gradients once per step"
        yield Violation("parallel.zero.reduce", zero.reduce, rule, ("step", "parallel.zero.stage=2"))
    if config.parallel.bucket_size is not None and degrees.uses_fsdp:
        rule = f"parallel.zero.stage={zero.stage} reduces gradients by unit"
        yield Violation("parallel.bucket_size", config.parallel.bucket_size, rule, (None, "parallel.zero.stage=1"))
    if zero.stage >= 2 and config.model.tied and config.parallel.pp == 1 and config.schedule.chunks > 1:
        rule = "with model.tied=true the first and last stages share a parameter, and both are on one rank"
        yield Violation("parallel.zero.stage", zero.stage, rule, (0, 1, "schedule.chunks=1", "model.tied=false"))
    if zero.stage >= 2 and config.run.sample_prompt is not None:
        rule = "sampling between steps needs full parameters on each rank"
        yield Violation("run.sample_prompt", config.run.sample_prompt, rule, (None, "parallel.zero.stage=1"))


LayoutRule = Callable[[TrainConfig, Degrees], Iterator[Violation]]
LAYOUT_RULES: tuple[LayoutRule, ...] = (
    degrees_fit_world,
    degrees_fit_nodes,
    tensor_parallel_fits,
    heads_fit,
    layers_fit,
    batch_fits,
    schedule_fits,
    shard_size_fits,
    zero_level_fits,
)
