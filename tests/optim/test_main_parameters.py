"""The fp32 main parameters of low-precision parameters."""

import torch
from torch import Tensor

from megastack.gradients.buckets import GradientBuckets
from megastack.mesh.mesh import Mesh
from megastack.optim.optimizer import Optimizer, build_optimizer
from megastack.optim.update_rules import OptimizerOptions
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
