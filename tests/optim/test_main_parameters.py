"""The fp32 main parameters of low-precision parameters."""

import pytest
import torch
from torch import Tensor

from megastack.gradients.buckets import GradientBuckets
from megastack.mesh.mesh import Mesh
from megastack.optim.main_parameters import Arrival
from megastack.optim.optimizer import Optimizer, build_optimizer
from megastack.optim.update_rules import OptimizerOptions, rule_of
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement


class One(ParallelModule):
    """A single weight of one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(Mesh.single())
        self.create_parameters()
        self.to(dtype)

    def placements(self) -> dict[str, Placement]:
        return {"weight": Placement((2,), init=Ones())}


def build(dtype: torch.dtype, name: str = "sgd") -> tuple[One, GradientBuckets, Optimizer]:
    model = One(dtype)
    buckets = GradientBuckets([model], model.mesh)
    return model, buckets, build_optimizer(buckets, OptimizerOptions(name))


def main(optimizer: Optimizer) -> Tensor:
    ((_, part),) = optimizer.main_parameters()["weight"]
    return part


def train(buckets: GradientBuckets, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        for _, gradient in buckets.named_gradients():
            gradient.fill_(1.0)
        optimizer.step(1e-3)


def test_small_updates_accumulate_in_the_main_parameters_and_show_in_the_weight() -> None:
    assert torch.tensor(1.0, dtype=torch.bfloat16) - 1e-3 == 1.0
    model, buckets, optimizer = build(torch.bfloat16)
    train(buckets, optimizer, 10)
    torch.testing.assert_close(main(optimizer), torch.full((2,), 0.99))
    assert model.weight.dtype == torch.bfloat16 and (model.weight == 0.98828125).all()


def test_main_parameters_are_loaded_by_name_bitwise_and_copied_from_weights() -> None:
    model, buckets, optimizer = build(torch.bfloat16)
    main(optimizer).fill_(0.1234567)
    optimizer.copy_main_to_model()
    assert (model.weight == torch.tensor(0.1234567, dtype=torch.bfloat16)).all()
    assert (main(optimizer) == torch.tensor(0.1234567)).all()
    with torch.no_grad():
        model.weight.fill_(3.0)
    optimizer.copy_model_to_main()
    train(buckets, optimizer, 1)
    assert (main(optimizer) == torch.tensor(3.0) - 1e-3).all()


def test_full_precision_parameters_are_their_own_main_parameters() -> None:
    for dtype in (torch.float32, torch.float64):
        model, buckets, optimizer = build(dtype, "adamw")
        assert optimizer.main_parameters() == {}
        train(buckets, optimizer, 1)
        assert model.weight.dtype == optimizer.moments()["exp_avg"]["weight"][0][1].dtype == dtype
        assert (model.weight < 1).all()


def test_gradients_may_be_reduced_in_another_dtype_than_the_weights() -> None:
    model = One(torch.float32)
    buckets = GradientBuckets([model], model.mesh, reduce_dtype=torch.float64)
    (model.weight.sum() * 3.0).backward()
    buckets.finish()
    assert dict(buckets.named_gradients())["weight"].tolist() == [3.0, 3.0]
    assert buckets.buckets[0].gradients.dtype == torch.float64
    build_optimizer(buckets, OptimizerOptions("sgd")).step(0.5)
    assert model.weight.tolist() == [-0.5, -0.5]


class Stream:
    """Host memory whose copies run when they are waited for, as late as an asynchronous device could run them."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.full((numel,), torch.nan, dtype=dtype)

    def start_copy(self, target: Tensor, source: Tensor) -> Arrival:
        self.order.append("start")
        return _Late(self.order, target, source)


class _Late:
    def __init__(self, order: list[str], target: Tensor, source: Tensor) -> None:
        self.order, self.target, self.source = order, target, source

    def synchronize(self) -> None:
        self.order.append("wait")
        self.target.copy_(self.source)


class Several(One):
    """Three weights."""

    def placements(self) -> dict[str, Placement]:
        return {name: Placement((3,), init=Ones(), decay=name != "b") for name in "abc"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_offloaded_parameters_are_updated_like_others_one_bucket_at_a_time(dtype: torch.dtype, name: str) -> None:
    options = OptimizerOptions(name, weight_decay=0.1)
    models = [Several(dtype), Several(dtype)]
    here, offloaded = (GradientBuckets([model], model.mesh, bucket_size=1) for model in models)
    memory = Stream()
    optimizers = [
        build_optimizer(here, options),
        Optimizer(offloaded, rule_of(options), options.weight_decay, offload_to=memory),
    ]
    for step in range(3):
        for buckets, optimizer in zip((here, offloaded), optimizers, strict=True):
            for weight, (_, gradient) in enumerate(buckets.named_gradients()):
                gradient.fill_(1.0 + weight + step)
            skip = torch.tensor(float(step == 1))
            optimizer.step(0.1, found_inf=skip, grad_scale=torch.tensor(3.0, dtype=torch.float64))
    for own, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(own, other) and (own != 1).all()
    assert memory.order == 3 * (3 * ["start"] + 3 * ["wait"])
    for kind, named in optimizers[0].moments().items():
        for weight, ((_, part),) in named.items():
            assert torch.equal(part, optimizers[1].moments()[kind][weight][0][1])
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.fill_(5.0)
    optimizers[1].copy_model_to_main()
    assert all((part == 5).all() for main in optimizers[1].main_parameters().values() for _, part in main)
