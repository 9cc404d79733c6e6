"""A chain of tiny fp64 stages for trying the runtime, and the same chain under plain autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megastack.batch import IGNORED_LABEL, Microbatch, StageLoss

WIDTH, TOKENS = 3, 7


class Link(nn.Module):
    """One stage: a table of tokens if it is the first, a square matrix, a squared error if it is the last."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(index)
        first, last = index == 0, index == stages - 1
        self.table = nn.Parameter(torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=draw)) if first else None
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=draw))
        self.last = last

    def forward(self, carry: Mapping[str, Any], microbatch: Microbatch) -> dict[str, Any] | StageLoss:
        hidden = carry["hidden"] if self.table is None else self.table[microbatch.tokens_BS]
        hidden = torch.tanh(hidden @ self.matrix)
        return squared_error(hidden, microbatch) if self.last else {"hidden": hidden}


def squared_error(hidden: Tensor, microbatch: Microbatch) -> StageLoss:
    """Summed over the tokens that count, which follow from the labels."""
    counts = microbatch.labels_BS != IGNORED_LABEL
    error = ((hidden - microbatch.labels_BS.unsqueeze(-1) / TOKENS).square().sum(-1) * counts).sum()
    return StageLoss(error, error.detach())


def batch(rows: int, length: int = 4, *, seed: int = 0, first: int = 0) -> Microbatch:
    """Rows of random tokens with about a quarter of the labels ignored; the same for the same seed."""
    draw = torch.Generator().manual_seed(1000 + seed)
    tokens, labels = torch.randint(0, TOKENS, (2, rows, length), generator=draw)
    labels[torch.rand(rows, length, generator=draw) < 0.25] = IGNORED_LABEL
    positions = torch.arange(length).repeat(rows, 1)
    return Microbatch(tokens, labels, positions, None, samples_B=torch.arange(first, first + rows))


def rows_of(microbatches: Sequence[Microbatch]) -> int:
    """The tokens that count."""
    return sum(microbatch.valid_tokens for microbatch in microbatches)


def plain(stages: int, microbatches: Sequence[Microbatch]) -> tuple[float, list[list[Tensor]]]:
    """The loss of one step and the gradients of each stage, with nothing but autograd."""
    links = [Link(index, stages) for index in range(stages)]
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in microbatches:
        carry: Any = {}
        for link in links:
            carry = link(carry, microbatch)
        total = total + carry.objective
    loss = total / rows_of(microbatches)
    loss.backward()
    return float(loss.detach()), [gradients(link) for link in links]


def gradients(module: nn.Module) -> list[Tensor]:
    """Of a module's parameters, in order."""
    found = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def distance(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of an element, relative to the largest element."""
    assert len(actual) == len(expected)
    scale = max(float(x.abs().max()) for x in expected)
    return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)) / scale
