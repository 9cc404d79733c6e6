"""Head and loss in chunks of tokens against the loss of all logits: values, gradients, memory, traffic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megastack.errors import PlacementError
from megastack.layers.chunked_loss import chunked_head_loss
from megastack.layers.embedding import VocabParallelHead
from megastack.layers.loss import IGNORED, vocab_parallel_losses
from megastack.layers.vocabulary_spec import HeadSpec
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.ranks import run_ranks
from megastack.weight_gradients import AccumulationHook, deferring, weight_gradient_scope
from tests.layers.layer_parity import assert_close, piece, randn
from tests.models.test_activations import Live

B, S, D, V = 2, 4, 6, 5
LABELS = torch.tensor([[0, 4, IGNORED, 2], [1, 3, 4, IGNORED]])
OPTIONS = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.3)]


def named(options: tuple[float, float]) -> dict[str, float]:
    return {"label_smoothing": options[0], "z_loss": options[1]}


def whole(
    x: Tensor, weight: Tensor, labels: Tensor, mesh: Mesh, sequence_parallel: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    """The objective and the cross-entropy of the logits of all tokens."""
    head = VocabParallelHead(V, D, mesh, vocab_multiple=8, sequence_parallel=sequence_parallel, weight=weight)
    cross_entropy, z = vocab_parallel_losses(head(x), labels, mesh, vocab=V, **options)
    return cross_entropy if z is None else cross_entropy + z, cross_entropy


def compare(
    mesh: Mesh, sequence_parallel: bool, chunk: int, options: tuple[float, float], labels: Tensor = LABELS
) -> None:
    """Loss and gradients of both forms, for logits with large and small entries."""
    found = []
    for chunked in (False, True):
        x = piece(3 * randn(B, S, D), mesh, 1) if sequence_parallel else (3 * randn(B, S, D)).requires_grad_()
        padded = torch.cat([randn(V, D, seed=1), torch.zeros(8 - V, D, dtype=torch.float64)])
        weight = nn.Parameter(piece(padded, mesh, 0).detach())
        if chunked:
            more = {"chunk": chunk, "sequence_parallel": sequence_parallel, **named(options)}
            objective, report = chunked_head_loss(x, weight, labels, mesh, vocab=V, **more)
            assert not report.requires_grad
        else:
            objective, report = whole(x, weight, labels, mesh, sequence_parallel, **named(options))
        (2.5 * objective).backward()
        found.append((objective, report, x.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 8, 100])
def test_chunks_of_any_size_equal_the_logits_of_all_tokens(chunk: int, options: tuple[float, float]) -> None:
    compare(Mesh.single(), False, chunk, options)
    few = torch.full_like(LABELS, IGNORED)
    compare(Mesh.single(), False, chunk, options, few)
    few[1, 2] = 3
    compare(Mesh.single(), False, chunk, options, few)


def compare_on_ranks(tp: int) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    for sequence_parallel in (False, True):
        for chunk, options in ((3, (0.2, 0.3)), (8, (0.0, 0.0)), (1, (0.0, 0.3)), (5, (0.1, 0.0))):
            compare(mesh, sequence_parallel, chunk, options)


@pytest.mark.parametrize("tp", [2, 4])
def test_chunks_equal_the_logits_of_all_tokens_on_tensor_parallel_ranks(tp: int) -> None:
    """On four ranks of two columns and a vocabulary of five, the last rank holds padding alone."""
    run_ranks(compare_on_ranks, tp, tp)


def test_one_token_and_none() -> None:
    weight = randn(V, D).requires_grad_()
    for tokens in (0, 1):
        x, labels = randn(1, tokens, D).requires_grad_(), torch.full((1, tokens), 2)
        objective, _ = chunked_head_loss(x, weight, labels, Mesh.single(), vocab=V, chunk=2)
        expected = torch.nn.functional.cross_entropy(x[0] @ weight.T, labels[0], reduction="sum")
        grads = torch.autograd.grad(objective, (x, weight))
        for one, other in zip(
            (objective, *grads), (expected, *torch.autograd.grad(expected, (x, weight))), strict=True
        ):
            assert_close(one, other, atol=1e-12)


def ruled_out(tp: int) -> tuple[float, list[float]]:
    """The loss and gradient of one token whose logits are the weight's rows."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    weight = piece(torch.tensor([[-math.inf], [-math.inf], [-1000.0], [-1001.0]]).double(), mesh, 0)
    x = torch.ones(1, 1, 1, dtype=torch.float64)
    objective, _ = chunked_head_loss(x, weight, torch.tensor([[2]]), mesh, vocab=4, chunk=1)
    objective.backward()
    return objective.item(), weight.grad.flatten().tolist()


@pytest.mark.parametrize("tp", [1, 2])
def test_columns_ruled_out_by_infinity_are_not_part_of_the_softmax(tp: int) -> None:
    """On two ranks the first one's columns are all ruled out, and the other logits are far from zero."""
    results = run_ranks(ruled_out, tp, tp)
    assert all(loss == pytest.approx(math.log1p(math.exp(-1))) for loss, _ in results)
    second = math.exp(-1) / (1 + math.exp(-1))
    assert [value for _, values in results for value in values] == pytest.approx([0, 0, -second, second])


def traffic(tp: int, sequence_parallel: bool, smoothing: float) -> dict[tuple[str, str], tuple[int, int]]:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    x = torch.randn(B, S // tp if sequence_parallel else S, D, requires_grad=True)
    weight = torch.randn(8 // tp, D, requires_grad=True)
    options = {"sequence_parallel": sequence_parallel, "label_smoothing": smoothing}
    chunked_head_loss(x, weight, LABELS, mesh, vocab=V, chunk=3, **options)[0].backward()
    return {key: (traffic.calls, traffic.wire_bytes) for key, traffic in mesh.ledger.records().items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_the_numbers_of_each_chunk_are_gathered_and_the_input_once(tp: int) -> None:
    hidden = 4 * B * S * D * (tp - 1) // tp
    for smoothing, numbers in ((0.0, 2), (0.1, 3)):
        gathers, statistics = 3, (tp - 1) * numbers * B * S * 4
        alone = {("tp", "all_gather"): (gathers, statistics), ("tp", "all_reduce"): (1, 2 * hidden)}
        assert run_ranks(traffic, tp, tp, False, smoothing) == [alone] * tp
        split = {("tp", "all_gather"): (gathers + 1, statistics + hidden), ("tp", "reduce_scatter"): (1, hidden)}
        assert run_ranks(traffic, tp, tp, True, smoothing) == [split] * tp


class Operations(TorchDispatchMode):
    """The names of the operations, and the elements of their largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        for x in torch.utils._pytree.tree_leaves(out):
            self.largest = max(self.largest, x.numel()) if isinstance(x, Tensor) else self.largest
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_one_chunk_and_the_gradients(dtype: torch.dtype) -> None:
    tokens, chunk, hidden, vocab = 512, 32, 16, 1000
    x = torch.randn(1, tokens, hidden).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden).to(dtype).requires_grad_()
    labels = torch.zeros(1, tokens, dtype=torch.int64)
    weight.grad = torch.zeros_like(weight)
    gradients, logits = 4 * vocab * hidden + dtype.itemsize * tokens * hidden, chunk * vocab
    seen = Operations()
    with Live(x, weight, weight.grad, labels) as live, seen, weight_gradient_scope():
        loss, _ = chunked_head_loss(x, weight, labels, Mesh.single(), vocab=vocab, chunk=chunk)
        assert live.bytes - 8 <= gradients
        # In bf16 the CPU multiplies copies of the chunk's gradient and hidden states in fp32.
        assert live.peak < gradients + (4 if dtype == torch.float32 else 6) * logits + 100 * tokens
        loss.backward()
    assert live.peak < gradients + max(6 * logits, 6 * vocab * hidden) + 100 * tokens
    assert seen.largest == logits < tokens * vocab


def test_nothing_is_computed_for_gradients_that_nobody_needs() -> None:
    def products(x_needs: bool, weight_needs: bool) -> int:
        x, weight = randn(1, 6, D).requires_grad_(x_needs), randn(V, D).requires_grad_(weight_needs)
        with Operations() as seen:
            chunked_head_loss(x, weight, torch.ones(1, 6, dtype=torch.int64), Mesh.single(), vocab=V, chunk=3)
        return sum(name in ("mm", "addmm_", "addmm") for name in seen.names)

    assert [products(*needs) for needs in ((False, False), (True, False), (False, True), (True, True))] == [2, 4, 4, 6]
    with torch.no_grad():
        assert products(True, True) == 2


def test_z_loss_and_smoothing_are_not_computed_without_a_weight() -> None:
    def operations(**options: float) -> list[str]:
        with Operations() as seen:
            x = randn(1, 6, D).requires_grad_()
            chunked_head_loss(
                x, randn(V, D), torch.ones(1, 6, dtype=torch.int64), Mesh.single(), vocab=V, chunk=6, **options
            )
        return seen.names

    plain = operations()
    assert "pow" not in plain
    assert len(plain) < min(len(operations(z_loss=0.1)), len(operations(label_smoothing=0.1)))


class Counted(AccumulationHook):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parameter: Tensor) -> None:
        self.calls += 1


def test_the_weights_gradient_is_added_in_place_also_by_a_backward_that_defers_others() -> None:
    x, weight, labels = randn(1, 8, D), nn.Parameter(randn(V, D)), LABELS.view(1, 8)
    expected = torch.autograd.grad(chunked_head_loss(x, weight, labels, Mesh.single(), vocab=V, chunk=3)[0], weight)[0]
    weight.grad = torch.ones_like(weight)
    weight.register_post_accumulate_grad_hook(hook := Counted())
    place = weight.grad.data_ptr()
    with weight_gradient_scope():
        for calls in (1, 2):
            loss, _ = chunked_head_loss(x, weight, labels, Mesh.single(), vocab=V, chunk=3)
            with deferring() as deferred:
                loss.backward(torch.tensor(0.5))
            assert not deferred.parameters
            assert hook.calls == calls
    assert weight.grad.data_ptr() == place
    assert_close(weight.grad, 1 + expected, atol=1e-12)


def test_a_backward_may_run_twice_and_second_derivatives_are_an_error() -> None:
    x, weight = randn(1, 8, D).requires_grad_(), nn.Parameter(randn(V, D))
    loss, _ = chunked_head_loss(x, weight, LABELS.view(1, 8), Mesh.single(), vocab=V, chunk=3)
    first = torch.autograd.grad(loss, (x, weight), torch.tensor(2.0).double(), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    for one, other in zip(first, second, strict=True):
        assert_close(one, 2 * other, atol=1e-12)
    scale = torch.tensor(2.0).double().requires_grad_()
    (gradient,) = torch.autograd.grad(loss, x, scale, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)])
def test_low_precision_is_as_exact_as_with_all_logits(dtype: torch.dtype, tolerance: float) -> None:
    """The loss is exact to fp32; each gradient is off by a rounding of its dtype, at any scale of the loss."""
    x, weight = randn(1, 64, 32), randn(500, 32, seed=1)
    labels, scale = torch.arange(64).view(1, 64), torch.tensor(2.0**12 / 64)
    lower = [tensor.to(dtype).requires_grad_() for tensor in (0.1 * x, weight)]
    exact = [tensor.detach().double().requires_grad_() for tensor in lower]
    loss, _ = chunked_head_loss(*lower, labels, Mesh.single(), vocab=500, chunk=20)
    expected = torch.nn.functional.cross_entropy((exact[0] @ exact[1].T)[0], labels[0], reduction="sum")
    loss.backward(scale)
    expected.backward(scale.double())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance / 8)
    for found, right in zip(lower, exact, strict=True):
        assert found.grad.dtype == dtype
        assert (found.grad - right.grad).abs().max() <= tolerance * right.grad.abs().max()


def test_probabilities_below_the_smallest_number_of_fp16_have_a_gradient() -> None:
    weight = torch.tensor([[0.0], [-16.0]], dtype=torch.float16).requires_grad_()
    x = torch.ones(1, 1, 1, dtype=torch.float16)
    chunked_head_loss(x, weight, torch.tensor([[0]]), Mesh.single(), vocab=2, chunk=1)[0].backward(
        torch.tensor(2.0**16)
    )
    assert weight.grad[1].item() == pytest.approx(2**16 * math.exp(-16), rel=1e-2)


def test_no_operation_without_a_fixed_order_on_a_gpu() -> None:
    """``scatter_add_`` raises there under deterministic algorithms."""
    x, weight = randn(1, 8, D).requires_grad_(), randn(V, D).requires_grad_()
    with Operations() as seen:
        chunked_head_loss(x, weight, LABELS.view(1, 8), Mesh.single(), vocab=V, chunk=3)[0].backward()
        vocab_parallel_losses(x @ weight.T, LABELS.view(1, 8), Mesh.single(), vocab=V)[0].backward()
    assert "scatter_" in seen.names
    assert not {"scatter_add_", "scatter_add", "index_add_", "scatter_reduce_"} & set(seen.names)


def test_inconsistent_shapes_are_rejected() -> None:
    x, weight = torch.zeros(B, S, D), torch.zeros(4, D)
    with pytest.raises(PlacementError, match="labels"):
        chunked_head_loss(x, weight, LABELS[:, :2], Mesh.single(), vocab=4, chunk=2)
    with pytest.raises(PlacementError, match=r"vocab=5.*at most 4"):
        chunked_head_loss(x, weight, LABELS, Mesh.single(), vocab=5, chunk=2)


@pytest.mark.parametrize(
    ("vocab", "hidden", "tokens", "tp", "chunk"),
    [
        (128_256, 4096, 8192, 1, 1024),  # Llama-3 8B
        (128_256, 4096, 8192, 8, 2048),  # chunks of at most 2048 tokens, 4 of them
        (128_256, 4096, 2048, 1, None),  # the weight's gradient would take more than the logits
        (128_256, 512, 2000, 1, 1024),
        (32_000, 512, 1500, 1, 768),  # two chunks of about the same size
        (32_000, 4096, 1024, 1, None),
        (256, 64, 100_000, 1, None),  # all logits fit into a chunk
    ],
)
def test_chunks_are_used_where_they_save_memory(vocab, hidden, tokens, tp, chunk) -> None:
    assert HeadSpec(vocab, hidden, chunked=True).chunk(tokens, tp) == chunk
    assert HeadSpec(vocab, hidden).chunk(tokens, tp) is None


def test_autocast_applies_to_the_products_and_not_to_the_loss() -> None:
    found = []
    for chunk in (3, None):
        x, weight = randn(1, 8, D).float().requires_grad_(), randn(V, D).float().requires_grad_()
        labels = LABELS.view(1, 8)
        with torch.autocast("cpu", torch.bfloat16):
            if chunk is None:
                loss = vocab_parallel_losses(x @ weight.T, labels, Mesh.single(), vocab=V)[0]
            else:
                loss = chunked_head_loss(x, weight, labels, Mesh.single(), vocab=V, chunk=chunk)[0]
        loss.backward()
        assert (loss.dtype, x.grad.dtype, weight.grad.dtype) == (torch.float32,) * 3
        found.append((loss, x.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
