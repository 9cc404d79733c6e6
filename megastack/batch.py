"""The input of a model for one microbatch, and the output of its last stage.

The loader, the layers, the pipeline and the training loop share them without depending on one another. No tensor is
read after it was built: valid tokens are counted on the host, where the labels are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label of a position without a target; it is excluded from the loss and from the token count."""


@dataclass(frozen=True)
class Microbatch:
    """B sequences of S tokens, identical on every stage and tensor-parallel rank.

    Args:
        tokens_BS: token ids, int64.
        labels_BS: the token to predict at each position, int64; :data:`IGNORED_LABEL` where there is none.
        positions_BS: position of each token in its document, or in its sequence without document masks, int64.
        documents_BS: non-decreasing document number within each row, int64; attention stays within equal numbers.
            None: attention sees the whole row.
        samples_B: global number of each row's sample in the endless stream, int64; a counter for dropout.
        step: the optimizer step that consumes it, from 0.
        valid_tokens: the number of labels that are not ignored, on the host. Default: counted from labels on the CPU.
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
        """The same microbatch on `device`; the count stays on the host and is not computed again."""

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
    """The output of the last stage for one microbatch: sums over its valid tokens, not divided yet.

    Args:
        objective: the scalar that backward starts from, z-loss and other regularisers included.
        report: the loss to log, detached: cross-entropy with label smoothing, without z-loss.
    """

    objective: Tensor
    report: Tensor
