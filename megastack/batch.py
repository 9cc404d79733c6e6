"""The input of a model for one microbatch, and the output of its last stage.

The data loader, the layers, the pipeline and the training loop share these types without depending on one another.
Valid tokens are counted and documents are located on the host, where the loader creates them, so no tensor is read back
from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megastack.attention_mask import AttentionMask

IGNORED_LABEL = -100
"""The label of a position without a target; it is excluded from the loss and from the token count."""


@dataclass(frozen=True)
class Microbatch:
    """B sequences of S tokens, identical on every stage and tensor-parallel rank.

    Args:
        tokens_BS: token ids, int64.
        labels_BS: the token to predict at each position, int64; :data:`IGNORED_LABEL` where there is none.
        positions_BS: position of each token in its document, or in its sequence without document masks, int64.
        documents_BS: document number of each position, non-decreasing within a row, int64; attention is restricted to
            positions with the same number. With None, attention covers the whole row.
        samples_B: global index of each row's sample in the data stream, int64; a counter for dropout masks.
        step: the optimizer step that consumes the microbatch, starting at 0.
        valid_tokens: the number of labels that are not ignored. Default: counted from labels on the CPU.

    Attributes:
        attention_mask: the documents as a value on the host, computed while they are on the CPU.
        cu_seqlens: its offsets for attention kernels, int32, on the device of the tokens.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor | None
    samples_B: Tensor
    step: int = 0
    valid_tokens: int = -1
    attention_mask: AttentionMask | None = field(default=None, init=False)
    cu_seqlens: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.valid_tokens < 0:
            object.__setattr__(self, "valid_tokens", int((self.labels_BS != IGNORED_LABEL).sum()))
        if self.documents_BS is not None and self.documents_BS.is_cpu:
            mask = AttentionMask.of(self.documents_BS.numpy())
            self._set_mask(mask, torch.from_numpy(mask.cu_seqlens))

    def _set_mask(self, mask: AttentionMask | None, cu_seqlens: Tensor | None) -> None:
        object.__setattr__(self, "attention_mask", mask)
        object.__setattr__(self, "cu_seqlens", cu_seqlens)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Microbatch:
        """Return the microbatch on `device`; values on the host are not recomputed."""
        return self._with({name: x.to(device, non_blocking=non_blocking) for name, x in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors by field, in a fixed order."""
        named = {
            "tokens_BS": self.tokens_BS,
            "labels_BS": self.labels_BS,
            "positions_BS": self.positions_BS,
            "samples_B": self.samples_B,
        }
        documents = {"documents_BS": self.documents_BS, "cu_seqlens": self.cu_seqlens}
        return named | {name: x for name, x in documents.items() if x is not None}

    def _with(self, tensors: Mapping[str, Tensor]) -> Microbatch:
        """Return the microbatch with all its tensors replaced."""
        fields = dict(tensors)
        cu_seqlens = fields.pop("cu_seqlens", None)
        moved = replace(self, **fields)  # type: ignore[arg-type]
        moved._set_mask(self.attention_mask, cu_seqlens)
        return moved


@dataclass(frozen=True)
class StageLoss:
    """The output of the last stage for one microbatch: sums over its valid tokens, not yet divided by their number.

    Args:
        objective: the scalar to differentiate, including z-loss and other regularisers.
        report: the detached loss to log: cross-entropy with label smoothing, without z-loss.
    """

    objective: Tensor
    report: Tensor


def copy_microbatches(
    microbatches: Sequence[Microbatch], copy: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> list[Microbatch]:
    """Return microbatches whose tensors are all copied by one call of `copy`, which returns them in the same order."""
    named = [microbatch._tensors() for microbatch in microbatches]
    copies = iter(copy([x for tensors in named for x in tensors.values()]))
    return [
        microbatch._with({name: next(copies) for name in tensors})
        for microbatch, tensors in zip(microbatches, named, strict=True)
    ]
