"""The tensors that a microbatch holds on a rank from its forward to its backward, from the configuration alone.

The specs of the layers (:mod:`megastack.models.specs`) list them; this module sums them over a stage. With recompute a
block saves fewer of them, and backward restores the others one block at a time. If a schedule splits backwards, a
microbatch holds other tensors from I to W (:func:`deferred_in_block`). ``docs/activations.md`` states the same as
formulas, and a test compares the list with the tensors that autograd saves. Torch-free.

Not included: gradients in flight, temporary buffers of single operations, and the allocator's overhead. All parameters
are assumed to be trained.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megastack.config.schema import TrainConfig
from megastack.layers.spec import LocalMicrobatch, SavedTensor
from megastack.models.profile import BYTES
from megastack.models.specs import DecoderSpec, decoder_spec, dropout_saved, norm_saved

_INPUT = "input"
"""The input of a block, which recompute never drops."""


def local_microbatch(config: TrainConfig) -> LocalMicrobatch:
    """A microbatch of the run on one rank. ``device=auto`` counts as a CPU, whose layers save more."""
    batch, grid = config.batch, config.parallel
    rows = batch.sequence_length // (grid.tp if grid.sequence_parallel else 1)
    width, cpu = BYTES[config.precision.compute], config.device != "cuda"
    return LocalMicrobatch(batch.micro_size, batch.sequence_length, rows, grid.tp, width, cpu)


def saved_in_block(config: TrainConfig, layer: int | None = None) -> list[SavedTensor]:
    """The tensors that one block saves for a microbatch, in order of use.

    Args:
        config: the run.
        layer: the block's number, for its recompute; None means a block without recompute.
    """
    items = _spec(config).block.saved(local_microbatch(config))
    return items if layer is None else [item for item in items if not _is_recomputed(config, layer, item)]


def _spec(config: TrainConfig) -> DecoderSpec:
    return decoder_spec(config, config.parallel.tp)


def _is_recomputed(config: TrainConfig, layer: int, item: SavedTensor) -> bool:
    mode, pattern = config.recompute.mode, config.recompute.pattern
    if mode == "none" or item.name == _INPUT:
        return False
    if mode == "selective":
        return item.in_attend
    chosen = r"blocks\.\d+" if mode == "full" else pattern or ""
    names = (f"blocks.{layer}", f"blocks.{layer}.{item.module}") if item.module else (f"blocks.{layer}",)
    return any(re.fullmatch(chosen, name) for name in names)


def shared_by_blocks(config: TrainConfig) -> list[SavedTensor]:
    """The tensors that the blocks of a stage share for a microbatch."""
    documents, recompute = config.data.pack and config.data.document_mask, config.recompute.mode != "none"
    return _spec(config).block.attention.shared(local_microbatch(config), documents=documents, recompute=recompute)


def saved_at_ends(config: TrainConfig, *, embedding: bool, head: bool) -> list[SavedTensor]:
    """The tensors that the embedding and the head save for a microbatch."""
    spec, microbatch, items = _spec(config), local_microbatch(config), []
    if embedding:
        items += spec.embedding.saved(microbatch)
        items += dropout_saved(spec.block.dropout, "embedding", spec.embedding.hidden, microbatch)
    if head:
        normed = norm_saved(spec.norm, "norm", "output", microbatch)
        items += [*(normed[:-1] if spec.head.is_chunked(microbatch) else normed), *spec.head.saved(microbatch)]
    return items


def deferred_in_block(config: TrainConfig) -> list[SavedTensor]:
    """The tensors that one block holds for a microbatch from I to W: linear-layer inputs and output gradients."""
    return _spec(config).block.deferred(local_microbatch(config))


def deferred_at_ends(config: TrainConfig, *, embedding: bool, head: bool) -> list[SavedTensor]:
    """The same for the embedding and the head."""
    spec, microbatch, items = _spec(config), local_microbatch(config), []
    if embedding:
        items += spec.embedding.deferred(microbatch)
    if head and not spec.head.is_chunked(microbatch):
        items += [norm_saved(spec.norm, "norm", "output", microbatch)[-1], *spec.head.deferred(microbatch)]
    return items


@dataclass(frozen=True)
class ActivationBytes:
    """Activations of one stage on a rank.

    Attributes:
        saved: bytes of each microbatch in flight.
        recomputed: bytes that backward recomputes for one block, one microbatch at a time.
        until_w: bytes of each microbatch between its I and its W.
    """

    saved: int
    recomputed: int
    until_w: int


def activation_bytes(config: TrainConfig, layers: range, *, embedding: bool, head: bool) -> ActivationBytes:
    """The bytes that a stage saves for a microbatch, and the bytes of its largest recomputed block during backward."""
    items = saved_in_block(config)
    whole = _total(items)
    saved = [_total([item for item in items if not _is_recomputed(config, layer, item)]) for layer in layers]
    ends = _total(saved_at_ends(config, embedding=embedding, head=head))
    shared = _total(shared_by_blocks(config)) if layers else 0
    until_w = len(layers) * _total(deferred_in_block(config))
    until_w += _total(deferred_at_ends(config, embedding=embedding, head=head))
    recomputed = max((whole - part for part in saved), default=0)
    return ActivationBytes(sum(saved) + ends + shared, recomputed, until_w)


def _total(items: list[SavedTensor]) -> int:
    return sum(item.bytes for item in items)
