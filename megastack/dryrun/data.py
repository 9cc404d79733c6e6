"""Samples for a rank that is to run without the data of its configuration: the same shapes, and ids of zero."""

from __future__ import annotations

import numpy as np

from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset, Source, Split
from megastack.data.packing import PackedSamples, SingleSamples
from megastack.data.stream import TokenStream

_SAMPLES = 8


def placeholder_dataset(config: TrainConfig) -> Dataset:
    """A few samples of ``batch.sequence_length``; with document masks, most rows contain the end of a document."""
    data, size = config.data, config.batch.sequence_length
    length = _SAMPLES * size + 1
    starts = np.arange(0, length, size + 1 if not data.pack else 2 * size // 3 + 1, dtype=np.int64)
    stream = TokenStream(np.zeros(length, dtype=np.uint8), starts)
    samples = (
        PackedSamples(stream, size, document_mask=data.document_mask) if data.pack else SingleSamples(stream, size)
    )
    split = Split(stream, samples)
    return Dataset((Source(split, split),), config.model.vocab, data.pack, data.document_mask, data.validation_fraction)
