"""The two ends of a language model as values: token embedding, learned positions and output head; torch-free.

The layers are in :mod:`megastack.layers.embedding`. Shapes: B microbatch, S sequence, D hidden, V vocabulary, Vp padded
vocabulary, t tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megastack.layers.spec import DEFAULT_INIT, LayerSpec, LocalMicrobatch, SavedTensor, sequence_partial
from megastack.mesh.shape import Axis
from megastack.placement.placement import Initialiser, Placement, Shard

CHUNK_LOGITS = 2**25
"""Logits of a chunk on one rank: 128 MiB in fp32."""
SMALLEST_CHUNK = 1024
"""Tokens of a chunk for a large vocabulary. Each chunk reads and writes the gradient of the weight; with fewer tokens a
GPU would spend more time on that than on the product."""


@dataclass(frozen=True)
class VocabularySpec(LayerSpec):
    """A weight ``(V, D)`` split along the padded vocabulary.

    Args:
        vocab: V, the number of tokens.
        hidden: D.
        vocab_multiple: rows are padded to a multiple of this.
        sequence_parallel: hidden states are split along the sequence over tp.
        init: the weight's initial values.
    """

    vocab: int
    hidden: int
    vocab_multiple: int = 128
    sequence_parallel: bool = False
    init: Initialiser = DEFAULT_INIT

    @property
    def padded(self) -> int:
        """Vp, the rows that the ranks allocate together; it does not depend on the degree."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def placements(self, tp: int = 1) -> dict[str, Placement]:
        """The weight ``(V, D)``, allocated as ``(Vp, D)``, split along its rows."""
        padded = (self.padded, self.hidden)
        return {
            "weight": Placement((self.vocab, self.hidden), {Axis.TP: Shard(0)}, init=self.init, padded_shape=padded)
        }

    def split_errors(self, tp: int) -> Iterator[str]:
        """Padded rows must be split evenly."""
        if self.padded % tp:
            yield f"must divide model.vocab={self.vocab} padded to {self.padded} by model.vocab_multiple"


class EmbeddingSpec(VocabularySpec):
    """The token embedding: rows of the weight by token id."""

    def saved(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """On several ranks, the ids that this rank looks up and the mask of ids that others hold."""
        row = (microbatch.batch, microbatch.sequence)
        if microbatch.tp == 1:
            return []
        return [SavedTensor("ids looked up here", row, 8), SavedTensor("ids held elsewhere", row, 1)]

    def deferred(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The ids and the gradient of the rows."""
        row = (microbatch.batch, microbatch.sequence)
        gradient = SavedTensor("gradient of embedding", (*row, self.hidden), microbatch.width)
        return [SavedTensor("ids", row, 8), gradient]

    @property
    def elements(self) -> int:
        """The rows are read and written."""
        return 2 * self.hidden


@dataclass(frozen=True)
class HeadSpec(VocabularySpec):
    """The output projection with the loss; with tied embeddings its weight is the embedding's.

    Args:
        chunked: compute both in chunks of tokens where that takes less memory.
    """

    chunked: bool = False

    def chunk(self, tokens: int, tp: int) -> int | None:
        """The number of tokens of a chunk, identical on all ranks; None to compute the logits of all tokens at once.

        Chunks need a buffer for the gradient of the weight in the wider dtype, as large as the logits of ``hidden``
        tokens. Logits that are not chunked exist twice at the peak, in other forms. Chunks of equal size are used if
        the logits that they avoid take more memory than the buffer.
        """
        largest = max(SMALLEST_CHUNK, CHUNK_LOGITS * tp // self.padded // 128 * 128)
        if not self.chunked or 2 * (tokens - largest) <= self.hidden:
            return None
        even = -(-tokens // -(-tokens // largest))
        return -(-even // 128) * 128

    def is_chunked(self, microbatch: LocalMicrobatch) -> bool:
        """Whether the logits of this microbatch are computed in chunks."""
        return self.chunk(microbatch.batch * microbatch.sequence, microbatch.tp) is not None

    def saved(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The logits and one number per token; or, in chunks, the gradients of input and weight, but not the input."""
        row = (microbatch.batch, microbatch.sequence)
        hidden = (microbatch.batch, microbatch.rows, self.hidden)
        if self.is_chunked(microbatch):
            weight = (self.padded // microbatch.tp, self.hidden)
            return [
                SavedTensor("gradient of the head's input", hidden, microbatch.width),
                SavedTensor("gradient of the head's weight", weight, microbatch.wide),
            ]
        logits = SavedTensor("logits", (*row, self.padded // microbatch.tp), microbatch.width)
        return [logits, SavedTensor("log-sum-exp of the logits", row, microbatch.wide)]

    def deferred(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The gradient of the logits; nothing in chunks, whose gradient of the weight is added in I."""
        if self.is_chunked(microbatch):
            return []
        logits = (microbatch.batch, microbatch.sequence, self.padded // microbatch.tp)
        return [SavedTensor("gradient of logits", logits, microbatch.width)]

    @property
    def matmul_parameters(self) -> int:
        """The weight without padding."""
        return self.vocab * self.hidden

    @property
    def elements(self) -> int:
        """The loss."""
        return 4 * self.vocab


@dataclass(frozen=True)
class LearnedPositionsSpec(LayerSpec):
    """A table with one row per position, identical on every tensor-parallel rank.

    Args:
        max_positions: rows of the table.
        hidden: D.
        sequence_parallel: each rank looks up its own slice of the sequence, so the gradient is partial over tp.
        init: initial values of the table.
    """

    max_positions: int
    hidden: int
    sequence_parallel: bool = False
    init: Initialiser = DEFAULT_INIT

    def placements(self, tp: int = 1) -> dict[str, Placement]:
        """The replicated table."""
        partial = sequence_partial(self.sequence_parallel)
        return {"weight": Placement((self.max_positions, self.hidden), partial=partial, init=self.init)}
