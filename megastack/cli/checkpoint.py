"""``megastack checkpoint ls|show|verify PATH``: list checkpoints, show a checkpoint, or check that it is complete.

PATH is a checkpoint, a ``checkpoints`` folder or a run folder. The exit code is 0, or 1 if a checkpoint is corrupt or
incomplete or if there is none. This module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

from megastack.checkpoint.folder import (
    checkpoints_folder,
    find_checkpoint,
    is_checkpoint,
    list_checkpoints,
    read_latest,
)
from megastack.checkpoint.integrity import checkpoint_error
from megastack.checkpoint.manifest import (
    ITEM_SIZES,
    Manifest,
    file_error,
    read_manifest,
    read_trainer,
    size_errors,
)
from megastack.cli.options import add_json_argument
from megastack.errors import CheckpointError, counted
from megastack.observe.printable import printable

HELP = "list checkpoints, show one, or check every byte: ls, show or verify PATH"
ACTIONS = {
    "ls": "every checkpoint of a folder, with its size and whether it is complete",
    "show": "one checkpoint: its files, its tensors, the trainer's state",
    "verify": "read every byte of one checkpoint, or of all in a folder, and compare the checksums",
}
Answer = tuple[str, dict[str, Any], bool]
"""The text to print, the same content as JSON, and whether every checkpoint is valid."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``checkpoint``."""
    actions = "; ".join(f"{name}: {meaning}" for name, meaning in ACTIONS.items())
    parser.add_argument("action", choices=ACTIONS, help=actions)
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, a checkpoints folder, or a run folder")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run ``checkpoint`` and return the exit code."""
    answer: Callable[[Path], Answer] = {"ls": _list, "show": _show, "verify": _verify}[options.action]
    try:
        text, record, good = answer(options.path)
    except CheckpointError as error:
        text, record, good = str(error), {"fault": str(error)}, False
    sys.stdout.write(printable(text.rstrip()) + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


def _list(path: Path) -> Answer:
    rows, records = [], []
    folder = checkpoints_folder(path)
    latest = read_latest(folder)
    for entry in list_checkpoints(folder):
        record: dict[str, Any] = {"path": str(entry.path), "step": entry.step, "fault": entry.error}
        if entry.error is None:
            with suppress(CheckpointError):  # its run has just removed it
                manifest = read_manifest(entry.path)
                record |= {"bytes": _size(manifest), "ranks": manifest.world_size, "time": manifest.time}
        if entry.error is None and "bytes" not in record:
            continue
        records.append(record | {"latest": entry.path == latest})
        rows.append(_list_row(records[-1], entry.path))
    if not rows:
        raise CheckpointError(f"{folder}: holds no checkpoints" if folder.is_dir() else f"{path}: no such folder")
    rows = [("checkpoint", "written", "size", "ranks", "state"), *rows]
    left = [hidden.name for hidden in sorted(folder.glob(".step_*"))]
    notes = [f"{name}: left over by an unfinished save or removal; the next start or save clears it" for name in left]
    errors = [str(record["fault"]) for record in records if record["fault"]]
    good = not errors
    return "\n".join([_table(rows), *errors, *notes]), {"checkpoints": records, "leftovers": left}, good


def _list_row(record: dict[str, Any], path: Path) -> tuple[str, ...]:
    name = path.name + (" (latest)" if record["latest"] else "")
    if record["fault"]:
        return name, "-", "-", "-", "incomplete"
    return name, _when(record["time"]), _bytes(record["bytes"]), str(record["ranks"]), "complete"


def _show(path: Path) -> Answer:
    chosen = find_checkpoint(path)
    manifest = read_manifest(chosen)
    errors = size_errors(chosen, manifest)
    trainer = {} if errors else read_trainer(chosen)
    ranks = counted(manifest.world_size, "rank")
    head = f"{chosen}: {_bytes(_size(manifest))} from {ranks}, written {_when(manifest.time)}"
    files = [("file", "size", "crc32"), *((f.name, _bytes(f.size), f"{f.crc32:08x}") for f in manifest.files.values())]
    tensors = [("tensor", "dtype", "shape", "boxes", "size")]
    for name, tensor in sorted(manifest.tensors.items()):
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        size = prod(tensor.shape) * ITEM_SIZES[tensor.dtype]
        tensors.append((name, tensor.dtype, shape, str(len(tensor.boxes)), _bytes(size)))
    values = {key: value for key, value in trainer.items() if key != "config"}  # long; --json includes it
    state = [("trainer", "value"), *((key, json.dumps(value)) for key, value in values.items())]
    text = "\n\n".join([head, _table(files), _table(tensors), _table(state), *errors])
    return text, _as_record(chosen, manifest, trainer, errors), not errors


def _as_record(path: Path, manifest: Manifest, trainer: dict[str, Any], errors: list[str]) -> dict[str, Any]:
    tensors = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "boxes": len(tensor.boxes)}
        for name, tensor in manifest.tensors.items()
    }
    return {
        "path": str(path),
        "ranks": manifest.world_size,
        "time": manifest.time,
        "files": {file.name: file.size for file in manifest.files.values()},
        "tensors": tensors,
        "trainer": trainer,
        "faults": errors,
    }


def _verify(path: Path) -> Answer:
    if is_checkpoint(path):
        paths = [path]
    else:
        paths = [entry.path for entry in list_checkpoints(checkpoints_folder(path))] or [find_checkpoint(path)]
    lines, records = [], {}
    for chosen in paths:
        found, errors = _verified(chosen)
        lines += [*found, f"{chosen}: {'corrupt or incomplete' if errors else 'complete'}"]
        records[str(chosen)] = errors
    return "\n".join(lines), {"faults": records}, not any(records.values())


def _verified(path: Path) -> tuple[list[str], list[str]]:
    """Return a line for each file, and those lines that are errors."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)], [str(error)]
    lines, errors = [], []
    for file in manifest.files.values():
        problem = file_error(path, file)
        errors += [problem] if problem else []
        lines.append(problem or f"{path / file.name}: {_bytes(file.size)}, crc32 {file.crc32:08x}")
    if not errors and (problem := checkpoint_error(path, content=False)):
        lines, errors = [*lines, problem], [problem]
    return lines, errors


def _size(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())


def _when(time: float) -> str:
    return datetime.fromtimestamp(time).isoformat(" ", "seconds")


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
