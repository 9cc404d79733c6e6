"""A layout as text for a terminal: the short form at the start of a run and the full one of ``megastack show``."""

from __future__ import annotations

from collections.abc import Sequence

from megastack.config.phases import phase_configs, source_text
from megastack.config.schema import TrainConfig
from megastack.errors import counted
from megastack.mesh.shape import DENSE_AXES
from megastack.models.stages import StageSlice
from megastack.pipeline.render import render
from megastack.plan.layout import Layout, RankShare

MAX_DRAWN_ACTIONS = 256
"""The maximum number of actions of a schedule that is drawn in a terminal."""
MAX_ROWS = 16


def short(config: TrainConfig, world_size: int | None = None) -> str:
    """Five lines: model, grid, batch, schedule, memory; more for user-defined layers and for several data phases."""
    return _short(Layout(config, world_size))


def _short(layout: Layout) -> str:
    config = layout.config
    lines = [_model(layout), *_user_layers(config), _grid(layout), _batch(layout), *_phases(config)]
    return "\n".join([*lines, *_schedule_figures(layout)])


def full(config: TrainConfig, world_size: int | None = None) -> str:
    """The short form, the ranks, the share of each pipeline rank, and a drawing of the schedule."""
    layout = Layout(config, world_size)
    parts = [_short(layout), "ranks\n" + layout.shape.table(), _pipeline_ranks(layout)]
    small = sum(map(len, layout.schedule.ranks)) <= MAX_DRAWN_ACTIONS
    parts.append(render(layout.timeline) if small else "for a drawing of the schedule: --format svg > schedule.svg")
    return "\n\n".join(parts)


def as_record(config: TrainConfig, world_size: int | None = None) -> dict[str, object]:
    """The same facts as a JSON object."""
    layout = Layout(config, world_size)
    timeline = layout.timeline
    return {
        "world_size": layout.shape.world_size,
        "degrees": {axis.value: layout.shape.size(axis) for axis in DENSE_AXES},
        "parameters": layout.parameters,
        "shared_memory_bytes": layout.shared_memory_bytes,
        "microbatches": layout.microbatches,
        "bubble": timeline.bubble,
        "step_bubble": timeline.step_bubble,
        "stages": [
            {"layers": list(part.layers), "embedding": part.embedding, "head": part.head} for part in layout.slices
        ],
        "places": [
            {
                "pp": share.pp,
                "parameters": share.parameters,
                "weight_bytes": share.bytes.parameters,
                "gradient_bytes": share.bytes.gradients,
                "optimizer_bytes": share.bytes.optimizer,
                "static_bytes": share.bytes.total,
                "peak_activations": share.peak_activations,
                "activation_bytes": share.activation_bytes,
            }
            for share in layout.pipeline_ranks()
        ],
        "data_stages": [
            {"from_step": phase.from_step, "sequence_length": phase.sequence_length, "data": source_text(phase.config)}
            for phase in phase_configs(config)
        ],
    }


def _model(layout: Layout) -> str:
    model = layout.config.model
    tied = ", tied" if model.tied else ""
    return (
        f"model     {model.family.value}, {human(layout.parameters)} parameters: {counted(model.layers, 'layer')}, "
        f"hidden {model.hidden}, heads {model.heads}/{model.kv_groups or model.heads}, ffn {model.ffn}, "
        f"vocabulary {model.vocab:,}{tied}, {precision_text(layout.config)}"
    )


def _user_layers(config: TrainConfig) -> list[str]:
    """The user-defined layers; all figures are for the built-in layers that they replace."""
    options = {name: getattr(config.model, name) for name in ("attention", "mlp", "block")}
    own = [f"{name} is {spec['_target_']}" for name, spec in options.items() if spec]
    return [f"layers    {', '.join(own)}; counted as the built-in {'one' if len(own) == 1 else 'ones'}"] if own else []


def precision_text(config: TrainConfig) -> str:
    """The number formats of a run, e.g. ``bf16 compute, fp32 main parameters, fp32 reduction``."""
    precision = config.precision
    compute = precision.compute.value
    lower = compute in ("bf16", "fp16")
    wide = "fp32" if lower else compute
    parts = [f"{compute} compute", *(["fp32 main parameters"] if lower else [])]
    parts.append(f"{precision.reduce.value if precision.reduce else wide} reduction")
    if precision.loss_scale is not None:
        parts.append(f"loss scale {precision.loss_scale:g}")
    elif compute == "fp16":
        parts.append("dynamic loss scale")
    return ", ".join(parts)


def _grid(layout: Layout) -> str:
    shape = layout.shape
    degrees = " × ".join(f"{axis}{shape.size(axis)}" for axis in DENSE_AXES if axis != "cp" or shape.cp > 1)
    sharded = ", sequence parallel" if layout.config.parallel.sequence_parallel and shape.tp > 1 else ""
    return f"grid      {degrees} = {counted(shape.world_size, 'rank')}{sharded}{_zero(layout)}"


def _zero(layout: Layout) -> str:
    zero, ranks = layout.config.parallel.zero, layout.shape.dp * layout.shape.cp
    state = " on the host" if zero.offload else ""
    if zero.stage == 0:
        return f", optimizer state{state}" if state else ""
    return f", ZeRO-{zero.stage} over {zero.shard_size or ranks} of {counted(ranks, 'data rank')}{state}"


def _batch(layout: Layout) -> str:
    batch = layout.config.batch
    tokens = batch.global_size * batch.sequence_length
    return (
        f"batch     {counted(batch.global_size, 'sequence')} = "
        f"{counted(layout.microbatches, 'microbatch', 'microbatches')} × {batch.micro_size} × "
        f"dp {layout.shape.dp}; × {counted(batch.sequence_length, 'token')} = {tokens:,} a step"
    )


def _phases(config: TrainConfig) -> list[str]:
    """A line for each phase of the data; none for a single phase."""
    phases = phase_configs(config)
    ends = [*(phase.from_step for phase in phases[1:]), config.run.steps]
    lines = []
    for phase, end in zip(phases, ends, strict=True):
        tokens = config.batch.global_size * phase.sequence_length
        lines.append(f"steps {phase.from_step + 1:,}–{end:,}: {phase}, {tokens:,} a step")
    return [f"{'phases' if not at else '':<10}{line}" for at, line in enumerate(lines)] if len(lines) > 1 else []


def _schedule_figures(layout: Layout) -> list[str]:
    timeline, shares = layout.timeline, layout.pipeline_ranks()
    heaviest = max(shares, key=lambda share: share.bytes.total)
    peak = max(share.peak_activations for share in shares)
    bubble, whole = f"{timeline.bubble:.1%}", f"{timeline.step_bubble:.1%}"
    over = "" if whole == bubble else f" of a rank's own span, {whole} of the whole step"
    return [
        f"schedule  {layout.schedule.name}, {counted(layout.schedule.stages, 'stage')}; bubble {bubble}{over}; "
        f"at most {counted(peak, 'microbatch', 'microbatches')} in flight",
        f"memory    weights, gradients and optimizer state of the largest rank: {gibibytes(heaviest.bytes.total)}"
        f"{_shared_memory(layout)}",
    ]


def _shared_memory(layout: Layout) -> str:
    reserved = layout.shared_memory_bytes
    return f"; {gibibytes(reserved)} to communicate on a CPU" if reserved else ""


def _pipeline_ranks(layout: Layout) -> str:
    rows = [["pp", "stages", "parameters", "weights", "gradients", "optimizer", "sum", "in flight", "activations"]]
    rows += [_row(share, layout) for share in layout.pipeline_ranks()]
    return "each pipeline rank holds\n" + columns(_cut(rows))


def _row(share: RankShare, layout: Layout) -> list[str]:
    held = share.bytes
    stages = layout.schedule.rank_stages(share.pp)
    return [
        str(share.pp),
        "; ".join(f"{stage}: {unit_text(part)}" for stage, part in zip(stages, share.slices, strict=True)),
        f"{share.parameters:,}",
        *(gibibytes(count) for count in (held.parameters, held.gradients, held.optimizer, held.total)),
        f"{share.peak_activations:g}",
        gibibytes(share.activation_bytes),
    ]


def unit_text(part: StageSlice) -> str:
    """The units of a stage, e.g. ``embedding, 0–7``."""
    layers = part.layers
    blocks = "" if not layers else f"{layers.start}–{layers.stop - 1}" if len(layers) > 1 else f"{layers.start}"
    return ", ".join(filter(None, ["embedding" if part.embedding else "", blocks, "head" if part.head else ""]))


def _cut(rows: list[list[str]]) -> list[list[str]]:
    """The rows, without the middle ones if there are many."""
    if len(rows) <= MAX_ROWS + 2:
        return rows
    half = MAX_ROWS // 2
    return [*rows[: half + 1], ["⋮", *[""] * (len(rows[0]) - 1)], *rows[-half:]]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in aligned columns: the second one left-aligned, the others right-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at == 1 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def human(count: int) -> str:
    """A count with a unit: 8.03 B, 124 M, 3,400."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,}"


def gibibytes(count: int) -> str:
    """Bytes in a readable unit."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
