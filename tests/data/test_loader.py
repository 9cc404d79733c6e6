"""The samples that a step reads, on any layout and after any resume."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.batch import IGNORED_LABEL, Microbatch
from megastack.data.loader import Loader
from megastack.data.packing import PackedSamples, Rows, SingleSamples
from megastack.data.stream import TokenStream, stream_of
from megastack.errors import ConfigError, DataError

VOCAB, SIZE, GLOBAL = 50, 4, 8


def corpus(seed: int = 0, documents: int = 30) -> TokenStream:
    draw = np.random.default_rng(seed)
    return stream_of([draw.integers(0, VOCAB, size=draw.integers(1, 20)) for _ in range(documents)], VOCAB)


SAMPLES = PackedSamples(corpus(), SIZE)


def loader(samples: PackedSamples | SingleSamples = SAMPLES, **options: int) -> Loader:
    return Loader(samples, **{"global_size": GLOBAL, "micro_size": 1, "vocab": VOCAB, **options})


def consumed(step: int, dp_size: int, micro_size: int = 1) -> list[int]:
    """The samples of a step over all ranks, in the order of the infinite stream."""
    ranks = [loader(dp_rank=r, dp_size=dp_size, micro_size=micro_size) for r in range(dp_size)]
    pairs = [
        pair for rank in ranks for pair in zip(rank.entries(step).tolist(), rank.sample_numbers(step), strict=True)
    ]
    return [int(sample) for _, sample in sorted(pairs)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 50), st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 1), (1, 8), (2, 2)]))
def test_a_step_consumes_the_same_samples_on_every_layout(step: int, layout: tuple[int, int]) -> None:
    dp_size, micro_size = layout
    assert consumed(step, dp_size, micro_size) == consumed(step, 1)


def test_microbatch_and_rank_pick_their_rows_of_the_step() -> None:
    """Row i of microbatch m on rank r is entry s·N_b + (m·d + r)·b + i."""
    batches = loader(dp_rank=1, dp_size=2, micro_size=2).step(3)
    assert [batch.samples_B.tolist() for batch in batches] == [[26, 27], [30, 31]]
    assert all(batch.step == 3 for batch in batches)


def test_rows_are_the_samples_that_the_order_names() -> None:
    one = loader(micro_size=4, dp_rank=1, dp_size=2)
    (batch,) = one.step(5)
    rows = SAMPLES.rows(one.sample_numbers(5))
    assert batch.tokens_BS.dtype == batch.labels_BS.dtype == batch.samples_B.dtype == torch.int64
    assert batch.tokens_BS.tolist() == rows.tokens_BS.tolist()
    assert batch.labels_BS.tolist() == rows.labels_BS.tolist()
    assert batch.positions_BS.tolist() == rows.positions_BS.tolist()
    assert batch.documents_BS is not None and rows.documents_BS is not None
    assert batch.documents_BS.tolist() == rows.documents_BS.tolist()


def test_the_seed_decides_the_order() -> None:
    orders = [loader(seed=seed).sample_numbers(0).tolist() for seed in (0, 1, 1)]
    assert orders[0] != orders[1] == orders[2]


def same(first: list[Microbatch], second: list[Microbatch]) -> bool:
    return all(
        a.samples_B.equal(b.samples_B) and a.tokens_BS.equal(b.tokens_BS) and a.labels_BS.equal(b.labels_BS)
        for a, b in zip(first, second, strict=True)
    )


def test_resumes_within_an_epoch_and_at_its_end_read_the_same_samples_as_an_uninterrupted_run() -> None:
    """An epoch of 64 samples is 8 steps: stop after 3, after 5 and exactly after 8."""
    samples = PackedSamples(stream_of([np.arange(257) % VOCAB], VOCAB), SIZE)
    assert len(samples) == 64
    straight = loader(samples)
    seen = []
    for begin, end in ((0, 3), (3, 5), (5, 8), (8, 16)):
        resumed = loader(samples)
        for step in range(begin, end):
            assert same(resumed.step(step), straight.step(step))
            seen += resumed.sample_numbers(step).tolist()
    assert sorted(seen[:64]) == sorted(seen[64:]) == list(range(64))
    assert seen[:64] != seen[64:]


def test_a_resume_on_more_ranks_continues_in_the_same_global_order() -> None:
    straight = [sample for step in range(30) for sample in consumed(step, 2)]
    moved = [sample for step in range(30) for sample in consumed(step, 2 if step < 11 else 4)]
    assert moved == straight


@pytest.mark.parametrize(
    "samples", [SAMPLES, PackedSamples(corpus(), SIZE, document_mask=False), SingleSamples(corpus(), SIZE)]
)
def test_valid_tokens_are_known_ahead_and_agree_with_the_labels(samples: PackedSamples | SingleSamples) -> None:
    ranks = [loader(samples, dp_rank=r, dp_size=2, micro_size=2) for r in range(2)]
    for step in (0, 7, 19):
        counts = []
        for rank in ranks:
            batches = rank.step(step)
            for batch in batches:
                assert batch.valid_tokens == int((batch.labels_BS != IGNORED_LABEL).sum())
            counts.append(sum(batch.valid_tokens for batch in batches))
            assert rank.valid_tokens(step) == counts[-1]
        assert all(rank.global_valid_tokens(step) == sum(counts) for rank in ranks)


def test_moving_a_microbatch_keeps_its_count() -> None:
    batch = loader().step(0)[0]
    moved = batch.to("meta")
    assert moved.tokens_BS.is_meta and moved.documents_BS is not None and moved.documents_BS.is_meta
    assert (moved.valid_tokens, moved.step) == (batch.valid_tokens, batch.step)
    assert moved.cu_seqlens is not None and moved.cu_seqlens.is_meta
    assert moved.attention_mask is batch.attention_mask is not None
    assert batch.to("cpu").tokens_BS.equal(batch.tokens_BS)


def test_a_microbatch_locates_its_documents_again_when_they_are_replaced() -> None:
    batch = loader().step(0)[0]
    assert batch.documents_BS is not None and batch.attention_mask is not None and batch.cu_seqlens is not None
    starts = np.flatnonzero(np.diff(batch.documents_BS.flatten(), prepend=-1)).tolist()
    assert set(starts) <= set(batch.cu_seqlens.tolist()) == set(batch.attention_mask.cu_seqlens.tolist())
    single = replace(batch, documents_BS=torch.zeros_like(batch.documents_BS)).attention_mask
    assert single is not None and not single.has_boundaries
    assert replace(batch, documents_BS=None).attention_mask is None


def test_a_microbatch_made_by_hand_counts_its_labels() -> None:
    labels = torch.tensor([[1, IGNORED_LABEL, 2]])
    assert Microbatch(labels, labels, labels, None, torch.tensor([0])).valid_tokens == 2


def test_an_id_outside_the_vocabulary_is_the_same_error_on_every_rank_before_any_step() -> None:
    samples = PackedSamples(stream_of([np.array([*([1] * 400), 37, 1])], 38), SIZE)
    errors = set()
    for rank in range(4):
        with pytest.raises(DataError) as caught:
            loader(samples, vocab=37, dp_rank=rank, dp_size=4)
        errors.add(str(caught.value))
    assert errors == {
        "token id 37 in sample 100: outside model.vocab=37; use ids from 0 to 36, or a larger model.vocab"
    }


class Wild(PackedSamples):
    """A user's samples, whose rows have other ids than their check saw."""

    def rows(self, indices: np.ndarray) -> Rows:
        rows = super().rows(indices)
        rows.tokens_BS[0, 0] = -5
        return rows


def test_ids_that_the_first_check_missed_are_rejected_in_the_step() -> None:
    samples = Wild(corpus(), SIZE)
    number = loader(samples).sample_numbers(2)[0]
    with pytest.raises(DataError, match=rf"token id -5 in sample {number} at position 0: outside model.vocab=50"):
        loader(samples).step(2)


def test_a_step_without_any_label_is_known_on_every_rank_before_it() -> None:
    samples = PackedSamples(stream_of([np.array([1])] * 100, VOCAB), SIZE)
    for rank in range(2):
        found = loader(samples, dp_rank=rank, dp_size=2)
        assert found.global_valid_tokens(4) == 0
        assert all(microbatch.valid_tokens == 0 for microbatch in found.step(4))


def test_an_empty_set_is_rejected() -> None:
    with pytest.raises(DataError, match=r"training split has no samples"):
        loader(PackedSamples(stream_of([], VOCAB), SIZE))


def test_sizes_that_do_not_divide_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"batch.global_size=8: .* batch.micro_size=3 x parallel.dp=2; .* 6"):
        loader(micro_size=3, dp_size=2)
    with pytest.raises(ConfigError, match=r"batch.global_size=8: .* use for example 16"):
        loader(micro_size=2, dp_size=8)
