"""The data-parallel degree of a job whose number of ranks changes from start to start.

tp, pp and cp stay as configured, and so does the global batch; the data-parallel degree follows the ranks, and with it
how many microbatches each rank accumulates. Which degrees are legal is asked of the rules, and stated nowhere else.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from megastack.config.convert import replace_values
from megastack.config.layout_rules import batch_fits
from megastack.config.rules import Violation, out_of_range, violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, counted, spell

MOST_TOLD = 3
"""How many of the refused degrees a report tells the reason of."""


def fit_world(config: TrainConfig, ranks: int) -> TrainConfig:
    """The configuration with the largest legal ``parallel.dp`` that these ranks hold; some ranks may be left over.

    Args:
        config: its ``parallel.dp`` is the most that is wanted; null takes as many as there are.
        ranks: how many were started.

    Raises:
        ConfigError: no degree is legal, with the reasons.
    """
    if list(out_of_range(config)):
        raise ConfigError.of(violations(config))
    grid = config.parallel
    replica = grid.pp * grid.cp * grid.tp
    degrees = range(min(ranks // replica, ranks if grid.dp is None else grid.dp), 0, -1)
    if not degrees:
        rule = f"the {counted(ranks, 'rank')} of this start cannot hold pp·cp·tp = {replica}"
        raise ConfigError.of([Violation("launch.elastic", True, rule, (f"{replica} ranks or more", "other degrees"))])
    for dp in degrees:
        fitted = replace_values(config, {"parallel.dp": dp})
        if not list(batch_fits(fitted, None)) and not violations(fitted, dp * replica):
            return fitted
    raise ConfigError.of(_reasons(config, degrees, replica, ranks))


def _reasons(config: TrainConfig, degrees: Sequence[int], replica: int, ranks: int) -> list[Violation]:
    """What stands against every degree, and where that is not all of it, some of what stands against each."""
    told = [*degrees[: MOST_TOLD - 1], degrees[-1]]
    found = {dp: violations(replace_values(config, {"parallel.dp": dp}), dp * replica) for dp in told}
    shared = [error for error in found[told[-1]] if all(error in errors for errors in found.values())]
    own = {dp: [error for error in errors if error not in shared] for dp, errors in found.items()}
    if not all(own.values()):
        return shared
    first = {dp: errors[0] for dp, errors in own.items()}
    reasons = "; ".join(f"dp={dp}: {error.key}={spell(error.value)} {error.rule}" for dp, error in first.items())
    rule = f"no dp from {degrees[-1]} to {degrees[0]} is legal on {counted(ranks, 'rank')} ({reasons})"
    return [*shared, Violation("launch.elastic", True, rule, ("another number of ranks", "other values of these keys"))]
