"""What a microbatch keeps on a rank from its forward to its backward, from the configuration alone; torch-free.

:func:`block_items` lists, tensor by tensor, what one block saves; ``docs/activations.md`` writes the same as formulas,
and a test holds the list against the tensors that autograd really saves. With recompute a block keeps fewer of them,
and backward brings the others back one block at a time. From I to W of a schedule that splits backwards a microbatch
keeps other tensors, those of :func:`weight_items`. Where a ``_target_`` replaces a layer, the built-in one is described
in its place, with all parameters trained and fused attention.

Not here: gradients in flight, temporary buffers of single operations, and what the allocator adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megastack.config.schema import TrainConfig
from megastack.models.profile import BYTES, head_dim, kv_groups, padded_vocab

ATTENTION_CORE = ("log-sum-exp", "weights", "kept weights", "dropped weights", "copied value")
"""The items of ``attend``, which selective recompute does not keep."""


@dataclass(frozen=True)
class Kept:
    """One tensor that is kept for backward.

    Attributes:
        name: what it is.
        owner: the module that recomputes it when it is recomputed itself, by its name in the block; "" is the block.
        shape: this rank's part.
        width: bytes of an element.
    """

    name: str
    owner: str
    shape: tuple[int, ...]
    width: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.width


@dataclass(frozen=True)
class Sizes:
    """This rank's part of every size, and the bytes of an element.

    Attributes:
        rows: S/t where the sequence is split over tp, else S.
        width: bytes of an activation.
        wide: bytes of what is never below fp32.
    """

    batch: int
    sequence: int
    rows: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    width: int
    wide: int

    @staticmethod
    def of(config: TrainConfig) -> Sizes:
        """The sizes on a rank of a configuration."""
        model, batch, tp = config.model, config.batch, config.parallel.tp
        width = BYTES[config.precision.compute]
        return Sizes(
            batch=batch.micro_size,
            sequence=batch.sequence_length,
            rows=batch.sequence_length // (tp if config.parallel.sequence_parallel else 1),
            hidden=model.hidden,
            heads=model.heads // tp,
            groups=max(kv_groups(model) // tp, 1),
            head_dim=head_dim(model),
            ffn=model.ffn // tp,
            width=width,
            wide=max(width, 4),
        )

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Hidden states between the layers."""
        return self.batch, self.rows, self.hidden


def block_items(config: TrainConfig, layer: int | None = None) -> list[Kept]:
    """What one block keeps for a microbatch, in order of use.

    Args:
        config: the run.
        layer: the block's number, for its recompute; None is a block without recompute.
    """
    items = [*_norm(config, "attention_norm", "input"), *_attention(config)]
    items += [*_norm(config, "mlp_norm", "middle"), *_mlp(config)]
    return items if layer is None else [item for item in items if not _is_recomputed(config, layer, item)]


def _norm(config: TrainConfig, name: str, reads: str) -> Iterator[Kept]:
    """The residual stream that a norm reads, its statistics, and its output, which the layer behind it reads."""
    sizes = Sizes.of(config)
    yield Kept(reads, "input" if reads == "input" else "", sizes.hidden_shape, sizes.width)
    yield from _statistics(config, name, (sizes.batch, sizes.rows))
    yield Kept(f"{name} output", "", sizes.hidden_shape, sizes.width)


def _statistics(config: TrainConfig, name: str, rows: tuple[int, ...]) -> Iterator[Kept]:
    wide = Sizes.of(config).wide
    if config.model.norm == "layer":
        yield Kept(f"{name} mean", name, rows, wide)
    yield Kept(f"{name} scale", name, rows, wide)


def _attention(config: TrainConfig) -> Iterator[Kept]:
    sizes, model = Sizes.of(config), config.model
    row = (sizes.batch, sizes.sequence)
    q, kv = (*row, sizes.heads, sizes.head_dim), (*row, sizes.groups, sizes.head_dim)
    if model.qk_norm:
        yield Kept("query before its norm", "attention", q, sizes.width)
        yield Kept("query scale", "attention", (*row, sizes.heads), sizes.wide)
        yield Kept("key before its norm", "attention", kv, sizes.width)
        yield Kept("key scale", "attention", (*row, sizes.groups), sizes.wide)
    yield Kept("query", "attention", q, sizes.width)
    yield Kept("key", "attention", kv, sizes.width)
    yield Kept("value", "attention", kv, sizes.width)
    yield from _core(config)
    yield Kept("attended", "attention", q, sizes.width)
    yield from _dropped(config, "attention")


def _core(config: TrainConfig) -> Iterator[Kept]:
    """Between queries and attended values: one number a row, or all weights where some of them are dropped."""
    sizes = Sizes.of(config)
    square = (sizes.batch, sizes.heads, sizes.sequence, sizes.sequence)
    if not config.model.attention_dropout:
        yield Kept("log-sum-exp", "attention", square[:3], sizes.wide)
        return
    if config.model.qk_norm and sizes.batch > 1:  # the value itself is kept with the key before its norm
        shape = (sizes.batch, sizes.sequence, sizes.groups, sizes.head_dim)
        yield Kept("copied value", "attention", shape, sizes.width)
    yield Kept("weights", "attention", square, sizes.width)
    yield Kept("dropped weights", "attention", square, 1)
    yield Kept("kept weights", "attention", square, sizes.width)


def _mlp(config: TrainConfig) -> Iterator[Kept]:
    sizes = Sizes.of(config)
    inner = (sizes.batch, sizes.sequence, sizes.ffn)
    gated = config.model.activation == "swiglu"
    yield Kept("gate and up" if gated else "up", "mlp", (2, *inner) if gated else inner, sizes.width)
    yield Kept("activated", "mlp", inner, sizes.width)
    yield from _dropped(config, "mlp")


def _dropped(config: TrainConfig, site: str) -> Iterator[Kept]:
    sizes = Sizes.of(config)
    if config.model.dropout:
        yield Kept(f"dropped behind {site}", "", sizes.hidden_shape, 1)


def _is_recomputed(config: TrainConfig, layer: int, item: Kept) -> bool:
    mode, pattern = config.recompute.mode, config.recompute.pattern
    if mode == "none" or item.owner == "input":
        return False
    if mode == "selective":
        return item.name in ATTENTION_CORE
    chosen = r"blocks\.\d+" if mode == "full" else pattern or ""
    names = (f"blocks.{layer}", f"blocks.{layer}.{item.owner}") if item.owner else (f"blocks.{layer}",)
    return any(re.fullmatch(chosen, name) for name in names)


def shared_items(config: TrainConfig) -> list[Kept]:
    """What the blocks of a stage share for a microbatch: rotary tables, and the mask of documents.

    Fused attention keeps the mask as numbers; recompute keeps it in both forms, for whoever runs again.
    """
    sizes = Sizes.of(config)
    items = []
    if config.model.positions == "rope":
        angles = (sizes.batch, sizes.sequence, sizes.head_dim // 2)
        items += [Kept("cosines", "", angles, sizes.wide), Kept("sines", "", angles, sizes.wide)]
    if _has_documents(config):
        mask = (sizes.batch, 1, sizes.sequence, sizes.sequence)
        again = config.recompute.mode != "none"
        items += [Kept("mask", "", mask, 1)] if again else []
        items += [Kept("bias", "", mask, sizes.width)] if again or not config.model.attention_dropout else []
    return items


def _has_documents(config: TrainConfig) -> bool:
    return config.data.pack and config.data.document_mask


def end_items(config: TrainConfig, *, embedding: bool, head: bool) -> list[Kept]:
    """What the embedding and the head keep for a microbatch."""
    sizes, tp = Sizes.of(config), config.parallel.tp
    row = (sizes.batch, sizes.sequence)
    items = []
    if embedding and tp > 1:
        items += [Kept("ids looked up here", "", row, 8), Kept("ids held elsewhere", "", row, 1)]
    if embedding:
        items += _dropped(config, "embedding")
    if head:
        items += _norm(config, "norm", "output")
        items.append(Kept("logits", "", (*row, padded_vocab(config.model) // tp), sizes.width))
        items.append(Kept("log-sum-exp of the logits", "", row, sizes.wide))
    return items


def weight_items(config: TrainConfig) -> list[Kept]:
    """What one block keeps for a microbatch from I to W: inputs of its linear layers, gradients of their outputs."""
    sizes, gated = Sizes.of(config), config.model.activation == "swiglu"
    row, width = (sizes.batch, sizes.sequence), sizes.width
    q, kv = (*row, sizes.heads, sizes.head_dim), (*row, sizes.groups, 2, sizes.head_dim)
    whole, inner = (*row, sizes.hidden), (*row, sizes.ffn)
    return [
        Kept("attention_norm output", "", sizes.hidden_shape, width),
        Kept("gradient of query", "attention", q, width),
        Kept("gradient of key and value", "attention", kv, width),
        Kept("attended", "attention", q, width),
        Kept("gradient of attention", "", whole, width),
        Kept("mlp_norm output", "", sizes.hidden_shape, width),
        Kept("gradient of gate and up" if gated else "gradient of up", "mlp", (2, *inner) if gated else inner, width),
        Kept("activated", "mlp", inner, width),
        Kept("gradient of mlp", "", whole, width),
    ]


def weight_end_items(config: TrainConfig, *, embedding: bool, head: bool) -> list[Kept]:
    """The same of the embedding and the head."""
    sizes = Sizes.of(config)
    row, width = (sizes.batch, sizes.sequence), sizes.width
    items = []
    if embedding:
        items += [Kept("ids", "", row, 8), Kept("gradient of embedding", "", (*row, sizes.hidden), width)]
    if head:
        logits = (*row, padded_vocab(config.model) // config.parallel.tp)
        items += [Kept("norm output", "", sizes.hidden_shape, width), Kept("gradient of logits", "", logits, width)]
    return items


@dataclass(frozen=True)
class ActivationBytes:
    """Activations of one stage on a rank.

    Attributes:
        kept: bytes of each microbatch in flight.
        again: bytes that backward brings back for one block, of one microbatch at a time.
        until_w: bytes of each microbatch between its I and its W.
    """

    kept: int
    again: int
    until_w: int


def activation_bytes(config: TrainConfig, layers: range, *, embedding: bool, head: bool) -> ActivationBytes:
    """What a stage keeps for a microbatch, and what its largest recomputed block adds while its backward runs."""
    whole = _total(block_items(config))
    kept = [_total(block_items(config, layer)) for layer in layers]
    ends = _total(end_items(config, embedding=embedding, head=head))
    shared = _total(shared_items(config)) if layers else 0
    until_w = len(layers) * _total(weight_items(config))
    until_w += _total(weight_end_items(config, embedding=embedding, head=head))
    return ActivationBytes(sum(kept) + ends + shared, max((whole - part for part in kept), default=0), until_w)


def _total(items: list[Kept]) -> int:
    return sum(item.bytes for item in items)
