"""What each place along the pipeline holds: microbatches alive and the bytes that they keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megastack.config.schema import BatchOptions, ParallelOptions, ScheduleOptions
from megastack.models.activations import activation_bytes
from megastack.plan.describe import as_record, full
from megastack.plan.layout import Layout
from tests.models.model_cases import LLAMA, tiny
from tests.models.test_recompute import with_recompute


def on_four_stages(microbatches: int):
    config = tiny(LLAMA | {"layers": 8})
    parallel = ParallelOptions(pp=4, layers_per_stage=[1, 2, 2, 3])
    return replace(config, parallel=parallel, batch=BatchOptions(global_size=microbatches, sequence_length=8))


@pytest.mark.parametrize(("microbatches", "alive"), [(8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])])
def test_each_place_keeps_what_its_own_stage_keeps_times_the_microbatches_alive(microbatches, alive):
    layout = Layout(on_four_stages(microbatches))
    shares = layout.pipeline_ranks()
    assert [share.peak_activations for share in shares] == alive
    for share, part in zip(shares, layout.slices, strict=True):
        each = activation_bytes(layout.config, part.layers, embedding=part.embedding, head=part.head)
        assert share.activation_bytes == share.peak_activations * each.saved and each.recomputed == 0


def test_one_recomputed_block_is_added_once():
    config = with_recompute(on_four_stages(8), "full")
    layout = Layout(config)
    first = activation_bytes(config, range(1), embedding=True, head=False)
    assert layout.pipeline_ranks()[0].activation_bytes == 4 * first.saved + first.recomputed > 4 * first.saved


@pytest.mark.parametrize("mode", ["none", "full"])
def test_between_i_and_w_a_microbatch_counts_as_what_its_w_takes(mode):
    """ZB-H1: rank r has p - r microbatches in flight and puts r more off; with recompute those are the larger ones."""
    config = replace(with_recompute(on_four_stages(8), mode), schedule=ScheduleOptions(name="zb_h1"))
    layout = Layout(config)
    for place, (share, part) in enumerate(zip(layout.pipeline_ranks(), layout.slices, strict=True)):
        each = activation_bytes(config, part.layers, embedding=part.embedding, head=part.head)
        before = (4 - place) * each.saved + place * each.until_w
        after_an_i = (3 - place) * each.saved + (place + 1) * each.until_w if place else 0  # rank 0 has full backwards
        assert share.activation_bytes == pytest.approx(max(before, after_an_i) + each.recomputed, abs=1)


def test_a_place_without_layers_keeps_nothing():
    config = on_four_stages(8)
    config = replace(config, parallel=replace(config.parallel, layers_per_stage=[4, 0, 0, 4]))
    for name in ("1f1b", "zb_h1"):
        shares = Layout(replace(config, schedule=ScheduleOptions(name=name))).pipeline_ranks()
        assert [share.activation_bytes > 0 for share in shares] == [True, False, False, True]


def test_activations_are_shown_and_recorded():
    config = on_four_stages(8)
    places = as_record(config)["places"]
    assert [place["activation_bytes"] for place in places] == [
        share.activation_bytes for share in Layout(config).pipeline_ranks()
    ]
    heading, *rows = full(config).partition("holds\n")[2].splitlines()[:5]
    assert heading.split()[-1] == "activations" and rows[0].endswith("KiB")
