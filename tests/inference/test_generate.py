"""Generation: the same ids on every layout, with and without a cache, alone and in a batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megastack.assemble.inference import build_generator
from megastack.assemble.stages import build_stages
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import ParallelOptions, PrecisionOptions, ScheduleOptions, TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.inference.generate import Completion, Generator
from megastack.inference.sample import Sampling
from megastack.layers import attention, embedding, linear, mlp, norm
from megastack.layers.mlp import ParallelMLP
from megastack.layers.overrides import METHODS, is_built_in
from megastack.mesh.mesh import Mesh
from megastack.models import block, decoder
from megastack.models.stages import configured_schedule
from megastack.testing.ranks import run_ranks
from tests.inference import custom_layers
from tests.inference.custom_layers import shifted
from tests.models.model_cases import GPT2, LLAMA, QWEN, tiny

PROMPTS = [[3, 1], [4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]]
NEW = 12
DRAWN = Sampling(temperature=1.0, seed=4)
MODELS = {"gqa": LLAMA, "gpt2": GPT2 | {"max_positions": 24}, "qwen": QWEN}
Ids = list[tuple[int, ...]]


def config_of(
    model: dict[str, Any], layers: Sequence[int] | None = None, chunks: int = 1, **degrees: int
) -> TrainConfig:
    """A model of four layers in fp64, with weights large enough that texts do not repeat themselves early."""
    config = tiny(model | {"layers": 4, "init_std": 0.5})
    split = None if layers is None else list(layers)
    precision = PrecisionOptions()
    return replace(
        config,
        parallel=ParallelOptions(layers_per_stage=split, **degrees),
        schedule=ScheduleOptions(name="interleaved" if chunks > 1 else "1f1b", chunks=chunks),
        precision=replace(precision, compute=type(precision.compute)("fp64")),
    )


def generator(config: TrainConfig, mesh: Mesh) -> Generator:
    schedule = configured_schedule(config, mesh.shape)
    return build_generator(config, mesh, build_stages(config, mesh, schedule), schedule)


def ids_of(completions: Sequence[Completion]) -> Ids:
    return [completion.ids for completion in completions]


def alone(config: TrainConfig, sampling: Sampling, *, cache: bool = False) -> Ids:
    """The continuation of each prompt alone, on one rank."""
    one = generator(config, Mesh.single())
    return [
        one([prompt], max_new_tokens=NEW, sampling=sampling, cache=cache, first_sample=number)[0].ids
        for number, prompt in enumerate(PROMPTS)
    ]


def on_a_layout(config: TrainConfig) -> dict[str, Any]:
    """The results of one rank, whose random generator differs from those of the other ranks."""
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    torch.manual_seed(mesh.rank)
    each = generator(config, mesh)
    found = {
        name: ids_of(each(PROMPTS, max_new_tokens=NEW, sampling=sampling, cache=cache))
        for name, sampling, cache in (
            ("cached", Sampling(), True),
            ("uncached", Sampling(), False),
            ("drawn", DRAWN, True),
            ("repeated", Sampling(), True),
        )
    }
    layers = sum(len(stage.layers) for stage in each.stages)
    return found | {"entries": each.cache_entries, "layers": layers, "can": each.can_cache}


LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2-pp2-uneven": {"tp": 2, "pp": 2, "layers": (1, 3)},
    "pp2-chunks2": {"pp": 2, "chunks": 2},
    "tp4-copies": {"tp": 4},
}


RARE = ("pp2-chunks2", "tp4-copies")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.full] if name in RARE else []) for name in LAYOUTS]
)
def test_every_layout_generates_the_same_ids(layout: str) -> None:
    model = MODELS["gqa"]
    expected = {"greedy": alone(config_of(model), Sampling()), "drawn": alone(config_of(model), DRAWN)}
    assert expected["greedy"] != expected["drawn"] and len(set(expected["greedy"])) == 3
    config = config_of(model, **LAYOUTS[layout])  # type: ignore[arg-type]
    for found in run_ranks(on_a_layout, mesh_shape(config).world_size, config):
        assert found["can"]
        for name in ("cached", "uncached", "repeated"):
            assert found[name] == expected["greedy"], name
        assert found["drawn"] == expected["drawn"]
        assert found["entries"] == found["layers"]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("qwen", marks=pytest.mark.full)])
def test_other_models_generate_the_same_ids_on_two_axes(name: str) -> None:
    expected = alone(config_of(MODELS[name]), Sampling())
    assert alone(config_of(MODELS[name]), Sampling(), cache=True) == expected
    config = config_of(MODELS[name], layers=(3, 1), tp=2, pp=2)
    for found in run_ranks(on_a_layout, 4, config):
        assert found["cached"] == found["uncached"] == found["repeated"] == expected


def test_one_rank_with_a_cache_and_a_batch() -> None:
    config = config_of(LLAMA)
    each = generator(config, Mesh.single())
    expected = alone(config, Sampling())
    assert ids_of(each(PROMPTS, max_new_tokens=NEW)) == expected
    assert each.cache_entries == 4
    assert ids_of(each(PROMPTS, max_new_tokens=NEW, cache=False)) == expected
    assert each.cache_entries == 0


def ended(config: TrainConfig, end: int) -> list[Completion]:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    return generator(config, mesh)(PROMPTS, max_new_tokens=NEW, end=end)


def test_all_ranks_stop_together() -> None:
    whole = alone(config_of(LLAMA), Sampling())
    end = whole[1][3]
    cut = [ids[: ids.index(end) + 1] if end in ids else ids for ids in whole]
    assert len(cut[1]) < NEW
    for found in run_ranks(ended, 4, config_of(LLAMA, tp=2, pp=2), end):
        assert ids_of(found) == cut
        assert [completion.ended for completion in found] == [ids[-1] == end for ids in cut]


def test_it_stops_as_soon_as_every_text_has_ended() -> None:
    one = generator(config_of(LLAMA), Mesh.single())
    first = one(PROMPTS[:1], max_new_tokens=1)[0].ids[0]
    calls: list[Sequence[int | None]] = []
    assert one(PROMPTS[:1], max_new_tokens=NEW, end=first, on_tokens=calls.append)[0].ids == (first,)
    assert calls == [[first]]


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1] * 20], 5, "prompt 0: its 20 tokens and max_new_tokens=5 exceed the 24 positions .* max_new_tokens=4"),
        ([[1], [1] * 24], 1, "prompt 1: .* a prompt of at most 23 tokens"),
        ([[1], []], 1, "prompt 1: has no tokens"),
        ([[37]], 1, "prompt 0: id 37 is outside model.vocab=37"),
        ([[1]], 0, "max_new_tokens=0"),
        ([], 1, "no prompt"),
    ],
)
def test_invalid_prompts_are_rejected_before_anything_runs(prompts: Any, new: int, message: str) -> None:
    each = generator(config_of(MODELS["gpt2"]), Mesh.single())
    each.stages = []  # nothing can run
    with pytest.raises(ConfigError, match=message):
        each(prompts, max_new_tokens=new)


def test_rotary_positions_have_no_limit() -> None:
    assert len(generator(config_of(LLAMA), Mesh.single())([[1] * 30], max_new_tokens=2)[0].ids) == 2


def test_logits_that_are_not_finite_are_an_error() -> None:
    each = generator(config_of(LLAMA), Mesh.single())
    each.stages[0].get_parameter("norm.weight").fill_(float("nan"))
    with pytest.raises(MegastackError, match="prompt 0: the logits after 2 tokens are not finite"):
        each(PROMPTS, max_new_tokens=1)


CACHED = {"mlp": ("Doubled", "DoubledBehind"), "attention": ("Tempered", "Renamed")}
UNCACHED = {
    "mlp": (
        *(
            "TokenShift",
            "ShiftedActivation",
            "MixedMLP",
            "WrappedMLP",
            "HookedMLP",
            "DeclaredHookedMLP",
            "SetOnInstance",
        ),
    ),
    "attention": ("Windowed", "MixedAttention", "MixedAttend"),
    "block": ("Outer", "MixedBlock"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in UNCACHED.items() for name in names])
def test_layers_that_replace_built_in_functions_are_not_cached(kind: str, name: str) -> None:
    one = generator(config_of(LLAMA | {kind: {"_target_": f"{custom_layers.__name__}.{name}"}}), Mesh.single())
    whole = ids_of(one(PROMPTS, max_new_tokens=NEW, cache=False))
    assert ids_of(one(PROMPTS, max_new_tokens=NEW)) == whole
    assert not one.can_cache and one.cache_entries == 0
    assert one.uncached_because is not None and one.uncached_because.startswith("blocks.0")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CACHED.items() for name in names])
def test_layers_that_declare_cache_support_are_cached(kind: str, name: str) -> None:
    one = generator(config_of(LLAMA | {kind: {"_target_": f"{custom_layers.__name__}.{name}"}}), Mesh.single())
    whole = ids_of(one(PROMPTS, max_new_tokens=NEW, cache=False))
    assert ids_of(one(PROMPTS, max_new_tokens=NEW)) == whole
    assert one.can_cache and one.cache_entries == 4


def shift(module: nn.Module, inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return out + shifted(out)


def shift_before(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return inputs[0] + shifted(inputs[0]), *inputs[1:]


@pytest.mark.parametrize(
    "name", ["blocks.1", "blocks.2.mlp", "blocks.3.attention", "blocks.0.mlp_norm", "blocks.0.mlp.up", "norm", "head"]
)
def test_a_hook_on_any_module_disables_the_cache(name: str) -> None:
    one = generator(config_of(LLAMA), Mesh.single())
    plain = ids_of(one(PROMPTS, max_new_tokens=NEW))
    module = one.stages[0].get_submodule(name)
    for handle in (module.register_forward_hook(shift), module.register_forward_pre_hook(shift_before)):
        assert ids_of(one(PROMPTS, max_new_tokens=NEW)) == ids_of(one(PROMPTS, max_new_tokens=NEW, cache=False))
        assert one.uncached_because is not None and name in one.uncached_because
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert ids_of(one(PROMPTS, max_new_tokens=NEW)) == plain and not one.can_cache
    handle.remove()
    assert ids_of(one(PROMPTS, max_new_tokens=NEW)) == plain and one.can_cache


@pytest.mark.parametrize("name", ["blocks.1", "blocks.2.mlp", "blocks.3.attention", "norm", "blocks.0.attention.out"])
def test_a_forward_set_on_the_instance_disables_the_cache(name: str) -> None:
    one = generator(config_of(LLAMA), Mesh.single())
    module = one.stages[0].get_submodule(name)
    usual = module.forward
    module.forward = lambda x, *others: usual(x + shifted(x), *others)
    assert ids_of(one(PROMPTS, max_new_tokens=NEW)) == ids_of(one(PROMPTS, max_new_tokens=NEW, cache=False))
    assert not one.can_cache


def test_replaced_functions_and_modules_disable_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    one = generator(config_of(LLAMA), Mesh.single())
    for name in ("forward", "activate"):
        usual = getattr(ParallelMLP, name)
        with monkeypatch.context() as patch:
            patch.setattr(ParallelMLP, name, functools.wraps(usual)(lambda *given, _usual=usual: _usual(*given)))
            one([[1]], max_new_tokens=1)
            assert not one.can_cache
    one.stages[0].get_submodule("blocks.1").mlp_norm = nn.Sequential(nn.Identity())
    one([[1]], max_new_tokens=1)
    assert one.uncached_because is not None and "blocks.1.mlp_norm" in one.uncached_because


def test_every_marked_method_decides() -> None:
    modules = (attention, embedding, linear, mlp, norm, block, decoder)
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    marked = {name for kind in kinds for name, value in vars(kind).items() if is_built_in(value)}
    assert marked - {"_loss"} == set(METHODS), "generation computes no loss"


def hooked_on_one_rank(config: TrainConfig) -> tuple[Ids, Ids, str | None]:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    each = generator(config, mesh)
    if mesh.rank == 1:
        each.stages[0].get_submodule("blocks.2.mlp").register_forward_hook(shift)
    cached, whole = (ids_of(each(PROMPTS, max_new_tokens=NEW, cache=cache)) for cache in (True, False))
    return cached, whole, each.uncached_because


def test_all_ranks_agree_about_a_hook_on_one_stage() -> None:
    found = run_ranks(hooked_on_one_rank, 2, config_of(LLAMA, pp=2))
    assert all(cached == whole and because == found[0][2] is not None for cached, whole, because in found)


@pytest.mark.parametrize(("layer", "caches"), [("Windowed", False), ("Tempered", True)])
def test_custom_attention_is_cached_only_if_it_declares_it(layer: str, caches: bool) -> None:
    config = config_of(LLAMA | {"attention": {"_target_": f"{custom_layers.__name__}.{layer}"}}, tp=2)
    expected = alone(replace(config, parallel=ParallelOptions()), Sampling())
    for found in run_ranks(on_a_layout, 2, config):
        assert found["can"] is caches and (found["entries"] > 0) is caches
        assert found["cached"] == found["uncached"] == expected
