"""Load a checkpoint of any layout into the state of the current layout.

Every rank calls :func:`load`. Each rank first compares its items with the manifest and checks the sizes of its share of
the files. The findings of all ranks are gathered, so that all ranks accept or reject the checkpoint before any value
changes. Each rank then reads its boxes directly into its tensors. The content of the files is checked in the same pass,
each file by one rank; damage found by any rank is an error on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp

from megastack.checkpoint.collectives import checkpoint_errors
from megastack.checkpoint.integrity import list_names
from megastack.checkpoint.manifest import TRAINER, Manifest, file_error, read_manifest, read_trainer, size_error
from megastack.checkpoint.planners import BoxLoadPlanner
from megastack.checkpoint.reader import BoxReader
from megastack.checkpoint.state import DTYPE_NAMES, DTYPES, WEIGHT_PREFIX, State, StateItem
from megastack.comm.group import AxisGroup
from megastack.comm.objects import all_gather_objects
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class LoadReport:
    """Result of a load, over all ranks.

    Attributes:
        path: the checkpoint.
        loaded: names that were loaded.
        missing: names in the state that the checkpoint lacks; they keep their values (``strict=False`` only).
        unexpected: names in the checkpoint that are in no rank's state (``strict=False`` only).
        cast: names whose dtype was converted (``cast=True`` only).
        trainer: the trainer's state; empty if only weights were loaded.
    """

    path: Path
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Findings:
    """Names and errors that one rank found; the outcome depends on the union over all ranks."""

    requested: set[str] = field(default_factory=set)
    mismatched: dict[str, str] = field(default_factory=dict)
    cast: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


def load(
    path: str | Path,
    state: State,
    mesh: Mesh,
    *,
    strict: bool = True,
    weights_only: bool = False,
    cast: bool = False,
) -> LoadReport:
    """Fill ``state`` from the checkpoint folder ``path``; nothing changes unless names, shapes and dtypes match.

    Corruption that does not change a file's size is found only while tensors are being filled. The error then states
    that the state is partially overwritten; load another checkpoint before using it.

    Args:
        path: a checkpoint folder, the same on all ranks.
        state: this rank's items, whose tensors are overwritten; the stored ``trainer`` replaces its ``trainer``, unless
            only weights are loaded.
        mesh: the mesh; all of its ranks call this function.
        strict: raise on missing and unexpected names; otherwise they are skipped and reported.
        weights_only: consider only names that begin with ``model/``, in the state and the checkpoint.
        cast: convert between floating-point dtypes; otherwise a different dtype is an error.

    Raises:
        CheckpointError: the same on every rank; the message names the file that is missing, corrupt or truncated, or
            all tensors that are missing, unexpected, or differ in shape or dtype.
    """
    folder, world = Path(path).absolute(), mesh.world
    findings, manifest, items = _Findings(), None, {}
    try:
        items = _select(state.by_name(), weights_only)
        findings.requested = set(items)
        manifest = read_manifest(folder)
        _compare(items, manifest, cast, findings)
        findings.errors += _file_errors(folder, manifest, world)
    except (CheckpointError, OSError) as error:
        findings.errors.append(str(error))
    everyone = _union(all_gather_objects(findings, world))
    if everyone.errors or manifest is None:
        raise CheckpointError(f"{folder}: was not loaded\n" + "\n".join(everyone.errors))
    stored = set(_select(dict(manifest.tensors), weights_only))
    _raise_mismatches(folder, everyone, stored, strict)
    found = {name: item for name, item in items.items() if name in stored}
    task = f"{folder}: was not loaded, and left the state partially overwritten"
    with checkpoint_errors(task), world.blocks("checkpoint_load"):
        dcp.load(
            {},
            storage_reader=BoxReader(folder, manifest, world),
            planner=BoxLoadPlanner(found),
            process_group=world.group,
            no_dist=world.group is None,
        )
    if not weights_only:
        state.trainer = read_trainer(folder)
    return LoadReport(
        folder,
        loaded=tuple(sorted(everyone.requested & stored)),
        missing=tuple(sorted(everyone.requested - stored)),
        unexpected=tuple(sorted(stored - everyone.requested)),
        cast=tuple(sorted(everyone.cast)),
        trainer={} if weights_only else dict(state.trainer),
    )


def _select(named: dict[str, T], weights_only: bool) -> dict[str, T]:
    return {name: value for name, value in named.items() if not weights_only or name.startswith(WEIGHT_PREFIX)}


def _compare(items: dict[str, StateItem], manifest: Manifest, cast: bool, findings: _Findings) -> None:
    """Record shapes and dtypes of this rank's items that differ from the checkpoint's."""
    for name, item in items.items():
        if (stored := manifest.tensors.get(name)) is None:
            continue
        if tuple(item.shape) != stored.shape:
            findings.mismatched[name] = f"shape {tuple(item.shape)} here, {stored.shape} in the checkpoint"
        elif item.dtype is not None and DTYPE_NAMES[item.dtype] != stored.dtype:
            dtypes = (item.dtype, DTYPES[stored.dtype])
            floating = all(dtype.is_floating_point for dtype in dtypes)
            if cast and floating:
                findings.cast.add(name)
            else:
                here, there = (str(dtype).removeprefix("torch.") for dtype in dtypes)
                hint = "; cast=True converts" if floating else ""
                findings.mismatched[name] = f"dtype {here} here, {there} in the checkpoint{hint}"


def _file_errors(folder: Path, manifest: Manifest, world: AxisGroup) -> list[str]:
    """Check the sizes of this rank's share of the files; every rank reads the small ``trainer.json``."""
    files = list(manifest.files.values())[world.rank :: world.size]
    errors = [size_error(folder, file) for file in files if file.name != TRAINER]
    return [error for error in (*errors, file_error(folder, manifest.files[TRAINER])) if error]


def _union(all_findings: list[_Findings]) -> _Findings:
    union = _Findings()
    for findings in all_findings:
        union.requested |= findings.requested
        union.cast |= findings.cast
        union.mismatched = findings.mismatched | union.mismatched
        union.errors += [error for error in findings.errors if error not in union.errors]
    return union


def _raise_mismatches(folder: Path, everyone: _Findings, stored: set[str], strict: bool) -> None:
    """Raise one error with all mismatched names, if there are any."""
    missing, unexpected = sorted(everyone.requested - stored), sorted(stored - everyone.requested)
    lines = [f"mismatched: {name}: {text}" for name, text in sorted(everyone.mismatched.items())]
    if strict and missing:
        lines.append(f"missing from the checkpoint: {list_names(missing, 100)}")
    if strict and unexpected:
        lines.append(f"unexpected in the checkpoint: {list_names(unexpected, 100)}")
    if lines:
        hint = "\nstrict=False skips missing and unexpected names" if strict and (missing or unexpected) else ""
        raise CheckpointError(f"{folder}: does not match the state\n" + "\n".join(lines) + hint)
