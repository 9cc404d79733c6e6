"""The vocabulary-parallel loss against torch's cross-entropy: values, gradients, padding, smoothing, ignored labels."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.errors import PlacementError
from megastack.layers.loss import IGNORED, vocab_parallel_cross_entropy, vocab_parallel_losses
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.ranks import run_ranks
from tests.layers.layer_parity import assert_close, piece, randn
from tests.models.test_activations import Live

B, S = 2, 4
LABELS = torch.tensor([[0, 4, IGNORED, 2], [1, 3, 4, IGNORED]])


def reference(logits: Tensor, labels: Tensor, vocab: int, label_smoothing: float, z_loss: float) -> Tensor:
    """Cross-entropy and z-loss by plain torch, on the real columns."""
    real = logits[..., :vocab].flatten(0, 1)
    loss = F.cross_entropy(real, labels.flatten(), reduction="sum", label_smoothing=label_smoothing)
    return loss + z_loss * real.logsumexp(-1)[labels.flatten() != IGNORED].square().sum()


def parity(tp: int, width: int, vocab: int, options: dict[str, float]) -> float:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    logits = (3 * randn(B, S, width)).requires_grad_()
    expected = reference(logits, LABELS, vocab, **options)
    (2.5 * expected).backward()
    local = piece(logits, mesh, 2)
    loss, tokens = vocab_parallel_cross_entropy(local, LABELS, mesh, vocab=vocab, **options)
    assert_close(loss, expected)
    assert (tokens.item(), tokens.dtype) == (6, torch.int64)
    (2.5 * loss).backward()
    assert_close(local.grad, piece(logits.grad, mesh, 2))
    assert not local.grad[LABELS == IGNORED].any()
    return loss.item()


@pytest.mark.parametrize("options", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.3)])
@pytest.mark.parametrize(("tp", "width", "vocab"), [(1, 5, 5), (1, 8, 5), (2, 8, 8), (2, 8, 5), (3, 6, 5), (4, 8, 5)])
def test_loss_and_gradient_equal_plain_torch(tp: int, width: int, vocab: int, options: tuple[float, float]) -> None:
    """On four ranks of two columns and a vocabulary of five, the last rank holds padding alone."""
    named = {"label_smoothing": options[0], "z_loss": options[1]}
    losses = run_ranks(parity, tp, tp, width, vocab, named)
    assert len(set(losses)) == 1, "ranks disagree"


def loss_of(tp: int, logits: list[Any], labels: list[Any], options: dict[str, Any]) -> tuple[float, list[Any]]:
    """The loss and the whole gradient, for logits given as nested lists."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    local = piece(torch.tensor([logits], dtype=torch.float64), mesh, 2)
    loss, _ = vocab_parallel_cross_entropy(local, torch.tensor([labels]), mesh, **options)
    loss.backward()
    return loss.item(), local.grad[0].tolist()


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_label_smoothing_is_over_the_whole_vocabulary_on_every_rank(tp: int) -> None:
    logits = [[2, 0, -1, 1, 0.5, -2]]
    for smoothing, expected in ((0.1, 0.776364), (0.0, 0.584697)):
        options = {"vocab": 6, "label_smoothing": smoothing}
        for loss, _ in run_ranks(loss_of, tp, tp, logits, [0], options):
            assert loss == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize("tp", [1, 2])
def test_ignored_tokens_are_charged_no_smoothing(tp: int) -> None:
    options = {"vocab": 4, "label_smoothing": 0.2}
    logits = [[2, 0, -1, 1], [0, 3, 0, 0]]
    alone = run_ranks(loss_of, tp, tp, logits[:1], [0], options)
    for (loss, gradient), (loss_alone, gradient_alone) in zip(
        run_ranks(loss_of, tp, tp, logits, [0, IGNORED], options), alone, strict=True
    ):
        assert loss == pytest.approx(0.740190, abs=5e-7)
        assert loss == loss_alone
        assert gradient == [gradient_alone[0], [0.0] * (4 // tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padded_columns_are_not_part_of_the_softmax(tp: int) -> None:
    results = run_ranks(loss_of, tp, tp, [[0.0] * 8], [1], {"vocab": 5})
    assert all(loss == pytest.approx(math.log(5), abs=1e-12) for loss, _ in results)
    gradient = [value for _, rows in results for value in rows[0]]
    assert gradient[5:] == [0.0] * 3
    assert gradient[:5] == pytest.approx([0.2, -0.8, 0.2, 0.2, 0.2])


@pytest.mark.parametrize("tp", [1, 2])
def test_no_valid_token_is_a_zero_with_a_graph(tp: int) -> None:
    for loss, gradient in run_ranks(loss_of, tp, tp, [[1.0, 2, 3, 4]], [IGNORED], {"vocab": 4, "label_smoothing": 0.1}):
        assert loss == 0
        assert gradient == [[0.0] * (4 // tp)]


@pytest.mark.parametrize("tp", [1, 2])
def test_large_logits_do_not_overflow(tp: int) -> None:
    for loss, _ in run_ranks(loss_of, tp, tp, [[1000.0, 0, -1000, 999]], [3], {"vocab": 4}):
        assert loss == pytest.approx(1 + math.log1p(math.exp(-1)), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("scale", "shift"), [(1, 0), (30, 0), (1, 1e4), (1, -1e4), (1e4, 0)])
def test_the_loss_is_exact_to_the_last_places_of_the_largest_logit(dtype, scale, shift) -> None:
    """Rounding the log of the sum of exponentials is all that is lost; a far largest logit loses nothing."""
    logits = (scale * randn(B, S, 512) + shift).to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    labels = logits.detach().argmax(-1)
    loss, _ = vocab_parallel_cross_entropy(logits, labels, Mesh.single(), vocab=512)
    loss.backward()
    expected = reference(exact, labels, 512, 0, 0)
    expected.backward()
    top = logits.detach().logsumexp(-1).abs().max().item()
    unit = torch.finfo(dtype).eps * (top if scale < 1e4 else 1)
    assert abs(loss.item() - expected.item()) <= 1e-12 * (dtype == torch.float64) + B * S * unit
    assert (logits.grad - exact.grad).abs().max() <= 2 * unit


@pytest.mark.parametrize("tp", [1, 2])
def test_columns_ruled_out_by_infinity_are_not_part_of_the_softmax(tp: int) -> None:
    """On two ranks the first one's columns are all ruled out."""
    results = run_ranks(loss_of, tp, tp, [[-math.inf, -math.inf, 0, 1]], [2], {"vocab": 4})
    assert all(loss == pytest.approx(math.log(1 + math.e)) for loss, _ in results)
    gradient = [value for _, rows in results for value in rows[0]]
    assert gradient == pytest.approx([0, 0, -math.e / (1 + math.e), math.e / (1 + math.e)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_has_one_temporary_of_all_columns_and_backward_the_gradient(dtype: torch.dtype) -> None:
    logits = torch.randn(B, S, 4096).to(dtype).requires_grad_()
    wide = logits.numel() * 4
    with Live(logits, LABELS) as live:
        loss, _ = vocab_parallel_cross_entropy(logits, LABELS, Mesh.single(), vocab=4096)
        assert wide <= live.peak < 1.02 * wide
        loss.backward()
    assert live.peak < (1.02 if dtype == torch.float32 else 1.52) * wide


def low_precision(tp: int) -> tuple[torch.dtype, torch.dtype, float]:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    logits = (3 * randn(B, S, 512)).bfloat16()
    local = piece(logits, mesh, 2)
    loss, _ = vocab_parallel_cross_entropy(local, LABELS, mesh, vocab=512)
    loss.backward()
    return loss.dtype, local.grad.dtype, abs(loss.item() / reference(logits.double(), LABELS, 512, 0, 0).item() - 1)


def test_low_precision_logits_are_summed_in_fp32() -> None:
    for loss_dtype, grad_dtype, error in run_ranks(low_precision, 2, 2):
        assert (loss_dtype, grad_dtype) == (torch.float32, torch.bfloat16)
        assert error < 1e-6


def traffic(tp: int, smoothing: float) -> dict[tuple[str, str], tuple[int, int]]:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    logits = torch.randn(B, S, 8 // tp, requires_grad=True)
    loss, _ = vocab_parallel_cross_entropy(logits, LABELS, mesh, vocab=5, label_smoothing=smoothing)
    loss.backward()
    return {key: (traffic.calls, traffic.wire_bytes) for key, traffic in mesh.ledger.records().items()}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_small_gather_is_all_that_is_sent(tp: int) -> None:
    for smoothing, numbers in ((0.0, 2), (0.1, 3)):
        sent = {("tp", "all_gather"): (1, (tp - 1) * numbers * B * S * 4)} if tp > 1 else {}
        assert run_ranks(traffic, tp, tp, smoothing) == [sent] * tp


def test_the_logits_and_one_number_per_token_are_saved() -> None:
    logits = torch.randn(B, S, 512, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        vocab_parallel_cross_entropy(logits, LABELS, Mesh.single(), vocab=512, label_smoothing=0.1, z_loss=0.1)
    kept = [t for t in saved if t.data_ptr() not in (logits.data_ptr(), LABELS.data_ptr())]
    assert [t.numel() for t in kept] == [B * S]


def test_cross_entropy_and_z_loss_come_apart() -> None:
    logits = randn(B, S, 5).requires_grad_()
    cross_entropy, z = vocab_parallel_losses(logits, LABELS, Mesh.single(), vocab=5, z_loss=0.3)
    assert_close(cross_entropy, reference(logits, LABELS, 5, 0, 0))
    assert_close(cross_entropy + z, reference(logits, LABELS, 5, 0, 0.3))
    assert vocab_parallel_losses(logits, LABELS, Mesh.single(), vocab=5)[1] is None
    (gradient,) = torch.autograd.grad(z, logits)
    (expected,) = torch.autograd.grad(reference(logits, LABELS, 5, 0, 0.3) - reference(logits, LABELS, 5, 0, 0), logits)
    assert_close(gradient, expected)


def test_inconsistent_shapes_are_rejected() -> None:
    logits = torch.zeros(B, S, 4)
    with pytest.raises(PlacementError, match="labels"):
        vocab_parallel_cross_entropy(logits, LABELS[:, :2], Mesh.single(), vocab=4)
    with pytest.raises(PlacementError, match=r"vocab=5.*at most 4"):
        vocab_parallel_cross_entropy(logits, LABELS, Mesh.single(), vocab=5)
