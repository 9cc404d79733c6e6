"""The choice of the next token: a pure function of the whole logits, a seed, and the token's position.

The random number of a choice is a function of (seed, sample, position), not the state of a generator. A prompt is
therefore continued identically on every layout, alone or in a batch. Probabilities are computed in fp64 and accumulated
in the order of ids, not of probability: if rounding swaps two nearly equal probabilities, an interval boundary moves
only as far as the logits did. Among equal logits the lowest id wins.

Shapes: B rows, V the real vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megastack.errors import ConfigError
from megastack.random import counter_bits, stream_key

NOT_FINITE = -1
"""Returned instead of an id for logits with a NaN or +inf, or without a finite value."""
_BITS = 53


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: the divisor of the logits; 0 selects the most probable token (greedy).
        top_k: choose among this many most probable tokens; None for all.
        top_p: choose among the fewest most probable tokens that together have this probability; None for all.
        seed: determines the random numbers.

    Raises:
        ConfigError: a value out of range, or `top_k` or `top_p` with greedy decoding, which would ignore them.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        errors = []
        if not 0 <= self.temperature < float("inf"):
            errors.append(
                f"temperature={self.temperature}: must be a number of at least 0; use 0 for the most probable"
            )
        if self.top_k is not None and self.top_k < 1:
            errors.append(f"top_k={self.top_k}: must be at least 1; use 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            errors.append(f"top_p={self.top_p}: must be above 0 and at most 1; use for example 0.9, or leave it out")
        limits = [f"{name}={x}" for name, x in (("top_k", self.top_k), ("top_p", self.top_p)) if x is not None]
        if not errors and limits and self.temperature == 0:
            rule = "temperature=0 takes the most probable token alone; use temperature=1"
            errors.append(f"{', '.join(limits)}: {rule}")
        if errors:
            raise ConfigError("\n".join(errors))

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        limits = [f"{name}={x:g}" for name, x in (("top_k", self.top_k), ("top_p", self.top_p)) if x is not None]
        return ", ".join([f"temperature={self.temperature:g}", *limits, f"seed={self.seed}"])


def choose(logits_BV: Tensor, sampling: Sampling, samples: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The chosen id of each row, (B,) int64, below V; :data:`NOT_FINITE` if the logits allow no choice.

    A logit of minus infinity is a token of probability 0, as long as another logit is finite.

    Args:
        logits_BV: the logits of the whole vocabulary, without padding.
        sampling: how to choose.
        samples: the sample number of each row; rows with equal sample number and position draw the same number.
        positions: the position of each row's chosen token.
    """
    logits_BV = logits_BV.double()
    largest_B = logits_BV.max(-1).values  # NaN if any logit is, and minus infinity if all are
    ids_B = _greedy(logits_BV) if sampling.temperature == 0 else _drawn(logits_BV, sampling, samples, positions)
    return torch.where(torch.isfinite(largest_B), ids_B, NOT_FINITE)


def _greedy(logits_BV: Tensor) -> Tensor:
    """The lowest id with the largest logit, however a backend's argmax breaks ties."""
    return _lowest(logits_BV == logits_BV.max(-1, keepdim=True).values)


def _drawn(logits_BV: Tensor, sampling: Sampling, samples: Sequence[int], positions: Sequence[int]) -> Tensor:
    probabilities_BV = _scaled(logits_BV, sampling.temperature).softmax(-1)
    allowed_BV = _allowed(logits_BV, probabilities_BV, sampling)
    total_BV = torch.where(allowed_BV, probabilities_BV, 0.0).cumsum(-1)
    uniform_B1 = _uniform(sampling.seed, samples, positions).to(logits_BV.device)[:, None]
    reached_BV = (total_BV > uniform_B1 * total_BV[:, -1:]) & allowed_BV
    # If a device sums in another order, no allowed id may reach the number; then the most probable one is chosen.
    return torch.where(reached_BV.any(-1), _lowest(reached_BV), _greedy(logits_BV))


def _scaled(logits_BV: Tensor, temperature: float) -> Tensor:
    """The logits divided by the temperature, shifted to a maximum of 0 so that a tiny temperature cannot overflow.

    A denormal temperature, which a processor may flush to 0, is replaced by the smallest normal number.
    """
    below_BV = logits_BV - logits_BV.max(-1, keepdim=True).values
    return below_BV / max(temperature, torch.finfo(torch.float64).tiny)


def _allowed(logits_BV: Tensor, probabilities_BV: Tensor, sampling: Sampling) -> Tensor:
    """The ids that may be chosen; both limits apply to all probabilities, and the most probable id is always allowed.

    Ids are ranked by logits, since a temperature may make probabilities equal.
    """
    allowed_BV = torch.ones_like(logits_BV, dtype=torch.bool)
    top_k, top_p = sampling.top_k, sampling.top_p
    if top_k is None and top_p is None:
        return allowed_BV
    order_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True).indices
    rank_BV = torch.empty_like(order_BV).scatter_(-1, order_BV, _ids(logits_BV).expand_as(order_BV))
    if top_k is not None:
        allowed_BV &= rank_BV < min(top_k, logits_BV.shape[-1])
    if top_p is not None and top_p < 1:  # rounding may reach 1 before the last id
        sorted_BV = probabilities_BV.gather(-1, order_BV)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        allowed_BV &= ((before_BV < top_p) | (_ids(logits_BV) == 0)).gather(-1, rank_BV)
    return allowed_BV


def _uniform(seed: int, samples: Sequence[int], positions: Sequence[int]) -> Tensor:
    """A number in [0, 1) for each row, in fp64, on the host."""
    pairs = zip(samples, positions, strict=True)
    bits = [int(counter_bits(stream_key("choice", seed, n), torch.tensor([at]))) for n, at in pairs]
    return torch.tensor([(b >> (64 - _BITS)) & ((1 << _BITS) - 1) for b in bits], dtype=torch.float64) * 2.0**-_BITS


def _ids(logits_BV: Tensor) -> Tensor:
    return torch.arange(logits_BV.shape[-1], device=logits_BV.device)


def _lowest(chosen_BV: Tensor) -> Tensor:
    """The lowest id that is True in each row; the size of the vocabulary if none is."""
    return torch.where(chosen_BV, _ids(chosen_BV), chosen_BV.shape[-1]).min(-1).values
