"""What may cross a boundary between stages: masks without gradients, missing values, values that need gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from megastack.batch import Microbatch
from megastack.errors import ScheduleError
from megastack.layers.context import Context
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.block import Block
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedules.registry import build_schedule
from megastack.pipeline.stage import Stage, TensorSpec, leaf
from megastack.testing.ranks import run_ranks
from tests.models.model_cases import LLAMA, build, microbatch, tiny
from tests.pipeline.chain import batch, squared_error


class MaskingBlock(Block):
    """Hands on an integer mask, a value that is never there, and a scale that needs a gradient."""

    def boundary(self) -> tuple[str, ...]:
        return ("mask_BS", "nothing", "scale_BS1")

    def forward(self, hidden_BSD: Any, context: Context | None = None, *values: Any) -> Any:
        mask_BS, nothing, scale_BS1 = values
        assert nothing is None
        if mask_BS is None:  # the first block makes them
            assert context is not None and context.positions_BS is not None
            mask_BS = (context.positions_BS % 3 > 0).long()
            scale_BS1 = hidden_BSD.mean(-1, keepdim=True)
        assert mask_BS.dtype == torch.int64
        hidden_BSD = super().forward(hidden_BSD * mask_BS.unsqueeze(-1) + scale_BS1, context)
        return hidden_BSD, mask_BS, None, scale_BS1 * 0.5


MASKING = LLAMA | {"layers": 4, "block": {"_target_": f"{__name__}.MaskingBlock"}}


def trained(
    mesh: Mesh, slices: list[dict[str, Any]], *, frozen: tuple[str, ...] = ()
) -> dict[str, torch.Tensor | None]:
    """Gradients by global name after a step of three microbatches, cut as ``slices`` say; the loss beside them."""
    config = tiny(MASKING, sequence_parallel=False)
    own = slices[mesh.rank :: mesh.shape.pp]
    stages: list[nn.Module] = [build(config, mesh, **part) for part in own]
    named = {name: p for stage in stages for name, p in stage.named_parameters()}
    for name, parameter in named.items():
        parameter.requires_grad_(not name.startswith(frozen or ("no such name",)))
    kind = "interleaved" if len(own) > 1 else "1f1b"
    pipeline = Pipeline(stages, build_schedule(kind, mesh.shape.pp, len(own), 3), mesh)
    batches = [microbatch(seed=1), microbatch(seed=2), microbatch(seed=3, documents=True)]
    losses = [pipeline.run(batches, 45) for _ in range(2)]
    assert torch.equal(losses[0], losses[1])
    return {"loss": losses[0]} | {name: parameter.grad for name, parameter in named.items()}


WHOLE = [{"layers": range(4)}]
HALVES = [{"layers": range(1)}, {"layers": range(1, 4)}]
HOLLOW = [
    {"layers": range(0), "embedding": True},
    {"layers": range(2), "embedding": False},
    {"layers": range(2, 2), "embedding": False, "head": False},
    {"layers": range(2, 4)},
]
INTERLEAVED = [{"layers": range(index, index + 1)} for index in range(4)]


def cut(pp: int, slices: list[dict[str, Any]], frozen: tuple[str, ...]) -> dict[str, torch.Tensor | None]:
    return trained(Mesh.from_environment(MeshShape(pp=pp)), slices, frozen=frozen)


@pytest.mark.parametrize("slices", [HALVES, INTERLEAVED, HOLLOW], ids=["pp2", "pp2x2", "pp4_two_hollow"])
@pytest.mark.parametrize("frozen", [(), ("embedding", "blocks.0")], ids=["all", "first_stage_frozen"])
def test_values_of_blocks_cross_and_their_gradients_come_back(slices: Any, frozen: tuple[str, ...]) -> None:
    pp = 4 if slices is HOLLOW else 2
    expected = trained(Mesh.single(), WHOLE, frozen=frozen)
    ranks = run_ranks(cut, pp, pp, slices, frozen)
    assert {name for found in ranks for name in found} == set(expected)
    for found in ranks:
        for name, gradient in found.items():
            reference = expected[name]
            if reference is None:
                assert gradient is None, f"{name} is frozen"
                continue
            assert gradient is not None
            torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


class Fickle(nn.Module):
    """Gives a value beside the hidden states for some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, carry: Mapping[str, Any], given: Microbatch) -> dict[str, Any]:
        hidden = given.tokens_BS.unsqueeze(-1) * self.weight
        return {"hidden": hidden, "extra": hidden if given.samples_B[0] else None}


class Last(nn.Module):
    def forward(self, carry: Mapping[str, Any], given: Microbatch) -> Any:
        return squared_error(carry["hidden"], given)


def test_a_boundary_that_depends_on_more_than_the_shape_is_refused() -> None:
    pipeline = Pipeline([Fickle(), Last()], build_schedule("gpipe", 1, 2, 2), Mesh.single())
    with pytest.raises(ScheduleError, match=r"stage 0 returned .*extra: None.* and .*extra: float64 \[2, 4, 3\]"):
        pipeline.run([batch(2, first=0), batch(2, first=1)], 1)


def test_a_slot_survives_a_journey_as_json() -> None:
    x = torch.zeros(2, 0, dtype=torch.bfloat16, requires_grad=True)
    slot = TensorSpec.of("x", x)
    assert (slot.shape, slot.torch_dtype, slot.needs_grad) == ((2, 0), torch.bfloat16, True)
    record = {"name": "x", "shape": [2, 0], "dtype": "bfloat16", "needs_grad": True}
    assert TensorSpec.from_record(record) == slot
    assert TensorSpec.from_record({"name": "y", "shape": None, "dtype": "", "needs_grad": False}) == TensorSpec.of(
        "y", None
    )


def test_a_leaf_is_cut_from_the_graph_before_it() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    cut_off = leaf(x, True)
    assert cut_off is not None and cut_off.is_leaf and cut_off.requires_grad
    assert cut_off.data_ptr() == x.data_ptr(), "without a copy"
    assert leaf(None, True) is None


class Half(nn.Module):
    """Uses one of the values of its carry."""

    def forward(self, carry: Mapping[str, Any], given: Microbatch) -> dict[str, Any]:
        return {"hidden": carry["hidden"] * 2}


def test_a_carry_that_a_stage_does_not_use_has_a_gradient_of_zero() -> None:
    stage = Stage(Half(), 1)
    carry = {name: torch.ones(2, requires_grad=True) for name in ("hidden", "unused")}
    stage.forward(carry, batch(1), 0)
    assert stage.live == 1
    found = stage.backward(0, {"hidden": torch.ones(2)})
    assert {name: x.tolist() for name, x in found.items()} == {"hidden": [2, 2], "unused": [0, 0]}
    assert stage.live == 0
