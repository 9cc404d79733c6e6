"""The tensors that a block saves for backward: the specs against autograd, their ratios, and published formulas."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megastack import attention_mask
from megastack.config.data_schema import DataOptions
from megastack.config.schema import BatchOptions, PrecisionOptions, TrainConfig
from megastack.layers import attention_spec
from megastack.layers.embedding import _RowSums
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.activations import activation_bytes, saved_in_block
from megastack.models.decoder import Decoder
from megastack.placement.module import initialise_
from megastack.testing.activations import Saved, saved_tensors
from megastack.testing.ranks import run_ranks
from megastack.weight_gradients import deferring, weight_gradient_scope
from tests.models.model_cases import GPT2, LLAMA, QWEN, microbatch, tiny
from tests.models.test_recompute import with_recompute

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
DROPS = {"dropout": 0.1}
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "llama": (LLAMA, False),
    "llama wide": (LLAMA | {"hidden": 24, "heads": 6, "kv_groups": 6, "ffn": 44} | DROPS, True),
    "multi-query": (LLAMA | {"kv_groups": 1, "hidden": 32, "head_dim": 6, "ffn": 20}, False),
    "qwen": (QWEN, True),
    "qwen attention dropout": (QWEN | {"attention_dropout": 0.1}, False),
    "gpt2": (GPT2 | DROPS, False),
    "gpt2 attention dropout": (GPT2 | DROPS | {"attention_dropout": 0.1}, False),
    "llama attention dropout": (LLAMA | {"attention_dropout": 0.1}, True),
}
RECOMPUTE: list[tuple[str, str | None]] = [
    ("none", None),
    ("selective", None),
    ("full", None),
    ("pattern", r"blocks\.0\.mlp"),
    ("pattern", r"blocks\.\d+\.(attention|mlp_norm)"),
]


def configured(name: str, compute: str = "fp32", *, tp: int = 1, sequence_parallel: bool = True) -> TrainConfig:
    model, documents = MODELS[name]
    config = tiny(model, tp=tp, sequence_parallel=sequence_parallel)
    precision = PrecisionOptions(compute=type(PrecisionOptions().compute)(compute))
    batch = BatchOptions(global_size=2, micro_size=2, sequence_length=8)
    return replace(config, precision=precision, batch=batch, data=DataOptions(document_mask=documents))


def made(config: TrainConfig, mesh: Mesh, **part: Any) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config, mesh, **part)
    initialise_(decoder, mesh, config.seed, dtype=DTYPES[config.precision.compute])
    return decoder


def saved_by_block(config: TrainConfig, mesh: Mesh) -> list[Saved]:
    """What the first block saves, its input included, without parameters and what all blocks share."""
    decoder = made(config, mesh, layers=range(1), head=False)
    context = decoder._context(microbatch(documents=config.data.document_mask))
    rows = 8 // (mesh.shape.tp if decoder.sequence_parallel else 1)
    hidden_BSD = torch.randn(2, rows, config.model.hidden, dtype=DTYPES[config.precision.compute], requires_grad=True)
    shared = [context.bias_B1SS, *(context.rotary or ())[1:]]
    given = [x for x in shared if x is not None]
    everything = saved_tensors(decoder.blocks["0"], hidden_BSD, context, given=given)
    return [saved for saved in everything if saved.kind == "made"]


def listed(found: list[Saved]) -> Counter[tuple[int, int]]:
    return Counter((saved.elements, saved.dtype.itemsize) for saved in found)


def predicted(config: TrainConfig) -> Counter[tuple[int, int]]:
    """The formulas' items; keys and values before a key's rotation or behind its norm lie in one storage."""
    items = saved_in_block(config, 0)
    counted = Counter((item.bytes // item.width, item.width) for item in items)
    names = {item.name: (item.bytes // item.width, item.width) for item in items}
    together = "key before its norm" if config.model.qk_norm else None if config.model.positions == "rope" else "key"
    copied = config.model.attention_dropout and config.recompute.mode != "selective" and not config.model.qk_norm
    if together in names and not copied:
        size, width = names["value"]
        counted -= Counter([names["value"], names[together]])
        counted[2 * size, width] += 1
    return counted


def compare(name: str, compute: str, tp: int, sequence_parallel: bool) -> list[str]:
    mesh = Mesh.from_environment(MeshShape(tp=tp)) if tp > 1 else Mesh.single()
    wrong = []
    for mode, pattern in RECOMPUTE:
        plain = configured(name, compute, tp=tp, sequence_parallel=sequence_parallel)
        config = with_recompute(plain, mode, pattern)
        found, expected = listed(saved_by_block(config, mesh)), predicted(config)
        if found != expected:
            wrong.append(f"{mode} {pattern}: saved {found - expected}, predicted {expected - found}")
    return wrong


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_block_saves_the_tensors_of_its_spec_one_by_one(name, compute):
    assert not compare(name, compute, 1, True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "multi-query"])
def test_a_block_saves_the_tensors_of_its_spec_on_tensor_parallel_ranks(name, sequence_parallel):
    assert run_ranks(compare, 2, name, "fp32", 2, sequence_parallel) == [[], []]


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are still there, and the most there ever were."""

    def __init__(self, *apart: torch.Tensor) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in apart}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._known:
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def held(config: TrainConfig, mesh: Mesh, **part: Any) -> tuple[int, int]:
    """Bytes that a stage holds after a forward, and the most that it held until after the backward."""
    decoder = made(config, mesh, **part)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = microbatch(documents=config.data.document_mask)
    given = [batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.samples_B]
    given += [] if batch.documents_BS is None else [batch.documents_BS]
    live = Live(*given, *decoder.parameters(), *(p.grad for p in decoder.parameters()))
    with live:
        out = decoder({}, batch)
        results = [out["hidden"]] if isinstance(out, dict) else [out.objective, out.report]
        outputs = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in results}
        if mesh.shape.tp > 1:
            time.sleep(0.05)  # gloo's threads let go of the last collective's buffers a little later
        kept = live.bytes - sum(outputs.values())
        results[0].sum().backward()
    return kept, live.peak


def stages(name: str, tp: int, sequence_parallel: bool) -> list[str]:
    mesh = Mesh.from_environment(MeshShape(tp=tp)) if tp > 1 else Mesh.single()
    wrong = []
    for mode, pattern in RECOMPUTE:
        config = with_recompute(configured(name, tp=tp, sequence_parallel=sequence_parallel), mode, pattern)
        part = {"layers": range(2), "embedding": True, "head": True}
        found, expected = held(config, mesh, **part)[0], activation_bytes(config, **part).saved
        if found != expected:
            wrong.append(f"{mode} {pattern}: holds {found}, predicted {expected}, {found - expected} more")
    return wrong


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_holds_the_predicted_bytes(name):
    assert not stages(name, 1, True)


@pytest.fixture(params=[0, 10**9])
def by_document(request, monkeypatch):
    """Documents are computed by their offsets, apart or several in a call, as in a large microbatch."""
    monkeypatch.setattr(attention_spec, "DENSE_BELOW", 0)
    monkeypatch.setattr(attention_mask, "CALL", request.param)


@pytest.mark.parametrize("name", [name for name, (_, documents) in MODELS.items() if documents])
def test_documents_add_nothing_to_the_bytes_that_a_model_holds(by_document, name):
    assert not stages(name, 1, True)
    with_documents = configured(name)
    without = replace(with_documents, data=DataOptions(document_mask=False))
    sizes = [activation_bytes(each, range(2), embedding=True, head=True) for each in (with_documents, without)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("name", ["llama wide", "qwen"])
def test_a_block_with_documents_saves_the_tensors_of_its_spec_one_by_one(by_document, name, compute):
    assert not compare(name, compute, 1, True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_whole_model_holds_the_predicted_bytes_on_tensor_parallel_ranks(sequence_parallel):
    assert run_ranks(stages, 2, "llama wide", 2, sequence_parallel) == [[], []]


def until_w(config: TrainConfig, mesh: Mesh) -> tuple[int, int]:
    """Bytes that the backward of a whole model holds for W, and the predicted ones."""
    decoder = made(config, mesh)
    with weight_gradient_scope():
        loss = decoder({}, microbatch(documents=config.data.document_mask)).objective
        with deferring() as deferred:
            loss.backward()
    storages = {}
    for products in deferred._pending.values():
        for _, product in products:
            looked_up = isinstance(product, _RowSums)
            parts = (product.grad_BSD, product.ids_BS) if looked_up else (product.grad_TO, product.source._x)
            storages |= {x.untyped_storage().data_ptr(): x.numel() * x.itemsize for x in parts}
    layers = range(config.model.layers)
    return sum(storages.values()), activation_bytes(config, layers, embedding=True, head=True).until_w


def until_w_of(name: str, tp: int, sequence_parallel: bool) -> list[str]:
    mesh, wrong = Mesh.from_environment(MeshShape(tp=tp)), []
    for mode, pattern in RECOMPUTE[:3]:
        if mode == "selective" and "attention dropout" in name:
            continue
        config = with_recompute(configured(name, tp=tp, sequence_parallel=sequence_parallel), mode, pattern)
        found, expected = until_w(config, mesh)
        if found != expected:
            wrong.append(f"{name} {mode} tp={tp}: {found} bytes, not {expected}")
    return wrong


@pytest.mark.parametrize("name", ["llama", "llama wide", "qwen", "gpt2"])
def test_the_tensors_held_between_i_and_w(name):
    assert not until_w_of(name, 1, False)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_tensors_held_between_i_and_w_on_tensor_parallel_ranks(sequence_parallel):
    for name in ("llama", "gpt2"):
        for wrong in run_ranks(until_w_of, 2, name, 2, sequence_parallel):
            assert not wrong


def total(config: TrainConfig, layer: int | None = None) -> int:
    return sum(item.bytes for item in saved_in_block(config, layer))


def test_full_recompute_holds_the_inputs_and_one_block():
    plain = configured("gpt2")
    full = with_recompute(plain, "full")
    inputs = 2 * 8 * 16 * 4
    assert total(full, 0) == inputs
    peaks = {}
    for config in (plain, full):
        for layers in (1, 2, 3):
            model = replace(config, model=replace(config.model, layers=layers))
            peaks[config.recompute.mode, layers] = held(model, Mesh.single(), layers=range(layers), head=False)[1]
    for layers in (1, 2):
        assert peaks["full", layers + 1] - peaks["full", layers] == inputs
        assert peaks["none", layers + 1] - peaks["none", layers] == total(plain)
    waiting = 2 * inputs + 64  # the block's output and its gradient, while the block runs for the second time
    assert peaks["full", 1] <= peaks["none", 1] + waiting
    assert activation_bytes(full, range(3), embedding=False, head=False).recomputed == total(plain) - inputs


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_divides_by_the_degree_what_it_shards(tp):
    alone = {item.name: item.bytes for item in saved_in_block(configured("gpt2"))}
    split = {item.name: item.bytes for item in saved_in_block(configured("gpt2", tp=tp))}
    assert {name: size * tp for name, size in split.items()} == alone
    whole = {item.name: item.bytes for item in saved_in_block(configured("gpt2", tp=tp, sequence_parallel=False))}
    sharded = [name for name in whole if whole[name] != split[name]]
    assert sharded == [name for name in whole if "norm" in name or "dropped" in name or name in ("input", "middle")]
    assert all(whole[name] == tp * split[name] for name in sharded)


PUBLISHED = [(1024, 768, 12), (2048, 1600, 25), (2048, 12288, 96)]


@pytest.mark.parametrize(("sequence", "hidden", "heads"), PUBLISHED)
@pytest.mark.parametrize("compute", ["fp32", "fp64", "bf16"])
def test_a_gpt2_block_is_never_above_the_published_formula(sequence, hidden, heads, compute):
    for tp in (1, 5) if heads == 25 else (1, 4):
        for sequence_parallel in (False, True):
            for attention in (0.0, 0.1):
                config = configured("gpt2", compute, tp=tp, sequence_parallel=sequence_parallel)
                sizes = {"hidden": hidden, "heads": heads, "ffn": 4 * hidden, "attention_dropout": attention}
                batch = replace(config.batch, micro_size=1, sequence_length=sequence)
                config = replace(config, model=replace(config.model, **sizes), batch=batch)
                unit = sequence * hidden * {"fp32": 2, "fp64": 4, "bf16": 1}[compute]
                sharded = 34 / tp if sequence_parallel or tp == 1 else 10 + 24 / tp
                scores = 5 * heads * sequence / hidden / tp if attention else 0
                # In bf16 the masks are all that the formula has to spare, so what it leaves out is left out here too.
                left_out = ("mean", "scale", "log-sum-exp") if compute == "bf16" else ()
                mine = sum(item.bytes for item in saved_in_block(config) if not item.name.endswith(left_out))
                assert 0.75 * (sharded + scores) * unit < mine <= (sharded + scores) * unit


def test_the_tool_marks_parameters_and_inputs_and_counts_a_storage_once():
    layer = torch.nn.Linear(3, 5, bias=False)
    x = torch.ones(2, 3, requires_grad=True)
    net = torch.nn.Sequential(layer, torch.nn.Tanh(), torch.nn.Flatten(0), torch.nn.Sigmoid())
    found = saved_tensors(net, x, given=[x])
    assert Counter((saved.kind, saved.elements) for saved in found) == Counter(
        [("given", 6), ("parameter", 15), ("made", 10), ("made", 10)]
    )
    assert all(saved.bytes == 4 * saved.elements for saved in found)


def test_layers_that_ask_for_a_dense_mask_share_one_in_the_dtype_of_the_scores():
    config = configured("qwen", "bf16")
    decoder = made(config, Mesh.single(), layers=range(1, 2), head=False)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    context = decoder._context(microbatch(documents=True))
    assert context.within("blocks.1").mask_for(torch.bfloat16) is context.bias_B1SS is not None
    assert context.mask_B1SS is context.within("blocks.1").mask_B1SS is not None
