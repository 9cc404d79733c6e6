"""The settings that each parameter is trained with: weight decay, groups by pattern, frozen parameters.

A pattern is a regular expression that is searched in the global parameter name (``blocks.17.attention_norm.weight``),
so ``norm`` matches every norm, ``^blocks\\.3\\.`` one block, ``mlp\\.(up|down)`` two weights of each block. This module
works on names, identically on every rank. A pattern that matches nothing is an error; pass the names of the whole
model, since a single pipeline stage may hold no match.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megastack.errors import ConfigError, Violation

_NEAR_NAMES = 5


@dataclass(frozen=True, order=True)
class ParameterGroup:
    """The settings that the parameters of one bucket share.

    Attributes:
        lr_scale: multiplies the learning rate of the step.
        weight_decay: the decay of these parameters; 0 for none.
    """

    lr_scale: float = 1.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class GroupRule:
    """Settings for the parameters whose name ``pattern`` matches; ``weight_decay=None`` keeps the default."""

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


def assign_groups(
    decays: Mapping[str, bool],
    *,
    weight_decay: float,
    no_decay: Sequence[str] = (),
    rules: Sequence[GroupRule] = (),
    names: Collection[str] | None = None,
) -> dict[str, ParameterGroup]:
    """The group of every parameter in ``decays``.

    A parameter decays if its placement allows it and its name matches no ``no_decay`` pattern; a rule changes how much
    it decays, never whether. The first rule that matches wins. A ``no_decay`` pattern may match nothing (a model
    without biases), but a rule must match a name.

    Args:
        decays: ``Placement.decay`` of this rank's parameters by global name.
        weight_decay: the decay of parameters that no rule matches.
        no_decay: patterns of parameters that never decay.
        rules: settings by pattern.
        names: all names of the model, against which the rules are checked; the names in ``decays`` by default.

    Raises:
        ConfigError: a rule matches no name (similar names are listed), or a pattern is not a regular expression.
    """
    check_patterns("optim.groups", [rule.pattern for rule in rules], decays if names is None else names)
    exempt = [_compile("optim.no_decay", pattern) for pattern in no_decay]
    groups = {}
    for name, decay in decays.items():
        rule = next((rule for rule in rules if re.search(rule.pattern, name)), GroupRule(""))
        strength = weight_decay if rule.weight_decay is None else rule.weight_decay
        decaying = decay and not any(pattern.search(name) for pattern in exempt)
        groups[name] = ParameterGroup(rule.lr_scale, strength if decaying else 0.0)
    return groups


def freeze(
    modules: Iterable[nn.Module], patterns: Sequence[str], *, names: Collection[str] | None = None
) -> tuple[str, ...]:
    """Freeze the parameters that a pattern matches (``requires_grad=False``). Returns their global names.

    Call it before the buckets are built: a frozen parameter is in no bucket, norm or optimizer.

    Args:
        modules: this rank's stages.
        patterns: regular expressions searched in global names.
        names: all names of the model, against which the patterns are checked; the names in ``modules`` by default.

    Raises:
        ConfigError: a pattern matches no name, or is not a regular expression.
    """
    parameters = [pair for module in modules for pair in module.named_parameters()]
    check_patterns("optim.freeze", patterns, {name for name, _ in parameters} if names is None else names)
    frozen = {name: parameter for name, parameter in parameters if any(re.search(p, name) for p in patterns)}
    for name, parameter in parameters:
        if name in frozen:
            parameter.requires_grad_(False)
    return tuple(frozen)


def check_patterns(key: str, patterns: Sequence[str], names: Collection[str]) -> None:
    """Check that each pattern of the configuration key ``key`` matches one of ``names``.

    Raises:
        ConfigError: one line for each pattern that does not, with similar names.
    """
    errors = [
        Violation(key, pattern, "matches no parameter", tuple(_similar_names(pattern, names)))
        for pattern in patterns
        if not any(map(_compile(key, pattern).search, names))
    ]
    if errors:
        raise ConfigError.of(errors)


def _compile(key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key}={pattern}: must be a regular expression ({error}); use e.g. ^blocks\\.3\\.") from None


def _similar_names(pattern: str, names: Collection[str]) -> list[str]:
    """The names most similar to the pattern, as a whole or by one of their components."""
    plain = re.sub(r"[\\^$*+?()\[\]|]", "", pattern).strip(".")

    def similarity(name: str) -> float:
        return max(difflib.SequenceMatcher(None, plain, part).ratio() for part in (name, *name.split(".")))

    return sorted(names, key=lambda name: (-similarity(name), name))[:_NEAR_NAMES]
