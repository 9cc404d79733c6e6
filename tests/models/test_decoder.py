"""The decoder on one rank: against plain Llama and GPT-2, in slices, and with dropout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megastack.batch import StageLoss
from megastack.layers import attention_spec
from megastack.mesh.mesh import Mesh
from megastack.models.decoder import Decoder
from megastack.placement.module import placements_of
from tests.models.model_cases import GPT2, LLAMA, QWEN, build, microbatch, tiny
from tests.models.plain_models import gpt2_logits, llama_logits, loss_sums

CASES = {
    "llama": (LLAMA, llama_logits),
    "llama_mha_tied": (LLAMA | {"kv_groups": None, "tied": True}, llama_logits),
    "llama_mqa": (LLAMA | {"kv_groups": 1}, llama_logits),
    "qwen": (QWEN, llama_logits),
    "gpt2": (GPT2, gpt2_logits),
}


@pytest.fixture(autouse=True)
def _no_side_effects():
    state = torch.get_rng_state()
    yield
    assert torch.equal(state, torch.get_rng_state()), "the model drew from torch's generator"


def perturb(decoder: Decoder) -> None:
    """Move norms and biases off 1 and 0, so that wrong uses of them show."""
    generator = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if parameter.dim() == 1 or parameter.detach().abs().max() == 0:
            parameter.detach().add_(noise, alpha=0.1)


@pytest.mark.parametrize("documents", ["none", "dense mask", "offsets"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_all_gradients_equal_a_plain_implementation(monkeypatch, name, documents):
    monkeypatch.setattr(attention_spec, "DENSE_BELOW", 0 if documents == "offsets" else 10**9)
    model, logits_of = CASES[name]
    config = tiny(model, label_smoothing=0.1, z_loss=0.01)
    decoder = build(config, Mesh.single())
    perturb(decoder)
    batch = microbatch(documents=documents != "none")
    loss = decoder({}, batch)
    loss.objective.backward()

    weights = {name: p.detach().clone().requires_grad_() for name, p in decoder.named_parameters()}
    real = {name: w[:37] if name in ("embedding.weight", "head.weight") else w for name, w in weights.items()}
    logits = logits_of(real, 2, batch.tokens_BS, batch.positions_BS, batch.documents_BS)
    cross_entropy, z = loss_sums(logits, batch.labels_BS, label_smoothing=0.1, z_loss=0.01)
    (cross_entropy + z).backward()

    torch.testing.assert_close(loss.report, cross_entropy.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(loss.objective.detach(), (cross_entropy + z).detach(), rtol=1e-10, atol=0)
    assert not loss.report.requires_grad
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-10, msg=name)


def test_validation_has_neither_smoothing_nor_dropout():
    config = tiny(LLAMA | {"dropout": 0.5, "attention_dropout": 0.5}, label_smoothing=0.3)
    plain = build(tiny(LLAMA), Mesh.single())({}, microbatch())
    assert torch.equal(build(config, Mesh.single()).eval()({}, microbatch()).report, plain.report)


def test_names_are_global_and_every_parameter_has_a_placement():
    decoder = build(tiny(LLAMA | {"layers": 5}), Mesh.single(), layers=range(3, 5))
    expected = ["attention_norm.weight", "attention.q.weight", "attention.kv.weight", "attention.out.weight"]
    expected += ["mlp_norm.weight", "mlp.up.weight", "mlp.down.weight"]
    names = [f"blocks.{layer}.{name}" for layer in (3, 4) for name in expected] + ["norm.weight", "head.weight"]
    assert list(placements_of(decoder)) == names


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("cuts", [(0, 0, 1, 2), (0, 1, 1, 2), (0, 2)], ids=str)
def test_stages_in_a_row_equal_the_whole_model(model, cuts):
    config = tiny(model)
    whole = build(config, Mesh.single())
    whole({}, microbatch(documents=True)).objective.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}

    last = len(cuts) - 2
    slices = [(range(a, b), i == 0, i == last) for i, (a, b) in enumerate(pairwise(cuts))]
    stages = [build(config, Mesh.single(), layers=r, embedding=e, head=h) for r, e, h in slices]
    outputs = {}
    for stage in stages:
        outputs = stage(outputs, microbatch(documents=True))
    assert isinstance(outputs, StageLoss)
    outputs.objective.backward()
    found = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            found[name] = found.get(name, 0) + parameter.grad
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)


def test_a_tied_projection_without_the_embedding_has_the_embeddings_name_and_values():
    config = tiny(GPT2)
    first = build(config, Mesh.single(), layers=range(1))
    last = build(config, Mesh.single(), layers=range(1, 2))
    assert "embedding.weight" in dict(last.named_parameters())
    assert not any("head" in name or "positions" in name for name, _ in last.named_parameters())
    assert torch.equal(first.embedding.weight, last.embedding.weight)

    last.share_embedding(first)
    assert last.embedding.weight is first.embedding.weight
    last(first({}, microbatch()), microbatch()).objective.backward()
    whole = build(config, Mesh.single())
    whole({}, microbatch()).objective.backward()
    torch.testing.assert_close(first.embedding.weight.grad, whole.embedding.weight.grad, rtol=1e-12, atol=1e-12)


def test_initial_values_are_smaller_where_layers_add_to_the_residual_stream():
    model = LLAMA | {"hidden": 64, "ffn": 128, "layers": 8, "init_std": 0.02}
    block = build(tiny(model), Mesh.single()).blocks["3"]
    flat = build(tiny(model | {"depth_scaled_init": False}), Mesh.single()).blocks["3"]
    for part in ("attention.out", "mlp.down"):
        assert block.get_submodule(part).weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        assert flat.get_submodule(part).weight.std().item() == pytest.approx(0.02, rel=0.05)
    for part in ("attention.q", "attention.kv", "mlp.up"):
        assert block.get_submodule(part).weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_decoder_has_no_buffers_and_computes_its_tables_after_building_on_meta():
    decoder = build(tiny(LLAMA), Mesh.single())
    assert not list(decoder.buffers())
    logits = decoder.logits({}, microbatch())
    weights = {name: p[:37] if "embedding" in name or "head" in name else p for name, p in decoder.named_parameters()}
    batch = microbatch()
    expected = llama_logits(weights, 2, batch.tokens_BS, batch.positions_BS, None)
    torch.testing.assert_close(logits[..., :37], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_token_of_one_document_changes_nothing_in_another(model):
    decoder, batch = build(tiny(model), Mesh.single()), microbatch(documents=True)
    tokens = batch.tokens_BS.clone()
    tokens[0, 2] = (tokens[0, 2] + 1) % 37
    before, after = decoder.logits({}, batch), decoder.logits({}, replace(batch, tokens_BS=tokens))
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert torch.equal(before[0, :2], after[0, :2])
    assert not torch.equal(before[0, 2:5], after[0, 2:5])


def test_a_packed_document_scores_as_it_does_alone():
    decoder, batch = build(tiny(LLAMA), Mesh.single()), microbatch(documents=True)
    packed = decoder.logits({}, batch)
    for part in (slice(0, 5), slice(5, 8)):
        alone = replace(
            batch,
            tokens_BS=batch.tokens_BS[:1, part],
            labels_BS=batch.labels_BS[:1, part],
            positions_BS=batch.positions_BS[:1, part],
            documents_BS=None,
            samples_B=batch.samples_B[:1],
        )
        torch.testing.assert_close(packed[:1, part], decoder.logits({}, alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_dropout_depends_on_step_sample_and_seed_and_on_nothing_else(kind):
    config = tiny(LLAMA | {kind: 0.2})
    decoder, batch = build(config, Mesh.single()), microbatch()
    loss = decoder({}, batch).report
    assert torch.equal(loss, decoder({}, batch).report)
    assert not torch.equal(loss, decoder.eval()({}, batch).report)
    decoder.train()
    for other in (replace(batch, step=6), replace(batch, samples_B=batch.samples_B + 1)):
        assert not torch.equal(loss, decoder({}, other).report)
    decoder.config = replace(config, seed=4)
    assert not torch.equal(loss, decoder({}, batch).report)


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_a_sample_has_the_same_mask_in_any_microbatch(kind):
    decoder, batch = build(tiny(LLAMA | {kind: 0.2}), Mesh.single()), microbatch(documents=True)
    second = replace(
        batch,
        tokens_BS=batch.tokens_BS[1:],
        labels_BS=batch.labels_BS[1:],
        positions_BS=batch.positions_BS[1:],
        documents_BS=batch.documents_BS[1:],
        samples_B=batch.samples_B[1:],
    )
    torch.testing.assert_close(decoder.logits({}, batch)[1:], decoder.logits({}, second), rtol=1e-12, atol=1e-12)


def test_a_decoder_names_the_kernel_of_its_attention():
    decoder = build(tiny(LLAMA), Mesh.single())
    assert str(decoder.attention_kernel(1, 4096, documents=True)) == "fused CPU kernel, one call for each document"
    assert str(decoder.attention_kernel(1, 8, documents=True)) == "fused CPU kernel"
    dropping = build(tiny(LLAMA | {"attention_dropout": 0.1}), Mesh.single())
    assert "unfused attention (model.attention_dropout" in str(dropping.attention_kernel(1, 8, documents=True))
