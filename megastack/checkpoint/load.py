"""Load a checkpoint of any layout into the state of this one.

Every rank calls :func:`load`. First all ranks look: each compares its items with the manifest and looks at the sizes of
its share of the files, and what they found is put together, so that every rank comes to the same verdict before a value
changes. Then each rank reads its own boxes, straight into place. The content of the files is checked in that same pass,
each file by one rank; a rank that finds damage tells all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from megastack.checkpoint.collectives import gather, one_error
from megastack.checkpoint.items import DTYPE_NAMES, DTYPES, State, StateItem
from megastack.checkpoint.manifest import TRAINER, Manifest, file_error, read_manifest, read_trainer, size_error
from megastack.checkpoint.planners import BoxLoadPlanner
from megastack.checkpoint.publish import listed
from megastack.checkpoint.storage import BoxReader
from megastack.comm.group import AxisGroup
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh

WEIGHTS = "model/"
"""What the names of model weights begin with."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did, over all ranks.

    Attributes:
        path: the checkpoint.
        loaded: names that were loaded.
        missing: names in the state that the checkpoint lacks; they keep the values they had (not strict only).
        unexpected: names in the checkpoint that no rank's state has (not strict only).
        cast: names whose dtype was converted (``cast=True`` only).
        trainer: the trainer's state; empty after a load of weights only.
    """

    path: Path
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Findings:
    """What one rank found; the union over the ranks is the verdict."""

    wanted: set[str] = field(default_factory=set)
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
    """Fill ``state`` from the checkpoint folder ``path``; nothing changes unless everything fits.

    Only damage that no file's size shows comes out while tensors are being filled: the error then says so, and the
    state is of no use until another checkpoint is loaded into it.

    Args:
        path: a checkpoint folder, the same on all ranks.
        state: this rank's items, whose tensors are written to; its ``trainer`` becomes the stored one, except after a
            load of weights only.
        mesh: all of its ranks call.
        strict: refuse missing and unexpected names; otherwise they are left out and reported.
        weights_only: look at names that begin with ``model/`` only, on both sides.
        cast: convert where two floating-point dtypes differ; otherwise that is refused.

    Raises:
        CheckpointError: the same on every rank: a missing, corrupt or truncated file by name, or all the names that are
            missing, unexpected, or of another shape or dtype, in one report.
    """
    folder, world = Path(path).absolute(), mesh.world
    findings, manifest, items = _Findings(), None, {}
    try:
        items = _chosen(state.by_name(), weights_only)
        findings.wanted = set(items)
        manifest = read_manifest(folder)
        _compare(items, manifest, cast, findings)
        findings.errors += _file_errors(folder, manifest, world)
    except (CheckpointError, OSError) as error:
        findings.errors.append(str(error))
    everyone = _union(gather(findings, world))
    if everyone.errors or manifest is None:
        raise CheckpointError(f"{folder}: was not loaded\n" + "\n".join(everyone.errors))
    stored = set(_chosen(dict(manifest.tensors), weights_only))
    _judge(folder, everyone, stored, strict)
    here = {name: item for name, item in items.items() if name in stored}
    with one_error(f"{folder}: was not loaded, and left the state half filled"), world.blocks("checkpoint_load"):
        dcp.load(
            {},
            storage_reader=BoxReader(folder, manifest, world),
            planner=BoxLoadPlanner(here),
            process_group=world.group,
            no_dist=world.group is None,
        )
    if not weights_only:
        state.trainer = read_trainer(folder)
    return LoadReport(
        folder,
        loaded=tuple(sorted(everyone.wanted & stored)),
        missing=tuple(sorted(everyone.wanted - stored)),
        unexpected=tuple(sorted(stored - everyone.wanted)),
        cast=tuple(sorted(everyone.cast)),
        trainer={} if weights_only else dict(state.trainer),
    )


def _chosen(named: dict[str, Any], weights_only: bool) -> dict[str, Any]:
    return {name: value for name, value in named.items() if not weights_only or name.startswith(WEIGHTS)}


def _compare(items: dict[str, StateItem], manifest: Manifest, cast: bool, findings: _Findings) -> None:
    """Note shapes and dtypes of this rank's items that are not the checkpoint's."""
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
                hint = "; cast=True would convert" if floating else ""
                findings.mismatched[name] = f"dtype {here} here, {there} in the checkpoint{hint}"


def _file_errors(folder: Path, manifest: Manifest, world: AxisGroup) -> list[str]:
    """Look at the sizes of this rank's share of the files; the trainer's small one is read on every rank."""
    files = list(manifest.files.values())[world.rank :: world.size]
    errors = [size_error(folder, file) for file in files if file.name != TRAINER]
    return [error for error in (*errors, file_error(folder, manifest.files[TRAINER])) if error]


def _union(all_findings: list[_Findings]) -> _Findings:
    union = _Findings()
    for findings in all_findings:
        union.wanted |= findings.wanted
        union.cast |= findings.cast
        union.mismatched = findings.mismatched | union.mismatched
        union.errors += [error for error in findings.errors if error not in union.errors]
    return union


def _judge(folder: Path, everyone: _Findings, stored: set[str], strict: bool) -> None:
    """Raise one report of all names that do not fit."""
    missing, unexpected = sorted(everyone.wanted - stored), sorted(stored - everyone.wanted)
    lines = [f"mismatched: {name}: {said}" for name, said in sorted(everyone.mismatched.items())]
    if strict and missing:
        lines.append(f"missing from the checkpoint: {listed(missing, 100)}")
    if strict and unexpected:
        lines.append(f"unexpected in the checkpoint: {listed(unexpected, 100)}")
    if lines:
        hint = "\nstrict=False leaves out missing and unexpected names" if strict and (missing or unexpected) else ""
        raise CheckpointError(f"{folder}: does not fit the state\n" + "\n".join(lines) + hint)
