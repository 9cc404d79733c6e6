"""Implementation of ``megastack verify``: compare layouts with one rank, print the verdicts, write them as JSON."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from megastack.cli.unused import unused_note
from megastack.config.compose import PartialConfig, compose_partial
from megastack.config.convert import InvalidValueError
from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, MegastackError, counted
from megastack.observe.console import Console
from megastack.preflight.data import check_data
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.model import check_mesh, check_model
from megastack.testing.compare import KINDS
from megastack.testing.finding import figure, finding_lines
from megastack.testing.layouts import in_double, layout_overrides, layout_text, reference_of
from megastack.testing.ranks import RankFailure
from megastack.testing.verify import REJECTIONS, Verdict, Verifier, failure_summary

EQUAL, DIFFERS, REJECTED = 0, 1, 78
WIDTH = 100
WRAP_OPTIONS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def verify(options: argparse.Namespace) -> int:
    """Compare layouts with one rank, print the verdicts and return the exit code.

    Raises:
        ConfigError: configuration, data or layers are invalid; nothing was compared.
    """
    try:
        return _verify(options)
    except REJECTIONS as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None


def _verify(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    console = Console()
    many, given = (
        options.all,
        compose_partial(options.overrides, config_dir=options.config_dir, config_name=options.config_name),
    )
    with given.located_errors():
        dataset = _check_inputs(given, many)
    config = given.config
    verifier = Verifier(config, steps=options.steps, dataset=dataset)
    layouts = verifier.layouts(options.ranks or mesh_shape(config).world_size) if many else [verifier.own_layout()]
    console.line(_opening(config, verifier, layouts, many))
    for note in _notes(config, options.overrides):
        console.line(f"note     {note}")
    failure = _reference_failure(verifier)
    if failure:
        console.line(f"failed   on one rank: {failure}", style="red")
    verdicts = [] if failure else _check_all(console, verifier, layouts, many)
    if options.json:
        text = json.dumps(as_record(verifier, verdicts, failure), indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return DIFFERS if failure else exit_code(verdicts)


def _check_inputs(given: PartialConfig, many: bool) -> Dataset:
    """Check the configuration (for many layouts, the single-rank one) and return the data.

    Raises:
        ConfigError: every error.
    """
    config = given.config
    with suppress(InvalidValueError):  # a section that could not be read; the error is already collected
        config = in_double(config)
    config = reference_of(config) if many else config
    errors = ErrorCollector([*given.errors, *violations(config)])
    check_model(config, errors, check_mesh(config, errors))
    dataset = check_data(config, errors)
    errors.require_none()
    assert dataset is not None
    return dataset


def _reference_failure(verifier: Verifier) -> str | None:
    """Return why training fails on one rank; None if it does not."""
    try:
        _ = verifier.references
    except REJECTIONS:
        raise
    except RankFailure as failure:
        return failure_summary(failure)
    except MegastackError as error:
        return str(error)
    return None


def _check_all(console: Console, verifier: Verifier, layouts: Sequence[TrainConfig], many: bool) -> list[Verdict]:
    """Compare the layouts one after another, and print each verdict immediately."""
    width = max(len(layout_text(layout)) for layout in layouts)
    if many:
        console.line(" " * (9 + width) + "".join(f"  {kind:>10}" for kind in KINDS), style="bold")
    verdicts = []
    for layout in layouts:
        verdicts.append(verifier.check(layout))
        _print_verdict(console, verdicts[-1], width if many else None)
    if many:
        _close_table(console, verdicts)
    return verdicts


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """Return 1 if any layout differs or fails, else 78 if a layer rejects any, else 0."""
    statuses = {verdict.status for verdict in verdicts}
    if statuses & {"differs", "failed"}:
        return DIFFERS
    return REJECTED if "refused" in statuses else EQUAL


def _opening(config: TrainConfig, verifier: Verifier, layouts: Sequence[TrainConfig], many: bool) -> str:
    own = config.precision.compute.value
    precision = "fp64" if own == "fp64" else f"fp64 (the configuration says {own})"
    count = mesh_shape(layouts[0]).world_size
    what = f"{counted(len(layouts), 'layout')} of {counted(count, 'rank')}" if many else layout_text(layouts[0])
    steps = counted(verifier.steps, "step")
    lines = [f"verify   {what}, against one rank: {steps}, {' and '.join(verifier.runs)}, {precision}, on CPU"]
    if count == 1:
        lines.append(
            "note     layouts are compared with one rank, which is this layout; try parallel.tp=2, or --all --ranks 4"
        )
    return "\n".join(lines)


def _notes(config: TrainConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Yield what the comparison leaves out."""
    if config.compile:
        yield "compile=true is not compared: verify runs the layouts without compilation"
    if config.device == "cuda":
        yield "device=cuda is not compared: verify runs the layouts on the CPU"
    if note := unused_note("verify", overrides):
        yield note


def _print_verdict(console: Console, verdict: Verdict, width: int | None) -> None:
    if width is not None:
        worst = {kind: max((w[kind] for w in verdict.worst.values()), default=None) for kind in KINDS}
        figures = "".join(f"  {figure(worst[kind]):>10}" for kind in KINDS) if verdict.worst else ""
        style = "" if verdict.status == "equal" else "red"
        console.line(f"{verdict.status:8} {layout_text(verdict.config):{width}}{figures}".rstrip(), style=style)
        return
    if verdict.worst:
        console.table(["", *KINDS], [[run, *(figure(w[kind]) for kind in KINDS)] for run, w in verdict.worst.items()])
    _print_explanation(console, verdict)


def _print_explanation(console: Console, verdict: Verdict) -> None:
    if verdict.status == "equal":
        console.line(f"equal    everything agrees to {Verifier.tolerance:g}", style="green")
        return
    for label, text in _lines(verdict):
        style = "red" if label in ("differs", "failed", "refused") else ""
        for at, line in enumerate(
            line for part in text.splitlines() for line in textwrap.wrap(part, WIDTH, **WRAP_OPTIONS)
        ):
            console.line(f"{'' if at else label:8} {line}", style=style)


def _lines(verdict: Verdict) -> list[tuple[str, str]]:
    """Explain a layout that is not equal, with a label for each part."""
    finding = verdict.finding
    if verdict.status != "differs" or finding is None:
        owner = f" ({finding.owner})" if finding and finding.owner else ""
        where = f" in {finding.name}{owner}" if finding and finding.name else ""
        lines = [(verdict.status, f"on this layout{where}: {verdict.reason}")]
        return [*lines, ("cause", finding.cause)] if finding and finding.cause else lines
    return finding_lines(finding)


def _close_table(console: Console, verdicts: Sequence[Verdict]) -> None:
    bad = [verdict for verdict in verdicts if verdict.status != "equal"]
    if not bad:
        agree = f"all {len(verdicts)} layouts agree" if len(verdicts) > 1 else "the one layout agrees"
        console.line(f"equal    {agree} to {Verifier.tolerance:g}", style="green")
        return
    verb = "are" if len(bad) > 1 else "is"
    count = f"{len(bad)} of {counted(len(verdicts), 'layout')} {verb} not equal"
    console.line(f"\n{count}; the first, {layout_text(bad[0].config)}:")
    _print_explanation(console, bad[0])
    console.line(f"alone    megastack verify … {' '.join(layout_overrides(bad[0].config))}")


def as_record(verifier: Verifier, verdicts: Sequence[Verdict], failure: str | None = None) -> dict[str, Any]:
    """Return a verification as JSON; ``failure`` is the reason why the reference could not be computed."""
    return {
        "equal": failure is None and all(verdict.status == "equal" for verdict in verdicts),
        "reason": failure,
        "steps": verifier.steps,
        "optimizers": list(verifier.runs),
        "precision": "fp64",
        "tolerance": Verifier.tolerance,
        "layouts": [_verdict_record(verdict) for verdict in verdicts],
    }


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    finding = verdict.finding
    return {
        "layout": layout_text(verdict.config),
        "overrides": layout_overrides(verdict.config),
        "status": verdict.status,
        "worst": {run: {kind: _number(x) for kind, x in worst.items()} for run, worst in verdict.worst.items()},
        "reason": verdict.reason,
        "finding": None
        if finding is None
        else {
            "kind": finding.kind,
            "name": finding.name,
            "step": finding.step + 1,
            "relative": _number(finding.relative),
            "ratio": _number(finding.ratio),
            "cause": finding.cause,
            "owner": finding.owner,
            "module": finding.module,
            "also": list(finding.also),
        },
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
