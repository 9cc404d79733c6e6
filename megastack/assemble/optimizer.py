"""What a configuration says of the optimizer, as plain arguments."""

from __future__ import annotations

from megastack.config.schema import TrainConfig
from megastack.optim.optimizer import OptimizerOptions, rule_of


def optimizer_options(config: TrainConfig) -> OptimizerOptions:
    """The optimizer, and the settings that all its groups share."""
    optim = config.optim
    betas, offload = (optim.betas[0], optim.betas[1]), config.parallel.zero.offload
    return OptimizerOptions(optim.name, betas, optim.eps, optim.momentum, offload=offload)


def moment_kinds(config: TrainConfig) -> tuple[str, ...]:
    """The kinds of moment that a checkpoint of this run has for each parameter that is trained."""
    return rule_of(optimizer_options(config)).kinds
