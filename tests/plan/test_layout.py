"""What each place along the pipeline holds: microbatches alive and the bytes that they keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megastack.config.schema import BatchOptions, ParallelOptions
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
        assert share.activation_bytes == share.peak_activations * each.kept and each.again == 0


def test_one_recomputed_block_is_added_once():
    config = with_recompute(on_four_stages(8), "full")
    layout = Layout(config)
    first = activation_bytes(config, range(1), embedding=True, head=False)
    assert layout.pipeline_ranks()[0].activation_bytes == 4 * first.kept + first.again > 4 * first.kept


def test_activations_are_shown_and_recorded():
    config = on_four_stages(8)
    places = as_record(config)["places"]
    assert [place["activation_bytes"] for place in places] == [
        share.activation_bytes for share in Layout(config).pipeline_ranks()
    ]
    heading, *rows = full(config).partition("holds\n")[2].splitlines()[:5]
    assert heading.split()[-1] == "activations" and rows[0].endswith("KiB")
