"""Attention alone: against explicit sums, on its slower path, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from megastack.errors import ConfigError
from megastack.layers.attention import ParallelAttention
from megastack.layers.context import Context, document_mask
from megastack.layers.rope import Rope
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.module import placements_of
from megastack.placement.placement import Normal
from megastack.testing.ranks import run_ranks

STRONG = Normal(0.5)


@pytest.fixture(autouse=True)
def _fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def hidden(sequence: int = 6, width: int = 8) -> torch.Tensor:
    return torch.randn(2, sequence, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_hand(layer: ParallelAttention, x_BSD: torch.Tensor, mask_SS: torch.Tensor) -> torch.Tensor:
    """Attention without rotation, one head at a time."""
    heads, groups = layer.heads, layer.kv_groups
    outputs = []
    for head in range(heads):
        q = x_BSD @ layer.q.weight[head].T
        k, v = (x_BSD @ layer.kv.weight[head * groups // heads, part].T for part in (0, 1))
        scores = (q @ k.mT / layer.head_dim**0.5).masked_fill(~mask_SS, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, -1) @ layer.out.weight.T


@pytest.mark.parametrize("groups", [None, 2, 1])
def test_it_attends_causally_by_group_without_a_context(groups):
    layer = ParallelAttention(8, 4, Mesh.single(), kv_groups=groups, head_dim=3, init=STRONG)
    x_BSD = hidden()
    causal_SS = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(layer(x_BSD), by_hand(layer, x_BSD, causal_SS), rtol=1e-12, atol=1e-12)


def test_it_attends_within_documents():
    layer = ParallelAttention(8, 4, Mesh.single(), kv_groups=2, init=STRONG)
    x_BSD, documents_BS = hidden(), torch.tensor([[0, 0, 0, 1, 1, 2]] * 2)
    mask_SS = torch.zeros(6, 6, dtype=torch.bool)
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        mask_SS[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
    assert torch.equal(document_mask(documents_BS), mask_SS.expand(2, 1, 6, 6))
    context = Context.of(None, documents_BS)
    torch.testing.assert_close(layer(x_BSD, context), by_hand(layer, x_BSD, mask_SS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_the_path_with_dropout_is_the_same_attention(documents):
    options = {"kv_groups": 2, "rope": Rope(2), "qk_norm": True, "init": STRONG}
    fast = ParallelAttention(8, 4, Mesh.single(), **options)
    slow = ParallelAttention(8, 4, Mesh.single(), attention_dropout=1e-15, **options)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2]] * 2) if documents else None
    context = Context.of(torch.arange(6).repeat(2, 1), numbers, torch.tensor([0, 1]), rope=Rope(2), dtype=torch.float64)
    x_BSD = hidden()
    torch.testing.assert_close(slow(x_BSD, context), fast(x_BSD, context), rtol=1e-12, atol=1e-12)
    strong = ParallelAttention(8, 4, Mesh.single(), attention_dropout=0.5, **options)
    assert not torch.allclose(strong(x_BSD, context), fast(x_BSD, context))
    assert torch.equal(strong.eval()(x_BSD, context), fast(x_BSD, context))


def test_attention_in_a_long_row_of_documents_stays_finite_and_apart():
    layer = ParallelAttention(8, 2, Mesh.single(), init=STRONG)
    x_BSD = hidden(1200)
    context = Context.of(None, torch.tensor([[0] * 700 + [1] * 500] * 2))
    before_BSD = layer(x_BSD, context)
    x_BSD[:, 3] += 100
    after_BSD = layer(x_BSD, context)
    assert before_BSD.isfinite().all()
    assert torch.equal(before_BSD[:, 700:], after_BSD[:, 700:]) and not torch.equal(before_BSD, after_BSD)


def test_biases_go_where_they_are_asked_for():
    mesh = Mesh.single()
    for options, expected in (({}, ()), ({"qkv_bias": True}, ("q", "kv")), ({"bias": True}, ("q", "kv", "out"))):
        layer = ParallelAttention(8, 4, mesh, **options)
        assert tuple(name for name in ("q", "kv", "out") if getattr(layer, name).bias is not None) == expected


class Uniform(ParallelAttention):
    """Every query takes the mean of the values up to itself."""

    def attend(self, q_BSHK, k_BSGK, v_BSGK, context):
        count_S = torch.arange(1, v_BSGK.shape[1] + 1)[:, None, None]
        mean_BSGK = v_BSGK.cumsum(1) / count_S
        return mean_BSGK.repeat_interleave(q_BSHK.shape[2] // v_BSGK.shape[2], dim=2)


def test_a_subclass_may_attend_in_its_own_way():
    layer = Uniform(8, 4, Mesh.single(), kv_groups=2, init=STRONG)
    x_BSD = hidden()
    layer.q.weight.detach().zero_()
    plain = ParallelAttention(8, 4, Mesh.single(), kv_groups=2, init=STRONG)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x_BSD), plain(x_BSD), rtol=1e-12, atol=1e-12)


def copies(groups: int) -> tuple[int, tuple[int, ...], bool, float]:
    """Of one of four ranks: copies of its kv group, its kv shape, whether q and k norms are partial, the error."""
    torch.set_default_dtype(torch.float64)
    try:
        mesh = Mesh.from_environment(MeshShape(tp=4))
        options = {"kv_groups": groups, "qk_norm": True, "rope": Rope(2), "init": STRONG}
        layer, single = ParallelAttention(8, 4, mesh, **options), ParallelAttention(8, 4, Mesh.single(), **options)
        placements = placements_of(layer)
        partial = all(Axis.TP in placements[f"{name}_norm.weight"].partial for name in "qk")
        error = (layer(hidden()) - single(hidden())).abs().max().item()
        return placements["kv.weight"].shards[Axis.TP].copies, tuple(layer.kv.weight.shape), partial, error
    finally:
        torch.set_default_dtype(torch.float32)


def test_fewer_groups_than_ranks_are_copied_to_neighbours():
    for groups, expected in ((4, 1), (2, 2), (1, 4)):
        for found in run_ranks(copies, 4, groups):
            assert found[:3] == (expected, (1, 2, 2, 8), True)
            assert found[3] < 1e-13


class Ranks(Mesh):
    """A mesh of some tensor-parallel ranks that never communicates."""

    def __init__(self, tp: int) -> None:
        super().__init__(MeshShape(tp=tp), 0, torch.device("cpu"), None)

    def __getitem__(self, axes):
        group = Mesh.single()[axes]
        object.__setattr__(group, "size", self.shape.tp)
        return group


@pytest.mark.parametrize(
    ("heads", "tp", "options", "says"),
    [
        (3, 1, {}, "model.heads=3: must divide model.hidden=8 where model.head_dim is null; use 1, 2, 4 or 8"),
        (4, 1, {"kv_groups": 3}, "model.kv_groups=3: must divide model.heads=4; use 1, 2 or 4"),
        (4, 1, {"rope": Rope(8)}, "rope.head_dim=8: .* use 2"),
        (6, 4, {"head_dim": 2}, "parallel.tp=4: must divide model.heads=6; use 1, 2, 3 or 6"),
        (12, 4, {"head_dim": 2, "kv_groups": 6}, "parallel.tp=4: must divide model.kv_groups=6 or be a multiple of it"),
    ],
)
def test_heads_that_do_not_fit_are_refused_with_what_would(heads, tp, options, says):
    with pytest.raises(ValueError, match=says):
        ParallelAttention(8, heads, Ranks(tp), **options)


def test_numbers_that_fit_each_other_are_the_ones_that_build():
    """Every combination of heads, groups and ranks up to 8 builds exactly when whole groups or copies of one fit."""
    for heads in range(1, 9):
        for groups in range(1, heads + 1):
            for tp in range(1, 9):
                fits = heads % groups == 0 and heads % tp == 0 and (groups % tp == 0 or tp % groups == 0)
                try:
                    with torch.device("meta"):
                        ParallelAttention(8, heads, Ranks(tp), kv_groups=groups, head_dim=2)
                except (ConfigError, ValueError):
                    assert not fits, (heads, groups, tp)
                else:
                    assert fits, (heads, groups, tp)
