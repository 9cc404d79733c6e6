"""Rules about the grid of ranks and what is cut over it: degrees, nodes, layers, schedule, batch.

Parts that own a rule export it without torch (``layers.rules``, the schedule registry); this module gives it the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastack.config.convert import UNUSABLE
from megastack.config.schema import TrainConfig
from megastack.errors import Violation, counted
from megastack.layers.attention_spec import AttentionSpec
from megastack.layers.mlp_spec import MLPSpec
from megastack.layers.rules import split_violations
from megastack.layers.spec import LayerSpec, divisors, spec_of
from megastack.layers.vocabulary_spec import VocabularySpec
from megastack.mesh.shape import MeshShape
from megastack.pipeline.schedules.registry import schedule_violations, splits_backward


def data_parallel_degree(config: TrainConfig, world_size: int | None = None) -> int:
    """``parallel.dp``, or what it is when it is null: the rest of the world, 1 where no launcher has fixed that."""
    grid = config.parallel
    if grid.dp is not None:
        return grid.dp
    return 1 if world_size is None else max(1, world_size // (grid.pp * grid.cp * grid.tp))


def mesh_shape(config: TrainConfig, world_size: int | None = None) -> MeshShape:
    """The grid of ranks of a legal configuration."""
    grid = config.parallel
    return MeshShape(pp=grid.pp, dp=data_parallel_degree(config, world_size), cp=grid.cp, tp=grid.tp, ep=grid.ep)


def stages(config: TrainConfig) -> int:
    """Pipeline stages of the whole model: ``parallel.pp`` · ``schedule.chunks``."""
    return config.parallel.pp * config.schedule.chunks


def world_fits(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """The degrees multiply to the world, and ep divides dp·cp."""
    grid = config.parallel
    fixed = grid.pp * grid.cp * grid.tp
    dp = data_parallel_degree(config, world_size)
    if (dp * grid.cp) % grid.ep:
        yield Violation("parallel.ep", grid.ep, f"must divide dp·cp = {dp * grid.cp}", tuple(divisors(dp * grid.cp)))
    if world_size is None or fixed * dp == world_size:
        return
    if grid.dp is None:
        rule = f"pp·cp·tp = {fixed} must divide the world of {counted(world_size, 'rank')}"
        yield Violation("parallel.dp", None, rule, (f"a world that is a multiple of {fixed}", "other degrees"))
        return
    rule = f"pp·dp·cp·tp = {fixed * dp} must be the world of {counted(world_size, 'rank')}"
    fitting = (world_size // fixed,) if world_size % fixed == 0 else ("other degrees",)
    yield Violation("parallel.dp", grid.dp, rule, fitting)


def nodes_fit(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Nodes hold equally many ranks, and no tensor-parallel group spans two unless that is allowed."""
    grid, cluster = config.parallel, config.cluster
    world = world_size or grid.pp * data_parallel_degree(config) * grid.cp * grid.tp
    if cluster.ranks_per_node is None and world % cluster.nodes:
        rule = f"must divide the world of {counted(world, 'rank')}"
        yield Violation("cluster.nodes", cluster.nodes, rule, tuple(divisors(world)))
        return
    ranks = cluster.ranks_per_node or world // cluster.nodes
    if cluster.nodes > 1 and ranks * cluster.nodes != world:
        rule = f"cluster.nodes={cluster.nodes} times this must be the world of {counted(world, 'rank')}"
        yield Violation("cluster.ranks_per_node", ranks, rule, (None,))
        return
    if ranks < world and ranks % grid.tp and not grid.allow_tp_across_nodes:
        rule = f"must divide the {counted(ranks, 'rank')} of a node, so that no tensor-parallel group spans nodes"
        yield Violation("parallel.tp", grid.tp, rule, (*divisors(ranks), "parallel.allow_tp_across_nodes=true"))


def tensor_parallel_fits(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Heads, groups, ffn, vocabulary and sequence can be cut over tp."""
    cut_sequence = config.parallel.sequence_parallel and config.parallel.tp > 1
    sequence = _known(config.batch.sequence_length) if cut_sequence else None
    yield from split_violations(*split_layers(config), config.parallel.tp, sequence=sequence)


def split_layers(config: TrainConfig) -> tuple[AttentionSpec, list[LayerSpec]]:
    """The layers that tensor parallelism splits; a size that is not known is 0, which fits every degree."""
    model = config.model
    known_rows = not any(size is UNUSABLE for size in (model.vocab, model.vocab_multiple))
    rows = {"vocab": model.vocab, "vocab_multiple": model.vocab_multiple} if known_rows else ROWS_UNKNOWN
    groups = None if model.kv_groups is None else _known(model.kv_groups)
    attention = spec_of(AttentionSpec, model, kv_groups=groups)
    return attention, [spec_of(MLPSpec, model, ffn=_known(model.ffn)), spec_of(VocabularySpec, model, **rows)]


ROWS_UNKNOWN = {"vocab": 0, "vocab_multiple": 1}


def _known(size: int) -> int:
    return 0 if size is UNUSABLE else size


def heads_fit(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Query heads, key and value groups and head width go together."""
    rotary = config.model.positions == "rope"
    yield from spec_of(AttentionSpec, config.model, rotary=rotary).size_violations()


def layers_fit(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Every stage has a layer, unless the layers of each are listed; a list covers them all."""
    listed, layers, count = config.parallel.layers_per_stage, config.model.layers, stages(config)
    if listed is None:
        if count > layers:
            rule = f"model.layers={layers} leaves some of the pp·chunks = {count} stages without a layer"
            most = layers // config.schedule.chunks
            legal = (f"at most {most}",) if most else ()
            yield Violation("parallel.pp", config.parallel.pp, rule, (*legal, "parallel.layers_per_stage=[…]"))
        return
    sums = (f"{counted(count, 'number')} with the sum {layers}", None)
    if len(listed) != count:
        rule = f"must list the layers of each of the pp·chunks = {counted(count, 'stage')}, not of {len(listed)}"
        yield Violation("parallel.layers_per_stage", listed, rule, sums)
    elif sum(listed) != layers:
        rule = f"must sum to model.layers={layers}, not {sum(listed)}"
        yield Violation("parallel.layers_per_stage", listed, rule, sums)


def batch_fits(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """The global batch is a whole number of microbatches on every data-parallel rank."""
    batch, dp = config.batch, data_parallel_degree(config, world_size)
    unit = batch.micro_size * dp
    if batch.global_size % unit:
        rule = f"must be a multiple of batch.micro_size={batch.micro_size} times dp={dp}"
        below = batch.global_size // unit * unit
        legal = (below, below + unit) if below else (unit,)
        yield Violation("batch.global_size", batch.global_size, rule, legal)


def schedule_fits(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """The schedule exists and runs with these sizes and options; a file of actions is read."""
    schedule, batch, dp = config.schedule, config.batch, data_parallel_degree(config, world_size)
    microbatches = max(1, batch.global_size // (batch.micro_size * dp))  # none is reported by its own rule
    sizes = (schedule.name, config.parallel.pp, schedule.chunks, microbatches)
    options: dict[str, Any] = {"round": schedule.round, "path": None if schedule.path is None else str(schedule.path)}
    if found := schedule_violations(*sizes, **options):
        yield from found
        return
    zero, ranks = config.parallel.zero, dp * config.parallel.cp
    if zero.stage >= 2 and (zero.shard_size or ranks) > 1 and splits_backward(*sizes, **options):
        rule = f"parallel.zero.stage={zero.stage} reduces gradients in I and would miss those of W"
        whole = "1f1b" if schedule.chunks == 1 else "interleaved"
        yield Violation("schedule.name", schedule.name, rule, (whole, "parallel.zero.stage=1"))


def shards_fit(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """The ranks that share the optimizer's state are an equal part of the data ranks."""
    zero, ranks = config.parallel.zero, data_parallel_degree(config, world_size) * config.parallel.cp
    if zero.shard_size is None:
        return
    if zero.stage == 0:
        rule = "parallel.zero.stage=0 shares nothing"
        yield Violation("parallel.zero.shard_size", zero.shard_size, rule, (None, "parallel.zero.stage=1"))
    elif ranks % zero.shard_size:
        rule = f"must divide dp·cp = {ranks}"
        yield Violation("parallel.zero.shard_size", zero.shard_size, rule, tuple(divisors(ranks)))


def full_shards_fit(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Parameters that are cut over data ranks belong to one stage of a rank; a period is chosen where there is one."""
    zero = config.parallel.zero
    if zero.gather == "microbatch" and zero.stage < 3:
        rule = f"parallel.zero.stage={zero.stage} keeps parameters whole over a step"
        yield Violation("parallel.zero.gather", zero.gather, rule, ("step", "parallel.zero.stage=3"))
    if zero.reduce == "microbatch" and zero.stage < 2:
        rule = f"parallel.zero.stage={zero.stage} reduces gradients once a step"
        yield Violation("parallel.zero.reduce", zero.reduce, rule, ("step", "parallel.zero.stage=2"))
    if zero.stage >= 2 and config.model.tied and config.parallel.pp == 1 and config.schedule.chunks > 1:
        rule = "model.tied=true has the first and the last stage share a parameter, and both are on one rank"
        yield Violation("parallel.zero.stage", zero.stage, rule, (0, 1, "schedule.chunks=1", "model.tied=false"))
    if zero.stage >= 2 and config.run.sample_prompt is not None:
        rule = "a sample between steps needs whole parameters on each rank"
        yield Violation("run.sample_prompt", config.run.sample_prompt, rule, (None, "parallel.zero.stage=1"))


LAYOUT_RULES = (
    world_fits,
    nodes_fit,
    tensor_parallel_fits,
    heads_fit,
    layers_fit,
    batch_fits,
    schedule_fits,
    shards_fit,
    full_shards_fit,
)
