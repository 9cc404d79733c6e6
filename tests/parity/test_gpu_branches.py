"""The branches that GPUs take, forced over gloo, train like one rank in fp64."""

from __future__ import annotations

import pytest

from megastack.assemble.training import build_training
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.testing.compare import Trace, differences
from megastack.testing.ranks import run_ranks
from megastack.testing.training import trace_training
from tests.gpu_branches import gpu_branches
from tests.parity.cases import configured, dataset, layout_of, model_of
from tests.parity.cover import Row
from tests.parity.test_layouts import ROWS, STEPS, name, reference

SPLIT = {
    "layout": "tp2.pp2",
    "family": "llama",
    "sequence_parallel": "true",
    "tied": "true",
    "kv_groups": "4",
    "optimizer": "sgd",
    "recompute": "none",
    "zero": "0",
}
SHARDED = SPLIT | {"layout": "dp2.tp2", "tied": "false", "recompute": "full", "zero": "3"}


def trace(config: TrainConfig) -> Trace | None:
    with gpu_branches():
        mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
        found = trace_training(build_training(config, mesh, dataset()), STEPS)
    return found if mesh.rank == 0 else None


def check(row: Row, *, schedule: str | None = None) -> None:
    model = model_of(row)
    config = configured(model, layout_of(row), {} if schedule is None else {"schedule.name": schedule})
    found = run_ranks(trace, mesh_shape(config).world_size, config, timeout=180)[0]
    assert found is not None
    wrong = differences(reference(tuple(model.items())), found, tolerance=1e-10, adam_fp32=False)
    assert not wrong, "\n".join(map(str, wrong[:20]))


def test_split_backwards_with_sequence_parallelism() -> None:
    """W gathers the input of a product again, outside of autograd."""
    check(SPLIT, schedule="zb_h1")


def test_sharded_parameters() -> None:
    check(SHARDED)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_every_layout(row: Row) -> None:
    check(row)
