"""The layouts, models and optimizers that parity is tested on, as overrides of the configuration."""

from __future__ import annotations

LAYOUTS = {
    "dp2": ["parallel.dp=2"],
    "dp4": ["parallel.dp=4"],
    "tp2": ["parallel.tp=2"],
    "tp4": ["parallel.tp=4"],
    "pp2": ["parallel.pp=2"],
    "pp4": ["parallel.pp=4"],
    "dp2.tp2": ["parallel.dp=2", "parallel.tp=2"],
    "tp2.pp2": ["parallel.tp=2", "parallel.pp=2"],
    "dp2.pp2": ["parallel.dp=2", "parallel.pp=2"],
    "dp2.tp2.pp2": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2"],
    "pp2x2": ["parallel.pp=2", "schedule=interleaved", "schedule.chunks=2"],
    "pp4x2": ["parallel.pp=4", "schedule=interleaved", "schedule.chunks=2"],
}

FAMILIES = {
    "llama": [],
    "gpt2": [
        "model.family=gpt2",
        "model.norm=layer",
        "model.activation=gelu",
        "model.positions=learned",
        "model.bias=true",
    ],
}

CHOICES = {
    "layout": tuple(LAYOUTS),
    "family": tuple(FAMILIES),
    "sequence_parallel": ("true", "false"),
    "tied": ("true", "false"),
    "kv_groups": ("4", "1"),
    "optimizer": ("sgd", "adamw"),
}


def model_overrides(row: dict[str, str], text: str) -> list[str]:
    """Everything of a row but the layout: what the reference shares with it. 8 layers where there are 8 stages."""
    return [
        "experiment=parity",
        f"model.layers={8 if row['layout'] == 'pp4x2' else 4}",
        "model.hidden=32",
        "model.heads=4",
        f"model.kv_groups={row['kv_groups']}",
        "model.ffn=48",
        f"model.tied={row['tied']}",
        "model.dropout=0.1",
        *FAMILIES[row["family"]],
        "batch.global_size=8",
        "batch.micro_size=1",
        "batch.sequence_length=16",
        "data.source=jsonl",
        f"data.paths=[{text}]",
        f"optim.name={row['optimizer']}",
        "optim.lr=0.01",
    ]


def layout_overrides(row: dict[str, str]) -> list[str]:
    """What differs from the reference."""
    return [*LAYOUTS[row["layout"]], f"parallel.sequence_parallel={row['sequence_parallel']}"]
