"""A decoder-only Transformer, or the slice of one that a pipeline stage holds.

The model is a flat list of units: the embedding, the blocks, and the head (final norm, output projection, loss). A
stage is a slice of that list. The whole model is the stage with all units, so one rank and a pipeline run the same
code. Blocks are keyed by their global number, so a parameter has the same name on every layout:
``blocks.17.mlp.up.weight``.

A tied output projection is the embedding's own parameter. A last stage without the embedding holds a copy under the
same global name, ``embedding.weight``, with the same initial values; the gradient reduction sums the two gradients.

The inputs and outputs of a stage are ``{"hidden": …}`` and the values that blocks name in ``boundary()``. Tokens,
labels, positions and documents come with the microbatch on every stage. There are no buffers, so a decoder can be built
on the meta device.

Shapes: B microbatch, S sequence (S/t between stages under sequence parallelism), D hidden, V vocabulary of this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from megastack.batch import Microbatch, StageLoss
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError
from megastack.layers.attention_kernels import AttentionCase, Kernel, KernelChoice, choose_kernel
from megastack.layers.cache import KeyValueCache
from megastack.layers.chunked_loss import chunked_head_loss
from megastack.layers.context import Context
from megastack.layers.dropout import dropout
from megastack.layers.embedding import LearnedPositions, VocabParallelEmbedding, VocabParallelHead
from megastack.layers.linear_ops import column_product
from megastack.layers.loss import vocab_parallel_losses
from megastack.layers.overrides import built_in, cache_obstacle, method_is_built_in, runs_built_in
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.compile import CompiledBlocks
from megastack.models.config import ModelConfig
from megastack.models.factories import block_factory, norm_factory, rope_of
from megastack.models.recompute import recompute_blocks_
from megastack.models.specs import decoder_spec
from megastack.pipeline.stage import StageTensors
from megastack.placement.module import ParallelModule, ReshardPolicy
from megastack.torch_private import has_backward_hooks, has_forward_hooks

_LOG = logging.getLogger(__name__)

LOWER_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Activation dtypes below fp32. They apply after the embedding, whose weight may be in fp32."""


class _LossOptions(TypedDict):
    vocab: int
    label_smoothing: float
    z_loss: float


class Decoder(ParallelModule):
    """A pipeline stage of the model that a configuration describes.

    Args:
        config: the options of the model. Of a ``TrainConfig`` only these are read, and no parallel degree.
        mesh: the ranks to split the layers over.
        layers: global numbers of the blocks; all of them by default.
        embedding: whether the stage begins with the embedding; by default if the blocks begin with block 0.
        head: whether the stage ends with norm, output projection and loss; by default if the blocks end with the last
            one.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or a ``_target_`` cannot be used.
        PlacementError: the tensor-parallel degree does not divide a size.
    """

    def __init__(
        self,
        config: ModelConfig | TrainConfig,
        mesh: Mesh,
        *,
        layers: range | None = None,
        embedding: bool | None = None,
        head: bool | None = None,
    ) -> None:
        super().__init__(mesh)
        self.config = ModelConfig.validated(config)
        model, recompute = self.config.model, self.config.recompute
        spec = decoder_spec(self.config, mesh.shape.tp)
        self.layers = range(model.layers) if layers is None else layers
        self.has_embedding = self.layers.start == 0 if embedding is None else embedding
        self.has_head = self.layers.stop == model.layers if head is None else head
        self.sequence_parallel = spec.norm.sequence_parallel
        self.rope = rope_of(model, spec)
        embeds = self.has_embedding or (self.has_head and model.tied)
        learned = spec.positions if self.has_embedding else None
        projects = self.has_head and not model.tied
        block = block_factory(model, spec, mesh)
        self.embedding = VocabParallelEmbedding.from_spec(spec.embedding, mesh) if embeds else None
        self.positions = None if learned is None else LearnedPositions.from_spec(learned, mesh)
        self.blocks = nn.ModuleDict({str(layer): block(layer=layer) for layer in self.layers})
        recompute_blocks_(dict(self.blocks.items()), recompute.mode, recompute.pattern, layers=model.layers)
        self.norm = norm_factory(spec, mesh)() if self.has_head else None
        self.head = VocabParallelHead.from_spec(spec.head, mesh) if projects else None
        self.compiled_blocks: CompiledBlocks | None = None
        self._head_spec = spec.head
        self._noted_whole_logits = False

    @built_in
    def forward(self, inputs: StageTensors, microbatch: Microbatch) -> dict[str, Any] | StageLoss:
        """Run the stage on one microbatch.

        Args:
            inputs: the outputs of the previous stage; empty for a stage with the embedding.
            microbatch: the microbatch, the same on every stage and tensor-parallel rank.

        Returns:
            The inputs of the next stage, or the loss sums of a stage with the head.
        """
        outputs = self._run(inputs, microbatch)
        self.mesh.observer.on_layer("head" if self.has_head else None)
        if not self.has_head:
            return outputs
        chunk = self._chunk(microbatch.labels_BS.numel())
        if chunk is None:
            return self._loss(self._logits(outputs["hidden"]), microbatch.labels_BS)
        return self._chunked_loss(outputs["hidden"], microbatch.labels_BS, chunk)

    def logits(self, inputs: StageTensors, microbatch: Microbatch) -> Tensor:
        """This rank's columns (B, S, V) of the logits, padded vocabulary included; for a stage with the head."""
        return self._logits(self._run(inputs, microbatch)["hidden"])

    @built_in
    def infer(
        self, inputs: StageTensors, microbatch: Microbatch, *, at_B: Tensor, cache: KeyValueCache | None = None
    ) -> dict[str, Any] | Tensor:
        """Run the stage without labels; returns the inputs of the next stage, or this rank's logits (B, 1, V).

        Args:
            inputs: as in :meth:`forward`.
            microbatch: whole rows or, with a cache, the tokens that follow those in it.
            at_B: the index in each row at which a stage with the head computes logits.
            cache: keys and values of this stage's layers.
        """
        assert not self.sequence_parallel, "rows of any length are not split over tp"
        outputs = self._run(inputs, microbatch, cache)
        if not self.has_head:
            return outputs
        rows_B = torch.arange(len(at_B), device=at_B.device)
        return self._logits(outputs["hidden"][rows_B, at_B][:, None])

    @property
    def cache_obstacle(self) -> str | None:
        """The reason why generation must run this stage with whole rows for every token; None if a cache is exact."""
        return cache_obstacle(self)

    @property
    def chunking_obstacle(self) -> str | None:
        """The reason why a stage with the head computes the logits of all tokens at once under ``loss.chunked``.

        None if the loss and the head's product, which chunks replace, are the package's own and have no hooks. All
        ranks of a tp group must have the same overrides and hooks.
        """
        for method in ("_logits", "_loss"):
            if not method_is_built_in(self, method):
                return f"{type(self).__qualname__} overrides `{method}`"
        if self.head is None:
            return None
        if not runs_built_in(self.head, "forward"):
            return f"head ({type(self.head).__qualname__}) overrides `forward`"
        hooked = has_forward_hooks(self.head) or has_backward_hooks(self.head)
        return f"head ({type(self.head).__qualname__}) has hooks" if hooked else None

    def attention_kernel(self, batch: int, sequence: int, *, documents: bool) -> KernelChoice:
        """The kernel of the built-in attention layer in training, for a microbatch of ``batch`` rows on this device."""
        spec, tp = decoder_spec(self.config).block.attention, self.mesh.shape.tp
        if spec.attention_dropout:
            return KernelChoice(Kernel.MATH, because="model.attention_dropout needs the weights")
        shape, groups = (batch, sequence, spec.heads // tp, spec.width), max(spec.groups // tp, 1)
        return choose_kernel(
            AttentionCase.of(
                self.mesh.device,
                self._activation_dtype,
                shape,
                groups,
                documents=documents,
                dense=documents and self.compiled_blocks is not None,
            )
        )

    def units(self) -> dict[nn.Module, ReshardPolicy]:
        """The modules whose parameters are used only by calling them, in order of use, with their reshard policies.

        The copy of a tied projection is excluded. At the end of the model the backward follows the forward immediately,
        so the last block stays gathered, and the norm and the projection belong to the stage.
        """
        policies: dict[nn.Module, ReshardPolicy] = {}
        if self.embedding is not None and self.has_embedding:
            ends = self.has_head and self.head is None
            policies[self.embedding] = ReshardPolicy.WITH_STAGE if ends else ReshardPolicy.FORWARD_ONLY
        if self.positions is not None:
            policies[self.positions] = ReshardPolicy.FORWARD_ONLY
        policies |= dict.fromkeys(self.blocks.values(), ReshardPolicy.AFTER_FORWARD)
        if self.has_head and self.blocks:
            policies[list(self.blocks.values())[-1]] = ReshardPolicy.AFTER_BACKWARD
        policies |= {end: ReshardPolicy.WITH_STAGE for end in (self.norm, self.head) if end is not None}
        return policies

    def share_embedding(self, first: Decoder) -> None:
        """Use the embedding of ``first`` as the tied projection, instead of a copy, if one rank holds both stages."""
        assert self.config.model.tied and first.embedding is not None and self.embedding is not None
        self.embedding = first.embedding

    @built_in
    def _run(self, inputs: StageTensors, microbatch: Microbatch, cache: KeyValueCache | None = None) -> dict[str, Any]:
        context = self._context(microbatch, cache)
        values = {"hidden": self._embed(microbatch, context)} if self.has_embedding else dict(inputs)
        compiled = self.compiled_blocks if torch.is_grad_enabled() else None
        for name, block in self.blocks.items():
            self.mesh.observer.on_layer(f"blocks.{name}")
            values |= _call(block if compiled is None else partial(compiled, block, int(name)), block, values, context)
        return values

    @built_in
    def _context(self, microbatch: Microbatch, cache: KeyValueCache | None = None) -> Context:
        if not self.blocks:
            return Context(samples_B=microbatch.samples_B, step=microbatch.step, seed=self.config.seed)
        return Context.of(
            microbatch.positions_BS,
            microbatch.documents_BS,
            microbatch.samples_B,
            attention_mask=microbatch.attention_mask,
            cu_seqlens=microbatch.cu_seqlens,
            step=microbatch.step,
            seed=self.config.seed,
            rope=self.rope,
            dtype=self._activation_dtype,
            cache=cache,
        )

    @property
    def _activation_dtype(self) -> torch.dtype:
        return LOWER_PRECISION.get(self.config.precision.compute, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the parameters, or the configured one in a stage without parameters."""
        own = next(self.parameters(), None)
        if own is not None:
            return own.dtype
        return torch.float64 if self.config.precision.compute == "fp64" else torch.float32

    @built_in
    def _embed(self, microbatch: Microbatch, context: Context) -> Tensor:
        assert self.embedding is not None
        hidden_BSD = self.embedding(microbatch.tokens_BS)
        if self.positions is not None:
            hidden_BSD = hidden_BSD + self.positions(microbatch.positions_BS)
        hidden_BSD = hidden_BSD.to(LOWER_PRECISION.get(self.config.precision.compute, hidden_BSD.dtype))
        group = self.mesh[Axis.TP] if self.sequence_parallel else None
        return dropout(hidden_BSD, self.config.model.dropout, context, "embedding", group=group, training=self.training)

    def _chunk(self, tokens: int) -> int | None:
        """The tokens of a chunk of the loss; None to compute the logits of all tokens at once."""
        chunk = self._head_spec.chunk(tokens, self.mesh.shape.tp)
        obstacle = None if chunk is None else self.chunking_obstacle
        if obstacle is None:
            return chunk
        if not self._noted_whole_logits:
            _LOG.warning("loss.chunked: the logits of all tokens are computed at once, because %s", obstacle)
        self._noted_whole_logits = True
        return None

    @built_in
    def _logits(self, hidden_BSD: Tensor) -> Tensor:
        assert self.norm is not None, "only the stage with the head has logits"
        hidden_BSD = self.norm(hidden_BSD)
        if self.head is not None:
            return self.head(hidden_BSD)
        assert self.embedding is not None
        group = self.mesh[Axis.TP]
        (logits_BSV,) = column_product(
            hidden_BSD, [self.embedding.weight], [None], group, sequence_parallel=self.sequence_parallel
        )
        return logits_BSV

    @built_in
    def _loss(self, logits_BSV: Tensor, labels_BS: Tensor) -> StageLoss:
        cross_entropy, z = vocab_parallel_losses(logits_BSV, labels_BS, self.mesh, **self._loss_options)
        return StageLoss(cross_entropy if z is None else cross_entropy + z, cross_entropy.detach())

    def _chunked_loss(self, hidden_BSD: Tensor, labels_BS: Tensor, chunk: int) -> StageLoss:
        projection = self.embedding if self.head is None else self.head
        assert self.norm is not None and projection is not None
        objective, cross_entropy = chunked_head_loss(
            self.norm(hidden_BSD),
            projection.weight,
            labels_BS,
            self.mesh,
            chunk=chunk,
            sequence_parallel=self.sequence_parallel,
            **self._loss_options,
        )
        return StageLoss(objective, cross_entropy)

    @property
    def _loss_options(self) -> _LossOptions:
        loss = self.config.loss
        smoothing = loss.label_smoothing if self.training else 0.0
        return {"vocab": self.config.model.vocab, "label_smoothing": smoothing, "z_loss": loss.z_loss}


def _call(
    function: Callable[..., Any], block: nn.Module, values: Mapping[str, Any], context: Context
) -> dict[str, Any]:
    """The outputs of a block by name: hidden states, and the values that it names in ``boundary()``."""
    names = block.boundary() if isinstance(block, ParallelModule) else ()
    if not names:
        return {"hidden": function(values["hidden"], context)}
    given = function(values["hidden"], context, *(values.get(name) for name in names))
    if not isinstance(given, tuple) or len(given) != 1 + len(names):
        raise ConfigError(
            f"model.block={type(block).__qualname__}: boundary() names {', '.join(names)}; "
            f"forward must return (hidden, {', '.join(names)})"
        )
    return dict(zip(("hidden", *names), given, strict=True))
