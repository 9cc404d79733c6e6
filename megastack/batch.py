"""The two values that travel with a microbatch: what goes into a model and what comes out of its last stage.

They stand apart from the data and the models so that the loader, the layers, the pipeline and the training loop can
share them without knowing one another. Nothing here reads a tensor after it was built: the count of valid tokens is
made on the host, where the labels are born.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label of a position that asks for no prediction; it enters neither loss nor count."""


@dataclass(frozen=True)
class Microbatch:
    """The unit that a pipeline schedule moves: B sequences of S tokens, alike on every stage and tensor-parallel rank.

    Args:
        tokens_BS: token ids, int64.
        labels_BS: the token to predict at each position, int64; :data:`IGNORED_LABEL` where there is none.
        positions_BS: position of each token in its document, or in its sequence without document masks, int64.
        documents_BS: non-decreasing document number within each row, int64; attention stays within equal numbers.
            None: attention sees the whole row.
        samples_B: global number of each row's sample in the endless stream, int64; dropout draws from it.
        step: the 0-based optimizer step that consumes it.
        valid_tokens: labels that are not ignored, a host number. Counted here, from labels on the CPU, when not given.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor | None
    samples_B: Tensor
    step: int = 0
    valid_tokens: int = -1

    def __post_init__(self) -> None:
        if self.valid_tokens < 0:
            object.__setattr__(self, "valid_tokens", int((self.labels_BS != IGNORED_LABEL).sum()))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Microbatch:
        """The same microbatch on `device`; the count stays a host number and is not made again."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        return replace(
            self,
            tokens_BS=move(self.tokens_BS),
            labels_BS=move(self.labels_BS),
            positions_BS=move(self.positions_BS),
            documents_BS=None if self.documents_BS is None else move(self.documents_BS),
            samples_B=move(self.samples_B),
        )


@dataclass(frozen=True)
class StageLoss:
    """What the last stage gives for one microbatch: sums over its valid tokens, not yet divided by anything.

    Args:
        objective: what backward starts from; z-loss and other regularisers included.
        report: what is logged, detached: cross-entropy with label smoothing, without z-loss.
    """

    objective: Tensor
    report: Tensor
