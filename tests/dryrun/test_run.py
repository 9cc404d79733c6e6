"""Dry runs: every kind of rank builds and steps without its peers and its device, as it does with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastack.assemble.training import build_training
from megastack.comm.traffic import Traffic
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.dryrun.run import Counts, dry_run, rank_alone
from megastack.errors import MeshError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.testing.ranks import run_ranks
from megastack.torch_private import TorchDispatchMode, is_view
from tests.dryrun.cases import ADAMW, CASES, precision, small, world
from tests.parity.cases import FAMILIES, LAYOUTS, ZERO, dataset
from tests.parity.cover import Row, all_rows, covering

Records = Mapping[tuple[str, str], Traffic]


@pytest.mark.parametrize("case", list(CASES))
def test_a_rank_builds_and_steps(case: str) -> None:
    rank, config = CASES[case]
    with rank_alone(config, rank) as alone:
        outcome, counts = alone.step(0)
    assert outcome.loss is not None and outcome.loss.device.type != "cpu" and outcome.loss.shape == ()
    assert outcome.loss.dtype == torch.float64
    assert not counts.host_reads
    assert all(counts.kernels_of(phase) for phase in ("zero", "forward", "backward", "clip", "optimizer"))
    assert not dist.is_initialized()


def rows() -> list[Row]:
    """A pairwise cover; ZeRO 2 and 3 only with several data ranks and unsplit backwards."""
    choices: dict[str, tuple[str, ...]] = {
        "layout": (*LAYOUTS, "gpipe"),
        "zero": tuple(ZERO),
        "precision": ("fp64", "fp32", "bf16", "fp16"),
        "recompute": ("none", "selective", "full"),
        "family": tuple(FAMILIES),
        "tied": ("true", "false"),
        "offload": ("true", "false"),
    }
    legal = [
        row
        for row in all_rows(choices)
        if int(row["zero"]) < 2 or ("dp" in row["layout"] and "zb" not in row["layout"])
    ]
    return covering(legal)


def config_of(row: Mapping[str, str]) -> TrainConfig:
    layout = LAYOUTS["pp2"] | {"schedule.name": "gpipe"} if row["layout"] == "gpipe" else LAYOUTS[row["layout"]]
    more = {
        "recompute.mode": row["recompute"],
        "model.tied": row["tied"] == "true",
        "parallel.zero.offload": row["offload"] == "true",
        "model.dropout": 0.1,
    }
    return small(layout, ZERO[row["zero"]], precision(row["precision"]), FAMILIES[row["family"]], more, ADAMW)


@pytest.mark.full
def test_every_rank_of_a_cover_builds_and_steps() -> None:
    for row in rows():
        config = config_of(row)
        for rank in world(config):
            with rank_alone(config, rank) as alone:
                alone.step(0)
                _, counts = alone.step(1)
            reads = {"offloaded gradients", "offloaded overflow flag"} if row["offload"] == "true" else set()
            assert set(counts.host_reads) <= reads, (row, rank)


def counted(config: TrainConfig, data: Dataset) -> Records:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh, data)
    mesh.ledger.reset()
    training.step(0)
    return mesh.ledger.records()


TIED = {"model.tied": True}
TRAFFIC = {
    "tied": small(LAYOUTS["pp2"], TIED, FAMILIES["gpt2"]),
    "tp2.pp2": small(LAYOUTS["tp2.pp2"], TIED, FAMILIES["gpt2"]),
    "dp2.tp2.pp2": small(LAYOUTS["dp2.tp2.pp2"], ZERO["1"], TIED),
    "interleaved": small(LAYOUTS["pp4x2"]),
    "zero2": small(LAYOUTS["dp2.pp2"], ZERO["2"]),
    "zero3": small(LAYOUTS["dp2"], ZERO["3"]),
    "zb_h2": small(LAYOUTS["dp2.tp2.pp2.zb_h2"]),
}


@pytest.mark.parametrize(
    "case", [each if each in ("tied", "zero3") else pytest.param(each, marks=pytest.mark.full) for each in TRAFFIC]
)
def test_the_traffic_is_that_of_a_run(case: str) -> None:
    config = TRAFFIC[case]
    for rank, found in enumerate(run_ranks(counted, len(world(config)), config, dataset())):
        assert found
        if rank % 2 or case not in ("tied", "zero3"):
            with rank_alone(config, rank) as alone:
                assert alone.step(0)[1].traffic == found, f"rank {rank}"


class Operations(TorchDispatchMode):
    """Counts operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_view(operator):
            self.counts[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def test_with_the_kernels_of_the_cpu_a_step_has_the_operations_of_a_cpu() -> None:
    config = small({"model.attention_dropout": 0.1}, FAMILIES["gpt2"], ADAMW, microbatches=1)
    training = build_training(config, Mesh.single(), dataset())
    training.step(0)
    with Operations() as real:
        training.step(1)
    with rank_alone(config, 0, kernels="cpu", dataset=dataset()) as alone:
        alone.step(0)
        found = Counter[str]()
        for (_, name), count in alone.step(1)[1].kernels.items():
            found[name] += count
    names = (
        "mm",
        "addmm",
        "addmm_",
        "bmm",
        "embedding",
        "index_add_",
        "_softmax",
        "_fused_adamw_",
        "sigmoid_",
        "exp2_",
    )
    assert {name: found[name] for name in names} == {name: real.counts[name] for name in names}
    assert found["sigmoid_"] and found["mm"] and found["_fused_adamw_"]
    with rank_alone(config, 0, dataset=dataset()) as alone:
        on_device = {name for _, name in alone.step(0)[1].kernels}
    assert "gelu" in on_device and "sigmoid_" not in on_device


def test_kernels_and_bytes_scale_with_the_model_and_the_batch() -> None:
    one, two, recomputed = (
        first_step({"model.layers": layers, "recompute.mode": mode})
        for layers, mode in ((1, "none"), (2, "none"), (2, "full"))
    )
    block = {phase: two.kernels_of(phase) - one.kernels_of(phase) for phase in ("forward", "backward")}
    assert 10 < block["forward"] < block["backward"]
    assert one.peak_bytes < two.peak_bytes and recomputed.peak_bytes < two.peak_bytes
    assert recomputed.kernels_of("forward") == two.kernels_of("forward")
    assert recomputed.kernels_of("backward") > two.kernels_of("backward")


def first_step(changes: Mapping[str, Any]) -> Counts:
    with rank_alone(small(changes), 0) as alone:
        return alone.step(0)[1]


def test_a_dry_run_reports_the_first_and_the_later_steps() -> None:
    whole_rows = {"data.document_mask": False}  # with documents, the kernels of attention on a CPU differ between steps
    run = dry_run(small(LAYOUTS["pp2"], {"schedule.name": "gpipe"}, whole_rows), 1)
    assert run.coordinates[Axis.PP] == 1
    assert 0 < run.built_bytes < run.step.peak_bytes
    assert run.step.kernels == run.first_step.kernels and run.step.traffic == run.first_step.traffic


def test_the_bytes_before_a_step_are_weights_gradients_and_moments() -> None:
    with rank_alone(small(precision("bf16"), ADAMW), 0) as alone:
        built = alone.device.memory.live
        weights = [x for stage in alone.training.stages for x in stage.parameters()]
    expected = sum(x.numel() * (18 if x.dtype == torch.bfloat16 else 16) for x in weights)
    assert expected <= built <= expected + 1024  # scalars and padding besides


def test_validation_generation_and_the_copy_of_a_checkpoint() -> None:
    config = small(LAYOUTS["tp2.pp2"])
    with rank_alone(config, 3) as alone:  # the last stage, which receives headers
        total, counts = alone.validate()
        assert total.device.type != "cpu" and not counts.host_reads and not counts.kernels_of("backward")
        completions, counts = alone.generate([[1, 2], [3]], 2)
        assert [each.ids for each in completions] == [(0, 0), (0, 0)]
        assert counts.host_reads == {"generated ids": 2 * 2}  # 2 rows, 2 tokens
        copies, counts = alone.stage_checkpoint()
        assert set(counts.host_reads) == {"checkpoint"} and counts.host_reads["checkpoint"] == len(copies)
        assert {x.device.type for x in copies} == {"cpu"}


def test_a_rank_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(MeshError, match="rank=2"), rank_alone(small(LAYOUTS["dp2"]), 2):
        pass
