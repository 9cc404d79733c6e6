"""Negative controls: a host read or a CPU tensor in any layer of a step fails its dry run with the layer's name."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastack.dryrun.device import DryRunError
from megastack.dryrun.host_reads import ALLOWED_READS, PACKAGE
from megastack.dryrun.run import DryRank, rank_alone
from tests.dryrun.cases import small

LAYERS = ("blocks.0", "blocks.0.attention", "blocks.0.mlp", "embedding", "head", "norm")


def _branch(x: Tensor) -> None:
    if x.sum() > 0:
        pass


READS: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda x: float(x.sum()),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.flatten()[:2].tolist(),
    "if": _branch,
    "nonzero": lambda x: x.nonzero(),
    "cpu": lambda x: x.cpu(),
}
MIXES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + torch.ones(x.shape[-1], dtype=x.dtype),
    "index": lambda x: torch.where(torch.ones(x.shape[-1], dtype=torch.bool), x, 0.0),
}


@pytest.fixture(scope="module")
def alone() -> Iterator[DryRank]:
    with rank_alone(small(), 0) as rank:
        yield rank


def planted(alone: DryRank, layer: str, fault: Callable[[Tensor], Any]) -> str:
    """The message of a step in which a layer has a fault in its forward."""
    module = alone.training.stages[0].get_submodule(layer)
    forward = module.forward

    def faulty(x: Tensor, *args: Any) -> Any:
        fault(x * 1.0)
        return forward(x, *args)

    module.forward = faulty  # type: ignore[method-assign]
    try:
        with pytest.raises(DryRunError) as caught:
            alone.step(0)
    finally:
        del module.forward
    return str(caught.value)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_fault_in_a_layer_is_an_error(layer: str, alone: DryRank) -> None:
    for fault, words in (
        (READS["float"], "the host reads a scalar"),
        (MIXES["add"], "of the device meet"),
    ):
        message = planted(alone, layer, fault)
        assert message.startswith(f"{layer} (") and words in message
        assert "test_controls.py" in message and "action 0F0" in message


@pytest.mark.parametrize("kind", [*READS, *MIXES])
def test_every_kind_of_fault_is_an_error(kind: str, alone: DryRank) -> None:
    message = planted(alone, "embedding", (READS | MIXES)[kind])
    assert message.startswith("embedding (") and ("the host" in message) == (kind in READS)


class _ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.sum())


def test_a_host_read_in_a_loss_and_in_a_backward_is_an_error(alone: DryRank) -> None:
    (stage,) = alone.training.stages
    loss, mlp = stage._loss, stage.get_submodule("blocks.0.mlp")
    stage._loss = lambda logits, labels: (float(logits.sum()), loss(logits, labels))[1]  # type: ignore[method-assign]
    with pytest.raises(DryRunError, match=r"test_controls.py.*head of action 0F0"):
        alone.step(0)
    del stage._loss
    forward = mlp.forward
    mlp.forward = lambda x, *more: _ReadsBackward.apply(forward(x, *more))  # type: ignore[method-assign]
    with pytest.raises(DryRunError, match=r"_ReadsBackward.backward, action 0B0"):
        alone.step(0)
    del mlp.forward
    alone.step(0)


def test_an_update_that_reads_is_an_error(alone: DryRank, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = alone.training.step.optimizer._rule
    monkeypatch.setattr(type(rule), "update", lambda self, values, *_, **__: values[0].sum().item())
    with pytest.raises(DryRunError, match=r"test_controls\.py:.*, optimizer: the host reads"):
        alone.step(0)


def test_each_allowed_place_exists() -> None:
    for read in ALLOWED_READS:
        defined = set[str]()
        for node in ast.walk(ast.parse((PACKAGE / read.file).read_text())):
            if isinstance(node, ast.ClassDef):
                defined |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
            elif isinstance(node, ast.FunctionDef):
                defined.add(node.name)
        assert read.function in defined, read


def test_tensors_of_the_cpu_are_real(alone: DryRank) -> None:
    assert int(torch.arange(4).sum()) == 6 and nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
