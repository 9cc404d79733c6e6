"""The optimizer over flat buckets equals torch's own over single parameters, and all ranks skip a step together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megastack.errors import ConfigError
from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.norm import clip_divisor, clip_gradients_, is_nonfinite
from megastack.gradients.parameter_groups import GroupRule, assign_groups
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.optim.optimizer import Optimizer, build_optimizer
from megastack.optim.update_rules import OptimizerOptions
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement, Shard
from megastack.testing.ranks import run_ranks

SHAPES = {"a.weight": (3, 5), "b.weight": (7,), "norm.weight": (5,), "c.weight": (2, 2)}
SGD = OptimizerOptions("sgd", momentum=0.9)
ADAMW = OptimizerOptions("adamw", betas=(0.9, 0.95), eps=1e-8)


class Bag(ParallelModule):
    """Parameters without a layer, whose gradients are written by hand."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.float64, **placements: Placement) -> None:
        super().__init__(mesh)
        self.declared = placements
        self.create_parameters()
        self.to(dtype)

    def placements(self) -> dict[str, Placement]:
        return self.declared


class Model(ParallelModule):
    """Parameters under dotted names, as a model has them."""

    def __init__(self) -> None:
        super().__init__(Mesh.single())
        torch.manual_seed(3)
        for name, shape in SHAPES.items():
            child = torch.nn.Module()
            child.weight = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
            self.add_module(name.split(".")[0], child)

    def placements(self) -> dict[str, Placement]:
        return {name: Placement(shape, decay=name != "norm.weight") for name, shape in SHAPES.items()}


def write(buckets: GradientBuckets, step: int) -> dict[str, Tensor]:
    """Gradients of some step, the same for every optimizer."""
    generator = torch.Generator().manual_seed(step)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    for name, gradient in buckets.named_gradients():
        gradient.copy_(values[name])
    return values


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moments(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """The moments by name without ZeRO: one box is the whole parameter."""
    return {kind: {name: part for name, ((_, part),) in named.items()} for kind, named in optimizer.moments().items()}


def build(options: OptimizerOptions) -> tuple[Model, GradientBuckets, Optimizer]:
    model = Model()
    rules = [GroupRule("^c", lr_scale=0.5, weight_decay=0.3)]
    decays = {name: placement.decay for name, placement in model.placements().items()}
    groups = assign_groups(decays, weight_decay=0.1, no_decay=["^b"], rules=rules)
    buckets = GradientBuckets([model], model.mesh, groups=groups)
    return model, buckets, build_optimizer(buckets, options)


def reference(options: OptimizerOptions) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    """torch's plain optimizer, one parameter at a time, with the groups written out by hand."""
    single = {name: torch.nn.Parameter(value) for name, value in parameters(Model()).items()}
    decay = {"a.weight": 0.1, "b.weight": 0.0, "norm.weight": 0.0, "c.weight": 0.3}
    groups = [
        {"params": [p], "weight_decay": decay[n], "scale": 0.5 if n[0] == "c" else 1.0} for n, p in single.items()
    ]
    if options.name == "sgd":
        return single, torch.optim.SGD(groups, lr=0.0, momentum=options.momentum, foreach=False)
    return single, torch.optim.AdamW(groups, lr=0.0, betas=options.betas, eps=options.eps, foreach=False)


@pytest.mark.parametrize("options", [ADAMW, SGD, OptimizerOptions("sgd")])
def test_updates_equal_torch_on_single_parameters(options: OptimizerOptions) -> None:
    model, buckets, optimizer = build(options)
    single, plain = reference(options)
    for step in range(6):
        lr = 0.1 / (step + 1)
        for name, value in write(buckets, step).items():
            single[name].grad = value
        for group in plain.param_groups:
            group["lr"] = lr * group["scale"]
        plain.step()
        optimizer.step(lr)
        for name, value in parameters(model).items():
            torch.testing.assert_close(value, single[name].detach(), rtol=1e-13, atol=1e-14)
    for kind, views in moments(optimizer).items():
        for name, view in views.items():
            torch.testing.assert_close(view, plain.state[single[name]][kind], rtol=1e-13, atol=1e-15)
    assert optimizer.steps.item() == 6


@pytest.mark.parametrize("options", [ADAMW, SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_update_divides_gradients_as_clipping_does(options: OptimizerOptions, dtype: torch.dtype) -> None:
    """The divisor has no exact fp32 value; fp64 gradients are divided in fp64."""
    bags = [Bag(Mesh.single(), dtype, a=Placement((6,)), b=Placement((3,), decay=False)) for _ in range(2)]
    clipped, scaled = (GradientBuckets([bag], bag.mesh) for bag in bags)
    optimizers = [build_optimizer(clipped, options), build_optimizer(scaled, options)]
    for step in range(3):
        for buckets in (clipped, scaled):
            for _, gradient in buckets.named_gradients():
                gradient.copy_(torch.arange(len(gradient)) + step + 1.0)
        norm = clip_gradients_(clipped, 0.3, clipped.mesh)
        optimizers[0].step(0.1)
        optimizers[1].step(0.1, grad_scale=clip_divisor(norm, 0.3))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    pairs = [*zip(*(bag.parameters() for bag in bags), strict=True)]
    pairs += [(x, y) for (_, x), (_, y) in zip(clipped.named_gradients(), scaled.named_gradients(), strict=True)]
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("options", [ADAMW, SGD])
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_skipped_step_leaves_no_trace(options: OptimizerOptions, skipped: int) -> None:
    model, buckets, optimizer = build(options)
    other, other_buckets, straight = build(options)
    for step in range(4):
        write(buckets, step)
        if step == skipped:
            buckets.buckets[0].gradients[0] = math.nan
        else:
            write(other_buckets, step)
            straight.step(0.1)
        optimizer.step(0.1, found_inf=is_nonfinite(clip_gradients_(buckets, None, model.mesh)))
    assert all(torch.equal(value, parameters(other)[name]) for name, value in parameters(model).items())
    for kind, views in moments(optimizer).items():
        assert all(torch.equal(view, moments(straight)[kind][name]) for name, view in views.items())
    assert optimizer.steps.item() == straight.steps.item() == 3


@pytest.mark.parametrize("options", [ADAMW, SGD])
def test_moments_and_count_move_to_another_optimizer_by_name(options: OptimizerOptions) -> None:
    model, buckets, optimizer = build(options)
    for step in range(3):
        write(buckets, step)
        optimizer.step(0.1)
    other = Model()
    other.load_state_dict(model.state_dict())
    decays = {name: placement.decay for name, placement in other.placements().items()}
    groups = assign_groups(decays, weight_decay=0.1, no_decay=["^b"], rules=[GroupRule("^c", 0.5, 0.3)])
    small = GradientBuckets([other], other.mesh, groups=groups, bucket_size=1)
    resumed = build_optimizer(small, options)
    for kind, views in moments(resumed).items():
        for name, view in views.items():
            view.copy_(moments(optimizer)[kind][name])
    resumed.load_steps(int(optimizer.steps))
    for each, kept in ((optimizer, buckets), (resumed, small)):
        write(kept, 3)
        each.step(0.05)
    assert all(torch.equal(value, parameters(other)[name]) for name, value in parameters(model).items())


def test_moments_are_shaped_and_named_as_the_parameters() -> None:
    for options, kinds in (
        (ADAMW, {"exp_avg", "exp_avg_sq"}),
        (SGD, {"momentum_buffer"}),
        (OptimizerOptions("sgd"), set()),
    ):
        found = moments(build(options)[2])
        assert set(found) == kinds
        for views in found.values():
            assert {name: tuple(view.shape) for name, view in views.items()} == SHAPES


def test_without_groups_decay_follows_the_placement() -> None:
    model = Model()
    before = parameters(model)
    buckets = GradientBuckets([model], model.mesh)
    build_optimizer(buckets, OptimizerOptions("sgd", weight_decay=0.5)).step(1.0)
    moved = {name for name, value in parameters(model).items() if not torch.equal(value, before[name])}
    assert moved == set(SHAPES) - {"norm.weight"}


def test_an_unknown_optimizer_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optim.name=adam: .* use adamw or sgd"):
        build_optimizer(GradientBuckets([], Mesh.single()), OptimizerOptions("adam"))


def test_a_rank_without_parameters_counts_steps() -> None:
    optimizer = build_optimizer(GradientBuckets([], Mesh.single()), ADAMW)
    optimizer.step(0.1)
    optimizer.step(0.1, found_inf=torch.ones(()))
    assert optimizer.steps.item() == 1 and moments(optimizer) == {}


def nan_on_one_rank(inject: bool) -> tuple[list[float], int, list[float]]:
    """Three steps on dp 2 × tp 2; before the reduction of the second, rank 3 holds a NaN in a replicated parameter."""
    mesh = Mesh.from_environment(MeshShape(dp=2, tp=2))
    bag = Bag(mesh, whole=Placement((4,), init=Ones()), cut=Placement((4,), {Axis.TP: Shard(0)}, init=Ones()))
    buckets = GradientBuckets([bag], mesh)
    optimizer = build_optimizer(buckets, ADAMW)
    skips = []
    for step in range(3):
        if step == 1 and not inject:
            continue
        for name, gradient in buckets.named_gradients():
            gradient.fill_(0.1 * (step + 1) + (name == "cut") * mesh.coordinates[Axis.TP])
        if step == 1 and mesh.rank == 3:
            dict(buckets.named_gradients())["whole"][0] = math.nan
        buckets.finish()
        found_inf = is_nonfinite(clip_gradients_(buckets, 1.0, mesh))
        optimizer.step(0.1, found_inf=found_inf)
        skips.append(found_inf.item())
        buckets.zero_()
    values = torch.cat([parameter.detach() for parameter in bag.parameters()]).tolist()
    return values, int(optimizer.steps), skips


def test_a_nan_on_one_rank_makes_all_ranks_skip_only_that_step() -> None:
    poisoned = run_ranks(nan_on_one_rank, 4, True)
    clean = run_ranks(nan_on_one_rank, 4, False)
    assert [values for values, _, _ in poisoned] == [values for values, _, _ in clean]
    assert {(steps, *skips) for _, steps, skips in poisoned} == {(2, 0.0, 1.0, 0.0)}


LATE = {"b.weight": 3, "c.weight": 3}


@pytest.mark.parametrize("options", [ADAMW, SGD])
@pytest.mark.parametrize("skipped", [None, 4])
def test_parameters_that_join_later_are_updated_as_by_a_fresh_optimizer(
    options: OptimizerOptions, skipped: int | None
) -> None:
    model, buckets, optimizer = build(options)
    single, plain = reference(options)
    held = {name: parameters(model)[name] for name in LATE}
    for step in range(6):
        if step == 3:
            for name, value in held.items():
                model.get_parameter(name).data.copy_(value)
            optimizer.load_steps(3, LATE)
        for name, value in write(buckets, step).items():
            single[name].grad = value if step >= LATE.get(name, 0) else None
        for group in plain.param_groups:
            group["lr"] = 0.1 * group["scale"]
        if step == skipped:
            optimizer.step(0.1, found_inf=torch.ones(()))
            continue
        plain.step()
        optimizer.step(0.1)
    for name, value in parameters(model).items():
        torch.testing.assert_close(value, single[name].detach(), rtol=1e-13, atol=1e-14)
    assert optimizer.steps.item() == 6 - (skipped is not None)


def test_a_shard_is_split_into_segments_where_starts_differ() -> None:
    def parts(starts: dict[str, int]) -> list[tuple[int, int, float]]:
        bag = Bag(
            Mesh.single(), **{name: Placement((size,)) for name, size in (("a", 5), ("b", 3), ("c", 0), ("d", 4))}
        )
        optimizer = build_optimizer(GradientBuckets([bag], bag.mesh), ADAMW)
        optimizer.load_steps(7, starts)
        (segments,) = optimizer._segments
        return [(s.part.start, s.part.stop, float(s.state["step"])) for s in segments]

    assert parts({}) == [(0, 14, 7.0)]  # parameters begin at even places: d, c, b, a
    assert parts({"c": 3, "elsewhere": 2}) == [(0, 14, 7.0)]
    assert parts({"b": 3}) == [(0, 4, 7.0), (4, 8, 4.0), (8, 14, 7.0)]
    assert parts({"b": 3, "a": 3}) == [(0, 4, 7.0), (4, 14, 4.0)]
    assert parts({"d": 7}) == [(0, 4, 0.0), (4, 14, 7.0)]
