"""A decoder that computes head and loss in chunks: against whole logits, its memory, and what turns chunks off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastack.batch import StageLoss
from megastack.config.schema import LossOptions, TrainConfig
from megastack.layers.embedding import VocabParallelHead
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.activations import activation_bytes
from megastack.models.decoder import Decoder
from megastack.testing.ranks import run_ranks
from megastack.weight_gradients import deferring, weight_gradient_scope
from tests.models.chunks import chunks_of
from tests.models.model_cases import GPT2, LLAMA, build, microbatch, tiny
from tests.models.test_activations import configured, held, until_w


def losses(config: TrainConfig, *, chunked: bool, change: Callable[[Decoder], object] = id) -> list[Tensor]:
    """Objective, report and gradients of a decoder, with chunks of five tokens or whole logits."""
    decoder = build(replace(config, loss=replace(config.loss, chunked=chunked)), Mesh.single())
    change(decoder)
    with chunks_of(5):
        loss = decoder({}, microbatch())
    loss.objective.backward()
    return [loss.objective.detach(), loss.report, *(p.grad for p in decoder.parameters())]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", [LLAMA, GPT2, LLAMA | {"tied": True}])
def test_chunks_equal_whole_logits(model: dict[str, Any], training: bool) -> None:
    config = tiny(model, label_smoothing=0.1, z_loss=0.01)
    found = [
        losses(config, chunked=chunked, change=lambda decoder: decoder.train(training)) for chunked in (True, False)
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_an_evaluation_has_the_loss_of_whole_logits() -> None:
    decoder = build(tiny(LLAMA), Mesh.single())
    whole = decoder({}, microbatch())
    with torch.no_grad(), chunks_of(5):
        found = decoder({}, microbatch())
    assert not found.objective.requires_grad
    assert found.report.item() == pytest.approx(whole.report.item(), abs=1e-12)


class OwnHead(VocabParallelHead):
    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return 2 * super().forward(hidden_BSD)


class OwnLoss(Decoder):
    def _loss(self, logits_BSV: Tensor, labels_BS: Tensor) -> StageLoss:
        return super()._loss(2 * logits_BSV, labels_BS)


class OwnLogits(Decoder):
    def _logits(self, hidden_BSD: Tensor) -> Tensor:
        return 2 * super()._logits(hidden_BSD)


def become(part: str, kind: type[nn.Module]) -> Callable[[Decoder], object]:
    def change(decoder: Decoder) -> None:
        decoder.get_submodule(part).__class__ = kind

    return change


CHANGES = {
    "head (OwnHead) overrides `forward`": become("head", OwnHead),
    "OwnLoss overrides `_loss`": become("", OwnLoss),
    "OwnLogits overrides `_logits`": become("", OwnLogits),
    "head (VocabParallelHead) has hooks": lambda decoder: decoder.head.register_forward_hook(lambda *args: 2 * args[2]),
}


@pytest.mark.parametrize("obstacle", CHANGES)
def test_an_override_or_hook_of_the_logits_is_respected_and_said_once(obstacle: str, caplog) -> None:
    """Each one doubles the logits."""
    with caplog.at_level(logging.WARNING, logger="megastack"):
        plain = losses(tiny(LLAMA), chunked=False)
        found, whole = (losses(tiny(LLAMA), chunked=chunked, change=CHANGES[obstacle]) for chunked in (True, False))
    assert all(map(torch.equal, found, whole))
    assert not torch.equal(found[0], plain[0])
    sentence = f"loss.chunked: the logits of all tokens are computed at once, because {obstacle}"
    assert [record.getMessage() for record in caplog.records] == [sentence]


def test_nothing_is_said_where_chunks_would_not_be_used(caplog) -> None:
    decoder = build(tiny(LLAMA), Mesh.single())
    assert decoder.chunking_obstacle is None
    become("head", OwnHead)(decoder)
    decoder({}, microbatch())
    assert decoder.chunking_obstacle == "head (OwnHead) overrides `forward`"
    assert not caplog.records


def stage_bytes(name: str, tp: int, sequence_parallel: bool) -> list[str]:
    """The memory of a whole model with chunks, in forward and from I to W, against the predicted bytes."""
    mesh = Mesh.from_environment(MeshShape(tp=tp)) if tp > 1 else Mesh.single()
    config = configured(name, tp=tp, sequence_parallel=sequence_parallel)
    part = {"layers": range(2), "embedding": True, "head": True}
    with chunks_of(5):
        found = held(config, mesh, **part)[0], *until_w(config, mesh)
        expected = activation_bytes(config, **part)
    whole = activation_bytes(replace(config, loss=LossOptions(chunked=False)), **part)
    assert expected.until_w < whole.until_w
    return [] if found == (expected.saved, expected.until_w, expected.until_w) else [f"{found}, not {expected}"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_holds_the_predicted_bytes(name: str) -> None:
    assert not stage_bytes(name, 1, True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_holds_the_predicted_bytes_on_tensor_parallel_ranks(sequence_parallel: bool) -> None:
    assert run_ranks(stage_bytes, 2, "llama", 2, sequence_parallel) == [[], []]


def test_a_tied_weight_gets_the_heads_gradient_in_i_and_the_embeddings_in_w() -> None:
    config = tiny(LLAMA | {"tied": True})
    expected = losses(config, chunked=False)[2:]
    decoder = build(config, Mesh.single())
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with weight_gradient_scope(), chunks_of(5):
        loss = decoder({}, microbatch())
        with deferring() as deferred:
            loss.objective.backward()
        before = decoder.embedding.weight.grad.clone()
        deferred.accumulate()
    assert before.any()
    assert not torch.equal(before, decoder.embedding.weight.grad)
    for one, other in zip((p.grad for p in decoder.parameters()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
