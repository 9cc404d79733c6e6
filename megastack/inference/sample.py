"""The choice of the next token: a pure function of whole logits, a seed, and where the token goes.

The random number of a choice is a function of (seed, sample, position), never of a generator that advances. So a
prompt goes on in the same way on every layout, alone or among others, and no rank's generator matters. Probabilities
are computed in fp64. The number walks the cumulated probabilities in the order of ids, not of probability: where two
ids are nearly alike, rounding that swaps their order then moves a border by as little as it moved the logits. Of equal
logits the lower id is the larger.

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
"""Stands for the choice from logits that are no numbers."""
_BITS = 53


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: what logits are divided by; 0 takes the most probable token.
        top_k: choose among this many most probable tokens; None is all of them.
        top_p: choose among the fewest most probable tokens that together have this probability; None is all of them.
        seed: another one gives another text.

    Raises:
        ConfigError: a value out of its range, or a limit that a choice without chance would ignore.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        faults = []
        if not 0 <= self.temperature < float("inf"):
            faults.append(
                f"temperature={self.temperature}: must be a number of at least 0; use 0 for the most probable"
            )
        if self.top_k is not None and self.top_k < 1:
            faults.append(f"top_k={self.top_k}: must be at least 1; use 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            faults.append(f"top_p={self.top_p}: must be above 0 and at most 1; use for example 0.9, or leave it out")
        for name, value in (("top_k", self.top_k), ("top_p", self.top_p)):
            if value is not None and self.temperature == 0:
                faults.append(f"{name}={value}: temperature=0 takes the most probable token alone; use temperature=1")
        if faults:
            raise ConfigError("\n".join(faults))

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        limits = [f"{name}={x:g}" for name, x in (("top_k", self.top_k), ("top_p", self.top_p)) if x is not None]
        return ", ".join([f"temperature={self.temperature:g}", *limits, f"seed={self.seed}"])


def choose(logits_BV: Tensor, sampling: Sampling, samples: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The chosen id of each row, (B,) int64; :data:`NOT_FINITE` where the logits hold something that is no number.

    Args:
        logits_BV: the logits of the whole vocabulary, without padding.
        sampling: how to choose.
        samples: the number of each row's text; rows of one number and position draw the same number.
        positions: where each row's chosen token goes.
    """
    logits_BV = logits_BV.double()
    ids_B = _greedy(logits_BV) if sampling.temperature == 0 else _drawn(logits_BV, sampling, samples, positions)
    finite_B = logits_BV.isnan().logical_or(logits_BV == torch.inf).any(-1).logical_not()
    return torch.where(finite_B, ids_B, NOT_FINITE)


def _greedy(logits_BV: Tensor) -> Tensor:
    """The lowest id with the largest logit, whatever a backend's argmax makes of equal ones."""
    largest_BV = logits_BV == logits_BV.max(-1, keepdim=True).values
    return torch.where(largest_BV, _ids(logits_BV), logits_BV.shape[-1]).min(-1).values


def _drawn(logits_BV: Tensor, sampling: Sampling, samples: Sequence[int], positions: Sequence[int]) -> Tensor:
    allowed_BV = _allowed(logits_BV / sampling.temperature, sampling)
    total_BV = torch.where(allowed_BV, (logits_BV / sampling.temperature).softmax(-1), 0.0).cumsum(-1)
    uniform_B1 = _uniform(sampling.seed, samples, positions).to(logits_BV.device)[:, None]
    reached_BV = (total_BV > uniform_B1 * total_BV[:, -1:]) & allowed_BV
    return torch.where(reached_BV, _ids(logits_BV), logits_BV.shape[-1]).min(-1).values


def _allowed(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The ids that may be chosen; both limits look at all probabilities, and the most probable id is always within."""
    allowed_BV = torch.ones_like(logits_BV, dtype=torch.bool)
    if sampling.top_k is None and sampling.top_p is None:
        return allowed_BV
    order_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True).indices
    rank_BV = torch.empty_like(order_BV).scatter_(-1, order_BV, _ids(logits_BV).expand_as(order_BV))
    if sampling.top_k is not None:
        allowed_BV &= rank_BV < sampling.top_k
    if sampling.top_p is not None:
        sorted_BV = logits_BV.softmax(-1).gather(-1, order_BV)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        allowed_BV &= (before_BV < sampling.top_p).gather(-1, rank_BV)
    return allowed_BV


def _uniform(seed: int, samples: Sequence[int], positions: Sequence[int]) -> Tensor:
    """A number in [0, 1) for each row, in fp64, on the host."""
    pairs = zip(samples, positions, strict=True)
    bits = [int(counter_bits(stream_key("choice", seed, n), torch.tensor([at]))) for n, at in pairs]
    return torch.tensor([(b >> (64 - _BITS)) & ((1 << _BITS) - 1) for b in bits], dtype=torch.float64) * 2.0**-_BITS


def _ids(logits_BV: Tensor) -> Tensor:
    return torch.arange(logits_BV.shape[-1], device=logits_BV.device)
