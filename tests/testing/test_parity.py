"""assert_parity: correct layers pass on every mesh, and errors that do not stop a training are caught by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megastack.comm.autograd import reduce_from
from megastack.errors import MeshError, PlacementError
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import RMSNorm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Placement, Shard, Zeros
from megastack.testing.parity import assert_parity, perturb_
from tests.testing import impure_layers
from tests.testing.layers import (
    RIGHT,
    SPLIT,
    D,
    Drifting,
    Dropping,
    F,
    Normed,
    OneSeed,
    Pair,
    Sloped,
    early_bias,
    mlp,
    right,
    split,
)

TP2, DP2_TP2 = MeshShape(tp=2), MeshShape(dp=2, tp=2)


@pytest.mark.parametrize("name", list(RIGHT))
def test_layers_on_dp2_tp2(name: str) -> None:
    assert_parity(partial(right, name=name), DP2_TP2, steps=2)


@pytest.mark.parametrize("name", list(SPLIT))
def test_layers_with_sequence_parallelism_on_dp2_tp2(name: str) -> None:
    assert_parity(partial(split, name=name), DP2_TP2, steps=2, sequence_parallel=True)


def test_plain_functions_classes_dtypes_and_optimizers() -> None:
    assert_parity(mlp, MeshShape(tp=4))
    assert_parity(Pair, MeshShape(dp=4), dtype=torch.float32)
    assert_parity(Pair, TP2, optimizer="adamw")
    assert_parity(Pair, TP2, optimizer="adamw", dtype=torch.float32)


def undeclared_slope(mesh: Mesh) -> nn.Module:
    return Sloped(mesh, declared=False)


def undeclared_norm(mesh: Mesh) -> nn.Module:
    return Normed(mesh, RMSNorm, sequence_parallel=True, declared=False)


def declared_without_need(mesh: Mesh) -> nn.Module:
    layer = Normed(mesh, RMSNorm, sequence_parallel=False)
    layer.norm = RMSNorm(D, mesh, sequence_parallel=True)
    return layer


def one_seed(mesh: Mesh) -> nn.Module:
    return OneSeed(D, F, mesh)


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (undeclared_slope, {}, "replicas of gradient slope differ between ranks"),
        (undeclared_norm, {"sequence_parallel": True}, "replicas of gradient norm.weight differ"),
        (declared_without_need, {}, r"gradient norm\.weight differs by .* \(2 × the reference\)"),
        (early_bias, {}, "step 1: output differs"),
        (Dropping, {}, "replicas of output differ between ranks by .*, but must be identical"),
        (one_seed, {}, r"gradient down\.weight differs"),
        (Drifting, {}, r"replicas of weight down\.bias differ"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_errors_are_caught_by_name(factory: Callable[[Mesh], nn.Module], options: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)^the layer on tp2 does not match one rank\n.*{words}"):
        assert_parity(factory, TP2, steps=1, **options)


def test_a_bias_that_is_added_too_often_is_caught_in_the_output() -> None:
    """Its own gradient is right, but its perturbed values change the output."""
    with pytest.raises(AssertionError) as caught:
        assert_parity(early_bias, TP2, steps=2)
    assert "the output of down (EarlyBias)" in str(caught.value)
    assert "cause    bias added before the reduction: the output is off by exactly 1 × down.bias" in str(caught.value)
    assert "loss differs" in str(caught.value)
    assert "gradient down.bias" not in str(caught.value).split("step 2")[0]


class BatchMean(ParallelMLP):
    """Subtracts a mean over the samples of the batch."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        output = super().forward(hidden_BSD, context)
        return output - output.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (
            impure_layers.LocalFeatures,
            TP2,
            r"output of the layer \(LocalFeatures\).*\ncause .*the error is in its own code",
        ),
        (
            impure_layers.RankConstant,
            MeshShape(dp=2),
            r"output of the layer \(RankConstant\).*\ncause .*the error is in its own code",
        ),
        (
            impure_layers.DroppingModule,
            TP2,
            r"\(DroppingModule\).*\ncause    drop \(Dropout\) draws from torch's gen",
        ),
        (impure_layers.Clock, TP2, r"output of the layer \(Clock\).*\ncause    it is not deterministic"),
        (
            impure_layers.NoisyBackward,
            TP2,
            r"gradient of the layer's input.*\ncause    the gradient is right at the output of the layer \(NoisyB",
        ),
        (BatchMean, MeshShape(dp=2), r"output of the layer \(BatchMean\).*\ncause .* mixes samples of the batch"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_class_at_fault_and_the_cause_are_named(layer: Any, shape: MeshShape, words: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){words}"):
        assert_parity(lambda mesh: layer(D, D, mesh), shape, steps=1)


class EarlyInside(ParallelMLP):
    """Adds the bias of a submodule that it does not call, on every rank before the sum."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        inner = self.activate(self.up(hidden_BSD))
        return reduce_from(functional.linear(inner, self.down.weight, self.down.bias), self.mesh[Axis.TP])


class TwiceOnOne(ParallelMLP):
    """Correct in the forward pass; one of two ranks passes back twice the gradient."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        output = super().forward(hidden_BSD, context)
        return output + (output - output.detach()) * self.mesh[Axis.TP].rank


def test_a_parameter_that_is_used_without_calling_its_layer_is_named() -> None:
    words = r"(?s)output of the layer \(EarlyInside\).*bias added before the reduction: .* 1 × down.bias"
    with pytest.raises(AssertionError, match=words):
        assert_parity(lambda mesh: EarlyInside(D, F, mesh, bias=True), TP2, steps=1)


def test_a_factor_on_one_rank_only_is_not_taken_for_a_sum() -> None:
    with pytest.raises(AssertionError, match="TwiceOnOne") as caught:
        assert_parity(lambda mesh: TwiceOnOne(D, F, mesh), TP2, steps=1)
    assert "too often" not in str(caught.value)


class Buffered(impure_layers.RankConstant):
    """Accepts only fp32."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        assert hidden_BSD.dtype == torch.float32
        return super().forward(hidden_BSD, context)


def test_a_layer_of_a_fixed_dtype_is_diagnosed_in_it() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)output of the layer \(Buffered\).*its own code: it depends on the rank"
    ):
        assert_parity(lambda mesh: Buffered(D, F, mesh), TP2, steps=1, dtype=torch.float32)


def test_the_class_at_fault_is_named_inside_other_layers_and_in_fp32() -> None:
    def nested(mesh: Mesh) -> nn.Module:
        return nn.Sequential(impure_layers.LocalHeads(D, 4, mesh), mlp(mesh))

    with pytest.raises(
        AssertionError, match=r"(?s)the output of 0 \(LocalHeads\).*passes to 0.out \(RowParallelLinear\)"
    ):
        assert_parity(nested, TP2, steps=1, dtype=torch.float32, optimizer="adamw")


def test_an_undeclared_partial_gradient_of_a_norm_is_attributed_to_the_class_that_built_it() -> None:
    def layer(mesh: Mesh) -> nn.Module:
        return impure_layers.WholeNorm(D, F, mesh, sequence_parallel=True)

    words = r"(?s)the gradient of norm.weight \(WholeNorm\).*\ncause    undeclared partial gradient over tp"
    with pytest.raises(AssertionError, match=words):
        assert_parity(layer, TP2, steps=1, sequence_parallel=True)


def test_any_callable_is_a_factory() -> None:
    class Local(ParallelMLP):
        pass

    width = [D, F]
    assert_parity(lambda mesh: Local(*width, mesh), TP2, steps=1)
    assert_parity(partial(lambda mesh, inner: Local(D, inner, mesh), inner=F), TP2, steps=1)


def unnamed(mesh: Mesh) -> nn.Module:
    return nn.Identity()


def test_meshes_that_do_not_fit_a_single_layer_are_rejected() -> None:
    for shape in (MeshShape(pp=2), MeshShape(cp=2)):
        with pytest.raises(MeshError, match="no pipeline or context axis; use dp and tp"):
            assert_parity(Pair, shape)
    with pytest.raises(MeshError, match="batch=3: must be a multiple of 2"):
        assert_parity(Pair, MeshShape(dp=2), batch=3)
    with pytest.raises(MeshError, match="sequence=7: must be a multiple of 2"):
        assert_parity(partial(split, name="pair"), TP2, sequence=7, sequence_parallel=True)
    assert_parity(Pair, TP2, sequence=7, steps=1)
    with pytest.raises(Exception, match="no parameter called weight") as caught:
        assert_parity(unnamed, TP2)
    assert isinstance(getattr(caught.value, "error", None), PlacementError)


def test_only_constant_initial_values_are_perturbed() -> None:
    mesh, layer = Mesh.single(), Normed(Mesh.single(), RMSNorm, sequence_parallel=False)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    perturb_(layer, mesh)
    for name, parameter in layer.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == (name.endswith("bias") or name == "norm.weight"), name


def test_padding_is_not_perturbed() -> None:
    class Table(ParallelModule):
        def placements(self) -> dict[str, Placement]:
            return {"weight": Placement((5, 2), {Axis.TP: Shard(0)}, init=Zeros(), padded_shape=(8, 2))}

    moved = []
    for rank in range(4):
        table = Table(Mesh(MeshShape(tp=4), rank, torch.device("cpu"), None))
        table.create_parameters()
        perturb_(table, table.mesh)
        moved.append(table.weight.detach().count_nonzero(1).tolist())
    assert moved == [[2, 2], [2, 2], [2, 0], [0, 0]]
