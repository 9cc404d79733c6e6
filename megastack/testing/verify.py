"""``verify``: does a configuration, with the layers that it names, compute on a layout what it computes on one rank?

A configuration is trained for a few steps on one rank and on the layout, in fp64, with its own optimizer and with plain
SGD (Adam hides a constant factor on a gradient). Losses, every gradient, the norm and the weights must agree by the
metric of :mod:`megastack.testing.compare`. Only when they do not, both run a step again with every module watched, to
name the first that is wrong.

Ranks are forked from this process, with gloo; it must hold no process group and have run on one thread.
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
from megastack.testing.blame import RankDeviations
from megastack.testing.compare import TOLERANCES, Trace
from megastack.testing.diagnose import Evidence, Finding, diagnose
from megastack.testing.module_trace import ModuleTrace
from megastack.testing.on_ranks import (
    ModuleFailed,
    RankReport,
    blame_modules,
    compare_training,
    first_samples,
    probe_modules,
    reference_modules,
    reference_traces,
)
from megastack.testing.probes import reasons
from megastack.testing.ranks import RankFailure, run_ranks
from megastack.testing.variants import in_double, legal_layouts, reference_of, with_sgd

PACKAGE = str(Path(__file__).resolve().parents[1])
MOST_RANKS = 64
"""Ranks that this machine is asked to fork at most."""
REFUSALS = (ConfigError, PlacementError, ScheduleError, DataError)


@dataclass(frozen=True)
class Verdict:
    """How a layout compares.

    Attributes:
        config: the layout, in fp64.
        status: ``equal``, ``differs``, ``failed`` (it does not run) or ``refused`` (a layer refuses it).
        worst: the largest relative difference by optimizer and kind, allowed or not.
        finding: the first thing that is wrong.
        reason: why it failed or was refused.
    """

    config: TrainConfig
    status: str
    worst: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    finding: Finding | None = None
    reason: str | None = None


class Verifier:
    """Compares layouts of one configuration with one rank.

    Args:
        config: the configuration; its precision and device are replaced by fp64 and the CPU.
        steps: optimizer steps to compare.
        dataset: the data of the configuration, where they were read already.

    Raises:
        ConfigError: the configuration is not legal, on one rank already.
    """

    tolerance = TOLERANCES[torch.float64]

    def __init__(self, config: TrainConfig, *, steps: int = 3, dataset: Dataset | None = None) -> None:
        config, mistyped = coerce(config)
        if mistyped:
            raise ConfigError.of([*mistyped, *violations(config)])
        self.config = in_double(config)
        self.alone = reference_of(self.config)
        self.steps = steps
        self._given = dataset
        if found := violations(self.alone):
            raise ConfigError.of(found)
        self._modules: dict[int, ModuleTrace] = {}

    @property
    def runs(self) -> tuple[str, ...]:
        """The optimizers that are used, the configuration's own first."""
        return tuple(_runs(self.alone))

    @cached_property
    def dataset(self) -> Dataset:
        """The data of the configuration, read once; ranks inherit them."""
        return self._given or read_dataset(self.alone)

    @cached_property
    def references(self) -> dict[str, Trace]:
        """The training on one rank, by optimizer.

        Raises:
            MegastackError: its layers or data are refused, it does not run, or it is not finite.
        """
        runs, steps, dataset = _runs(self.alone), self.steps, self.dataset
        try:
            traces: dict[str, Trace] = run_ranks(
                lambda: reference_traces(runs, steps, dataset), 1, timeout=self._timeout
            )[0]
        except RankFailure as failure:
            if isinstance(failure.error, REFUSALS):
                raise failure.error from None
            raise
        if any(not isfinite(x) for trace in traces.values() for x in (*trace.losses, *trace.norms)):
            raise MegastackError(
                "the training on one rank is not finite within these steps: there is nothing to compare"
            )
        return traces

    def layouts(self, ranks: int) -> list[TrainConfig]:
        """Every legal layout of so many ranks.

        Raises:
            ConfigError: there is none, or they are too many to fork.
        """
        _require_few(ranks)
        found = legal_layouts(self.config, ranks)
        if not found:
            raise ConfigError(
                f"--ranks={ranks}: no layout of {counted(ranks, 'rank')} is legal for this model and batch"
            )
        return found

    def own_layout(self) -> TrainConfig:
        """The configuration's layout.

        Raises:
            ConfigError: it is not legal, or has too many ranks to fork.
        """
        if found := violations(self.config):
            raise ConfigError.of(found)
        _require_few(mesh_shape(self.config).world_size)
        return self.config

    def check(self, layout: TrainConfig) -> Verdict:
        """Compare one layout.

        Raises:
            MegastackError: as :attr:`references`.
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
            reason = f"no rank holds {', '.join(sorted(missing))}"
            return Verdict(layout, "differs", worst, Finding("weight", sorted(missing)[0], cause=reason))
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
        """What modules tell; nothing where watching them is what breaks them."""
        shape = mesh_shape(layout)
        degrees = {axis.value: shape.size(axis) for axis in DENSE_AXES}
        try:
            errors = self._watch(layout, self._reference_modules(layout))
        except RankFailure:
            return Evidence(names, degrees)
        blamed = {name for rank in errors for f in rank.errors for name in (f.blame.module, f.blame.first)}
        return Evidence(names, degrees, errors, self._unstable(blamed))

    def _unstable(self, blamed: Collection[str]) -> dict[str, str]:
        """The modules that depend on more than their input, on one rank already."""
        alone, dataset, tolerance = self.alone, self.dataset, self.tolerance
        try:
            runs = [
                run_ranks(lambda: probe_modules(alone, dataset, blamed, tolerance), 1, timeout=self._timeout)[0]
                for _ in range(2)
            ]
        except RankFailure:
            return {}
        return reasons(runs, tolerance)

    def _watch(self, layout: TrainConfig, modules: Mapping[int, ModuleTrace]) -> Sequence[RankDeviations]:
        dataset, tolerance = self.dataset, self.tolerance
        return run_ranks(
            lambda: blame_modules(layout, dataset, modules, tolerance),
            mesh_shape(layout).world_size,
            timeout=self._timeout,
        )

    def _reference_modules(self, layout: TrainConfig) -> Mapping[int, ModuleTrace]:
        alone, dataset, dp = self.alone, self.dataset, mesh_shape(layout).dp
        samples = [sample for rank in range(dp) for sample in first_samples(layout, rank, dp)]
        if not set(samples) <= set(self._modules):
            self._modules = run_ranks(lambda: reference_modules(alone, dataset, samples), 1, timeout=self._timeout)[0]
        return self._modules

    def _failed(self, layout: TrainConfig, failure: RankFailure) -> Verdict:
        if isinstance(failure.error, REFUSALS):
            return Verdict(layout, "refused", reason=str(failure.error))
        finding = Finding("failure", "")
        try:
            self._watch(layout, self._reference_modules(layout))
        except RankFailure as again:
            if isinstance(again.error, ModuleFailed):
                module, owner, cause = again.error.args
                finding = Finding("failure", module, cause=cause or None, owner=owner or None)
        return Verdict(layout, "failed", finding=finding, reason=account(failure))

    @property
    def _timeout(self) -> float:
        return self.config.launch.timeout_s


def account(failure: RankFailure) -> str:
    """A failure of a rank in a few lines: who, what, and where, in the user's code and then in the package."""
    lines = [line.strip() for line in str(failure).splitlines()]
    if failure.error is None:  # it died, or did not return: then a line for each rank says where it is
        return "\n".join([lines[0], *(line for line in lines[1:] if line.startswith("rank "))])
    what = traceback.format_exception_only(failure.error)[-1].strip()
    where = [line for line in lines if line.startswith("File ") and "/site-packages/" not in line]
    theirs = [line for line in where if f'"{PACKAGE}' not in line]
    told = [line for line in where if line in theirs[-1:] or line in where[-2 + bool(theirs) :]]
    return f"rank {failure.rank}: {what}" + "".join(f"\n{line}" for line in told)


def _runs(config: TrainConfig) -> dict[str, TrainConfig]:
    """The trainings to compare, by optimizer: the configuration's own, and plain SGD unless that is it."""
    own = config.optim.name.value
    return {own: config} if own == "sgd" else {own: config, "sgd": with_sgd(config)}


def _require_few(ranks: int) -> None:
    if ranks > MOST_RANKS:
        rule = f"every rank is forked on this machine, at most {MOST_RANKS}"
        raise ConfigError.of([Violation("ranks", ranks, rule, ("smaller degrees that cut the same things",))])
