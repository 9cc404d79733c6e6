"""``verify``: check that a configuration and its layers compute the same on a layout as on one rank.

The configuration is trained for a few steps on one rank and on the layout, in fp64, with its own optimizer and with
plain SGD, since Adam hides a constant factor on a gradient. Losses, gradients, their norm, weights and persistent
buffers must agree by the metric of :mod:`megastack.testing.compare`. If they do not, both run another step with every
module traced, to find the first wrong module.

Ranks are forked from this process, with gloo. It must not hold a process group, and must have run on one thread.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path

import torch

from megastack.assemble.data import read_dataset
from megastack.config.convert import coerce
from megastack.config.layout_rules import mesh_shape
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, DataError, MegastackError, PlacementError, ScheduleError, Violation, counted
from megastack.mesh.shape import DENSE_AXES
from megastack.testing.compare import TOLERANCES, RankReport, Trace
from megastack.testing.diagnose import Evidence, diagnose
from megastack.testing.finding import Finding
from megastack.testing.layouts import in_double, reference_of, valid_layouts, with_sgd
from megastack.testing.localize import RankDeviations
from megastack.testing.module_trace import ModuleTrace
from megastack.testing.purity import impure_modules
from megastack.testing.ranks import RankFailure, run_ranks
from megastack.testing.training import (
    ModuleFailed,
    check_purity,
    compare_training,
    first_samples,
    localize_faults,
    reference_modules,
    reference_traces,
)

PACKAGE = str(Path(__file__).resolve().parents[1])
MOST_RANKS = 64
"""The maximum number of ranks to fork on this machine."""
REJECTIONS = (ConfigError, PlacementError, ScheduleError, DataError)


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a layout with one rank.

    Attributes:
        config: the layout, in fp64.
        status: ``equal``, ``differs``, ``failed`` (it does not run) or ``refused`` (a layer rejects it).
        worst: the largest relative difference by optimizer and kind, within the tolerance or not.
        finding: the first wrong module or number.
        reason: why it failed or was rejected.
    """

    config: TrainConfig
    status: str
    worst: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    finding: Finding | None = None
    reason: str | None = None


class Verifier:
    """Compares layouts of one configuration with one rank.

    Args:
        config: the configuration; fp64 and the CPU replace its precision and device.
        steps: optimizer steps to compare.
        dataset: the data of the configuration, if already read.

    Raises:
        ConfigError: the configuration is invalid even on one rank.
    """

    tolerance = TOLERANCES[torch.float64]

    def __init__(self, config: TrainConfig, *, steps: int = 3, dataset: Dataset | None = None) -> None:
        config, mistyped = coerce(config)
        if mistyped:
            raise ConfigError.of([*mistyped, *violations(config)])
        self.config = in_double(config)
        self.reference_config = reference_of(self.config)
        self.steps = steps
        self._given = dataset
        if found := violations(self.reference_config):
            raise ConfigError.of(found)
        self._modules: dict[int, ModuleTrace] = {}

    @property
    def runs(self) -> tuple[str, ...]:
        """The optimizers of the comparison, the configuration's own first."""
        return tuple(_runs(self.reference_config))

    @cached_property
    def dataset(self) -> Dataset:
        """The data of the configuration, read once and inherited by the ranks."""
        return self._given or read_dataset(self.reference_config)

    @cached_property
    def references(self) -> dict[str, Trace]:
        """The traces on one rank, by optimizer.

        Raises:
            MegastackError: its layers or data are rejected, or it does not run, or it is not finite.
        """
        runs, steps, dataset = _runs(self.reference_config), self.steps, self.dataset
        try:
            traces = run_ranks(lambda: reference_traces(runs, steps, dataset), 1, timeout=self._timeout)[0]
        except RankFailure as failure:
            if isinstance(failure.error, REJECTIONS):
                raise failure.error from None
            raise
        if any(not isfinite(x) for trace in traces.values() for x in (*trace.losses, *trace.norms)):
            raise MegastackError(
                "the training on one rank is not finite within these steps, so there is nothing to compare"
            )
        return traces

    def layouts(self, ranks: int) -> list[TrainConfig]:
        """Every valid layout of this number of ranks.

        Raises:
            ConfigError: there is none, or there are too many ranks to fork.
        """
        _check_rank_count(ranks)
        found = valid_layouts(self.config, ranks)
        if not found:
            raise ConfigError(
                f"--ranks={ranks}: no layout of {counted(ranks, 'rank')} is valid for this model and batch"
            )
        return found

    def own_layout(self) -> TrainConfig:
        """The configuration's own layout.

        Raises:
            ConfigError: it is invalid, or has too many ranks to fork.
        """
        if found := violations(self.config):
            raise ConfigError.of(found)
        _check_rank_count(mesh_shape(self.config).world_size)
        return self.config

    def check(self, layout: TrainConfig) -> Verdict:
        """Compare one layout with one rank.

        Raises:
            MegastackError: see :attr:`references`.
        """
        names = list(self.references[self.runs[0]].weights[0])
        try:
            reports = self._compare(layout)
        except RankFailure as failure:
            return self._failed(layout, failure)
        worst = {
            run: {kind: max(r.worst[run][kind] for r in reports) for kind in reports[0].worst[run]}
            for run in reports[0].worst
        }
        missing = set(names) - {name for report in reports for name in report.names}
        if missing:
            cause = f"no rank holds {', '.join(sorted(missing))}"
            finding = Finding("weight", min(missing), cause=cause, held="missing")
            return Verdict(layout, "differs", worst, finding)
        if not any(report.mismatches for report in reports):
            return Verdict(layout, "equal", worst)
        return Verdict(layout, "differs", worst, diagnose(reports, self._evidence(layout, names)))

    def _compare(self, layout: TrainConfig) -> list[RankReport]:
        runs, steps, dataset = _runs(layout), self.steps, self.dataset
        references, tolerance = self.references, self.tolerance
        return run_ranks(
            lambda: compare_training(runs, steps, dataset, references, tolerance),
            mesh_shape(layout).world_size,
            timeout=self._timeout,
        )

    def _evidence(self, layout: TrainConfig, names: Sequence[str]) -> Evidence:
        """Trace the modules; empty if the layout fails when they are traced."""
        shape = mesh_shape(layout)
        degrees = {axis.value: shape.size(axis) for axis in DENSE_AXES}
        try:
            deviations = self._localize(layout, self._reference_modules(layout))
        except RankFailure:
            return Evidence(names, degrees)
        faulty = {name for rank in deviations for d in rank.deviations for name in (d.faulty.module, d.faulty.first)}
        return Evidence(names, degrees, deviations, self._impure(faulty))

    def _impure(self, faulty: Collection[str]) -> dict[str, str]:
        """The modules whose output depends on more than their input, even on one rank."""
        config, dataset, tolerance = self.reference_config, self.dataset, self.tolerance
        try:
            runs = [
                run_ranks(lambda: check_purity(config, dataset, faulty, tolerance), 1, timeout=self._timeout)[0]
                for _ in range(2)
            ]
        except RankFailure:
            return {}
        return impure_modules(runs, tolerance)

    def _localize(self, layout: TrainConfig, modules: Mapping[int, ModuleTrace]) -> Sequence[RankDeviations]:
        dataset, tolerance = self.dataset, self.tolerance
        return run_ranks(
            lambda: localize_faults(layout, dataset, modules, tolerance),
            mesh_shape(layout).world_size,
            timeout=self._timeout,
        )

    def _reference_modules(self, layout: TrainConfig) -> Mapping[int, ModuleTrace]:
        config, dataset, dp = self.reference_config, self.dataset, mesh_shape(layout).dp
        samples = [sample for rank in range(dp) for sample in first_samples(layout, rank, dp)]
        if not set(samples) <= set(self._modules):
            self._modules = run_ranks(lambda: reference_modules(config, dataset, samples), 1, timeout=self._timeout)[0]
        return self._modules

    def _failed(self, layout: TrainConfig, failure: RankFailure) -> Verdict:
        if isinstance(failure.error, REJECTIONS):
            return Verdict(layout, "refused", reason=str(failure.error))
        finding = Finding("failure", "")
        try:
            self._localize(layout, self._reference_modules(layout))
        except RankFailure as again:
            if isinstance(again.error, ModuleFailed):
                module, owner, cause = again.error.args
                finding = Finding("failure", module, cause=cause or None, owner=owner or None)
        return Verdict(layout, "failed", finding=finding, reason=failure_summary(failure))

    @property
    def _timeout(self) -> float:
        return self.config.launch.timeout_s


def failure_summary(failure: RankFailure) -> str:
    """A failure in a few lines: the rank, its error, and the location in the user's code and then in the package."""
    lines = [line.strip() for line in str(failure).splitlines()]
    if failure.error is None:  # it died or did not return; each hung rank has a line with its location
        return "\n".join([lines[0], *(line for line in lines[1:] if line.startswith("rank "))])
    error = traceback.format_exception_only(failure.error)[-1].strip()
    locations = [line for line in lines if line.startswith("File ") and "/site-packages/" not in line]
    users = [line for line in locations if f'"{PACKAGE}' not in line]
    shown = [line for line in locations if line in users[-1:] or line in locations[-2 + bool(users) :]]
    return f"rank {failure.rank}: {error}" + "".join(f"\n{line}" for line in shown)


def _runs(config: TrainConfig) -> dict[str, TrainConfig]:
    """The training runs to compare, by optimizer: the configuration's own, and plain SGD unless it is the same."""
    own = config.optim.name.value
    return {own: config} if own == "sgd" else {own: config, "sgd": with_sgd(config)}


def _check_rank_count(ranks: int) -> None:
    if ranks > MOST_RANKS:
        rule = f"must be at most {MOST_RANKS}, since every rank is forked on this machine"
        raise ConfigError.of([Violation("ranks", ranks, rule, ("smaller degrees of the same axes",))])
