"""Training runs that take a second: a tiny model on a tiny file, with ranks forked from this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megastack.cli.main import main
from megastack.observe.folder import RunFolder
from megastack.observe.metrics import read_metrics
from megastack.observe.status import read_status

DOCUMENTS = [f"{number} times {number} is {number * number}, and so on." for number in range(48)]

MODEL = ("model.layers=2", "model.hidden=16", "model.heads=2", "model.kv_groups=2", "model.ffn=32")
BATCH = ("batch.global_size=4", "batch.sequence_length=16")


def text(folder: Path) -> Path:
    """A file of short documents."""
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    return path


def overrides(folder: Path) -> list[str]:
    """The overrides that make a run tiny; its folder is ``folder/run`` unless ``run.dir`` is overridden."""
    data = ["data.source=jsonl", f"data.paths=[{text(folder)}]", "data.validation_fraction=0.2"]
    run = [
        f"run.dir={folder / 'run'}",
        f"run.root={folder}",
        "observe.tensorboard=false",
        "launch.threads_per_rank=1",
    ]
    return ["experiment=parity", *MODEL, *BATCH, *data, *run]


def train(folder: Path, *more: str) -> int:
    """Run ``megastack train`` in this process and return the exit code."""
    return main(["train", *overrides(folder), *more])


def rows(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The last row of each step of a run."""
    return read_metrics(RunFolder(run).metrics, kind)


def events(run: Path) -> list[dict[str, Any]]:
    """All event rows, in order."""
    lines = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
    return [row for row in lines if row["kind"] == "event"]


def losses(run: Path) -> list[float]:
    """The training losses of a run, by step."""
    return [row["loss"] for row in rows(run)]


def status(run: Path) -> dict[str, Any]:
    """The record ``status.json``."""
    found = read_status(RunFolder(run).status)
    assert found is not None
    return found
