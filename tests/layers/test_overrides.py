"""Layers of other people inside the built-in ones: what they change is really computed, trained and seen by hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

from megastack.comm.autograd import copy_to, gather_from
from megastack.layers.attention import ParallelAttention
from megastack.layers.linear import ColumnParallelLinear, column_parallel
from megastack.layers.overrides import method_is_built_in, runs_built_in
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.models.recompute import recompute
from megastack.placement.placement import Normal, Placement, Shard
from megastack.testing.ranks import run_ranks
from megastack.torch_private import has_forward_hooks
from megastack.weight_gradients import deferring, weight_gradient_scope
from tests.layers.layer_parity import assert_close, assert_same_gradients, piece, randn, randomised, split_like

B, S, D, H, K, R = 2, 4, 6, 4, 2, 3
LAYOUTS = [(1, False), (2, False), (2, True)]


class Lora(ColumnParallelLinear):
    """A projection with a trained correction of low rank behind it."""

    def placements(self) -> dict[str, Placement]:
        # Each rank applies the whole of `down` to what its own heads read: a part of its gradient, split or not.
        return super().placements() | {
            "down": Placement((R, self.in_features), partial=frozenset({Axis.TP}), init=Normal(0.5)),
            "up": Placement((*self.out_shape, R), {Axis.TP: Shard(0)}, init=Normal(0.5)),
        }

    def forward(self, x_BSD: Tensor) -> Tensor:
        group = self.mesh[Axis.TP]
        whole_BSD = gather_from(x_BSD, group, 1) if self.sequence_parallel else copy_to(x_BSD, group)
        low_BSR = whole_BSD @ self.down.T
        return super().forward(x_BSD) + (low_BSR @ self.up.flatten(0, -2).T).unflatten(-1, self.up.shape[:-1])


class WrappedQuery(nn.Module):
    """The same as a module of no class of the package, around a built-in one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.base = Lora(*args, **options)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.base(x_BSD)


def attention(mesh: Mesh, query: type[nn.Module] = Lora, **options: Any) -> ParallelAttention:
    layer = ParallelAttention(D, H, mesh, kv_groups=2, head_dim=K, bias=True, **options)
    layer.q = query(D, (H, K), mesh, bias=True, **options)
    return layer


def reference(whole: ParallelAttention, x: Tensor) -> Tensor:
    """The built-in layer with the correction in its query weight."""
    q = whole.q if isinstance(whole.q, Lora) else whole.q.base
    plain = ParallelAttention(D, H, Mesh.single(), kv_groups=2, head_dim=K, bias=True).double()
    given = {name.replace("q.base.", "q."): parameter for name, parameter in whole.named_parameters()}
    down, up = given.pop("q.down"), given.pop("q.up")
    return functional_call(plain, given | {"q.weight": q.weight + up @ down}, x)


def plain(mesh: Mesh, layer: nn.Module, x: Tensor, probe: Tensor) -> Tensor:
    out = layer(x)
    (out * probe).sum().backward()
    return out


def recomputed(mesh: Mesh, layer: nn.Module, x: Tensor, probe: Tensor) -> Tensor:
    out = recompute(layer, x)
    (out * probe).sum().backward()
    return out


def split(mesh: Mesh, layer: nn.Module, x: Tensor, probe: Tensor) -> Tensor:
    """As in a step of a schedule that splits backwards: weight gradients come later."""
    with weight_gradient_scope():
        out = recompute(layer, x)
        with deferring() as deferred:
            (out * probe).sum().backward()
        assert layer.out.weight in deferred.parameters
        deferred.accumulate()
    return out


def lora_parity(tp: int, sequence_parallel: bool, run: Callable[..., Tensor], query: type[nn.Module]) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    whole = randomised(attention(Mesh.single(), query))
    layer = split_like(attention(mesh, query, sequence_parallel=sequence_parallel), whole)
    x, probe = randn(B, S, D).requires_grad_(), randn(B, S, D, seed=1)
    expected = reference(whole, x)
    (expected * probe).sum().backward()
    local_x = piece(x, mesh, 1) if sequence_parallel else x.detach().clone().requires_grad_()
    out = run(mesh, layer, local_x, piece(probe, mesh, 1).detach() if sequence_parallel else probe)
    assert_close(out, piece(expected, mesh, 1) if sequence_parallel else expected)
    assert_close(local_x.grad, piece(x.grad, mesh, 1) if sequence_parallel else x.grad)
    assert_same_gradients(layer, whole)


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("run", [plain, recomputed, split])
def test_a_query_of_ones_own_is_computed_and_trained(
    run: Callable[..., Tensor], tp: int, sequence_parallel: bool
) -> None:
    run_ranks(lora_parity, tp, tp, sequence_parallel, run, Lora)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_query_in_a_module_of_ones_own_is_too(sequence_parallel: bool) -> None:
    run_ranks(lora_parity, 2, 2, sequence_parallel, plain, WrappedQuery)


def shift(layer: nn.Module) -> list[Callable[[pytest.MonkeyPatch], Any]]:
    """Ways to add 1,000 to what a column-parallel layer gives; each returns what undoes it, if anything must."""
    usual = type(layer).forward

    def more(x: Tensor) -> Tensor:
        return usual(layer, x) + 1000

    class Mixed(type("Mixin", (), {"forward": lambda self, x: usual(self, x) + 1000}), type(layer)):  # type: ignore[misc]
        pass

    return [
        lambda patch: patch.setattr(layer, "forward", more, raising=False),
        lambda patch: patch.setattr(type(layer), "forward", lambda self, x: usual(self, x) + 1000 * (self is layer)),
        lambda patch: patch.setattr(
            type(layer), "forward", functools.wraps(usual)(lambda self, x: usual(self, x) + 1000 * (self is layer))
        ),
        lambda patch: patch.setattr(layer, "__class__", Mixed),
        lambda patch: patch.setattr(layer, "_call_impl", more, raising=False),
        lambda patch: layer.register_forward_hook(lambda module, given, out: out + 1000),
        lambda patch: layer.register_forward_hook(
            lambda module, given, kwargs, out: out + 1000, with_kwargs=True, always_call=True
        ),
        lambda patch: register_module_forward_hook(lambda module, given, out: out + 1000 if module is layer else None),
        lambda patch: layer.register_forward_pre_hook(lambda module, given: given[0] + 1000),
    ]


@pytest.mark.parametrize("name", ["q", "kv", "out", "q_norm"])
@pytest.mark.parametrize("way", range(9))
def test_every_way_to_change_a_module_inside_attention_changes_its_output(
    way: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ParallelAttention(D, H, Mesh.single(), kv_groups=2, head_dim=K, qk_norm=True).double()
    x = randn(B, S, D)
    before = layer(x)
    handle = shift(layer.get_submodule(name))[way](monkeypatch)
    assert not torch.equal(layer(x), before)
    monkeypatch.undo()
    if handle is not None:
        handle.remove()
    assert torch.equal(layer(x), before)


def hooked(tp: int, kinds: tuple[str, ...], ranks: tuple[int, ...], sequence_parallel: bool) -> tuple[list[str], int]:
    """What hooks on projections see, on some ranks alone; outputs and gradients stay what they are without hooks."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "kv_groups": 2, "head_dim": K}
    layer = ParallelAttention(D, H, mesh, **options).double()
    seen: list[str] = []

    def run() -> list[Tensor]:
        layer.zero_grad()
        x = piece(randn(B, S, D), mesh, 1) if sequence_parallel else randn(B, S, D).requires_grad_()
        out = layer(x)
        out.square().sum().backward()
        return [out, x.grad, *(parameter.grad for parameter in layer.parameters())]

    expected = run()
    calls = sum(traffic.calls for traffic in mesh.ledger.records().values())
    mesh.ledger.reset()
    if mesh.rank in ranks:
        for name in ("q", "kv"):
            module = layer.get_submodule(name)
            for kind in kinds:
                getattr(module, f"register_{kind}_hook")(lambda *_, kind=kind, name=name: seen.append(f"{kind} {name}"))
    for actual, before in zip(run(), expected, strict=True):
        assert_close(actual, before)
    return seen, sum(traffic.calls for traffic in mesh.ledger.records().values()) - calls


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_forward_hooks_see_projections_on_the_ranks_that_have_them_and_cost_no_message(sequence_parallel: bool) -> None:
    kinds = ("forward_pre", "forward")
    found = run_ranks(hooked, 2, 2, kinds, (0,), sequence_parallel)
    assert found == [(["forward_pre q", "forward q", "forward_pre kv", "forward kv"], 0), ([], 0)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backward_hooks_see_the_gradients_of_projections(sequence_parallel: bool) -> None:
    kinds = ("full_backward_pre", "full_backward")
    for seen, _ in run_ranks(hooked, 2, 2, kinds, (0, 1), sequence_parallel):
        assert sorted(seen) == sorted(f"{kind} {name}" for kind in kinds for name in ("q", "kv"))


def test_global_backward_hooks_see_projections() -> None:
    layer = ParallelAttention(D, H, Mesh.single(), head_dim=K)
    seen: list[nn.Module] = []
    handle = register_module_full_backward_hook(lambda module, *_: seen.append(module))
    try:
        layer(torch.randn(B, S, D, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert layer.q in seen and layer.kv in seen


class Half(nn.Module):
    """A parametrisation that counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.tensor(0.5)), 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * self.scale


def test_a_parametrised_weight_is_computed_once_a_product_and_trained() -> None:
    layer = ParallelAttention(D, H, Mesh.single(), head_dim=K).double()
    x = randn(B, S, D)
    half = Half().double()
    nn.utils.parametrize.register_parametrization(layer.q, "weight", half)
    half.calls = 0
    with weight_gradient_scope():
        out = layer(x)
        assert half.calls == 1
        out.sum().backward()
    assert half.scale.grad is not None and layer.q.parametrizations.weight.original.grad is not None
    with torch.no_grad():
        plain = ParallelAttention(D, H, Mesh.single(), head_dim=K).double()
        plain.load_state_dict(
            {"q.weight": layer.q.weight, "kv.weight": layer.kv.weight, "out.weight": layer.out.weight}
        )
        assert_close(plain(x), out)


def replaced_input(tp: int) -> None:
    """A hook that gives one of two layers another input; nothing of the product that was not used comes back."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    layers = [ColumnParallelLinear(D, 4, mesh, bias=True).double() for _ in range(2)]
    x = randn(B, S, D)
    x[0, 0, 0] = torch.inf
    layers[0].register_forward_pre_hook(lambda module, given: torch.nan_to_num(given[0], posinf=1.0))
    first, _ = column_parallel(x, *layers)
    first.sum().backward()
    gradient = layers[0].weight.grad
    assert gradient is not None and gradient.isfinite().all() and first.isfinite().all()
    assert layers[1].weight.grad is None or not layers[1].weight.grad.any()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_hook_may_give_a_projection_another_input(tp: int) -> None:
    run_ranks(replaced_input, tp, tp)


def test_what_runs_the_built_in_functions() -> None:
    mesh = Mesh.single()
    linear, lora = ColumnParallelLinear(D, D, mesh), Lora(D, (H, K), mesh)
    assert runs_built_in(linear, "forward") and not runs_built_in(lora, "forward")
    assert not method_is_built_in(linear, "attend")
    linear.forward = ColumnParallelLinear(D, D, mesh).forward
    assert not runs_built_in(linear, "forward")
    del linear.forward
    linear._compiled_call_impl = linear._call_impl  # as linear.compile() leaves it
    assert not runs_built_in(linear, "forward")
    assert not has_forward_hooks(linear)
