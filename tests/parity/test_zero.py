"""ZeRO level 1 and hybrid sharding match the losses, gradients, norms and weights of one rank in fp64.

Contains the cases that the pairwise coverage of layouts and choices does not include.
"""

from __future__ import annotations

from functools import cache

import pytest

from megastack.testing.compare import Trace
from megastack.testing.training import layout_differences, trace_layout
from tests.parity.cases import LAYOUTS, Changes, configured, dataset

STEPS = 3
TIED: Changes = {"model.tied": True}
FROZEN: Changes = {"optim.freeze": ["^embedding", r"^blocks\.0\."]}
MODELS: dict[str, Changes] = {"plain": {}, "tied": TIED, "frozen": FROZEN}
CELLS: dict[str, tuple[str, str, str, Changes]] = {
    "dp4 in shards of 2": ("dp4", "adamw", "tied", {"parallel.zero.shard_size": 2}),
    "dp2.tp2.pp2 tied": ("dp2.tp2.pp2", "adamw", "tied", {}),
    "dp2 on the host": ("dp2", "adamw", "plain", {"parallel.zero.offload": True}),
    "first stage is the embedding": ("dp2.pp2", "adamw", "tied", {"parallel.layers_per_stage": [0, 4]}),
    "frozen stage": ("dp2.pp2", "adamw", "frozen", {"parallel.layers_per_stage": [1, 3]}),
}


@cache
def reference(optimizer: str, model: str) -> Trace:
    return trace_layout(configured({"optim.name": optimizer}, MODELS[model]), STEPS, dataset=dataset())


@pytest.mark.parametrize("cell", CELLS)
def test_sharding_the_optimizer_does_not_change_training(cell: str) -> None:
    layout, optimizer, model, more = CELLS[cell]
    changes = ({"optim.name": optimizer}, MODELS[model], LAYOUTS[layout], {"parallel.zero.stage": 1}, more)
    found = layout_differences(reference(optimizer, model), configured(*changes), STEPS, dataset=dataset())
    assert not found, "\n".join(map(str, found[:20]))
