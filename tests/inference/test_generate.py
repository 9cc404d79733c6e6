"""Generation: the same ids on every layout, with and without a cache, alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megastack.assemble.inference import build_generator
from megastack.assemble.stages import build_stages
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import ParallelOptions, PrecisionOptions, ScheduleOptions, TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.inference.generate import Completion, Generator
from megastack.inference.sample import Sampling
from megastack.layers.attention import ParallelAttention
from megastack.mesh.mesh import Mesh
from megastack.models.block import Block
from megastack.models.stages import configured_schedule
from megastack.testing.ranks import run_ranks
from tests.models.model_cases import GPT2, LLAMA, QWEN, tiny

PROMPTS = [[3, 1], [4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]]
NEW = 12
DRAWN = Sampling(temperature=1.0, seed=4)
MODELS = {"gqa": LLAMA, "gpt2": GPT2 | {"max_positions": 24}, "qwen": QWEN}
Ids = list[tuple[int, ...]]


def config_of(
    model: dict[str, Any], layers: Sequence[int] | None = None, chunks: int = 1, **degrees: int
) -> TrainConfig:
    """A model of four layers in fp64 with weights large enough that the texts do not soon repeat themselves."""
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
    """Each prompt by itself, on one rank."""
    one = generator(config, Mesh.single())
    return [
        one([prompt], max_new_tokens=NEW, sampling=sampling, cache=cache, first_sample=number)[0].ids
        for number, prompt in enumerate(PROMPTS)
    ]


def on_a_layout(config: TrainConfig) -> dict[str, Any]:
    """What one rank of a layout finds, whose own random generator is unlike the others'."""
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    torch.manual_seed(mesh.rank)
    each = generator(config, mesh)
    found = {
        name: ids_of(each(PROMPTS, max_new_tokens=NEW, sampling=sampling, cache=cache))
        for name, sampling, cache in (
            ("cached", Sampling(), True),
            ("uncached", Sampling(), False),
            ("drawn", DRAWN, True),
            ("again", Sampling(), True),
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
def test_every_layout_continues_prompts_alike(layout: str) -> None:
    model = MODELS["gqa"]
    expected = {"greedy": alone(config_of(model), Sampling()), "drawn": alone(config_of(model), DRAWN)}
    assert expected["greedy"] != expected["drawn"] and len(set(expected["greedy"])) == 3
    config = config_of(model, **LAYOUTS[layout])  # type: ignore[arg-type]
    for found in run_ranks(on_a_layout, mesh_shape(config).world_size, config):
        assert found["can"]
        for name in ("cached", "uncached", "again"):
            assert found[name] == expected["greedy"], name
        assert found["drawn"] == expected["drawn"]
        assert found["entries"] == found["layers"]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("qwen", marks=pytest.mark.full)])
def test_other_models_do_on_two_axes_at_once(name: str) -> None:
    expected = alone(config_of(MODELS[name]), Sampling())
    assert alone(config_of(MODELS[name]), Sampling(), cache=True) == expected
    config = config_of(MODELS[name], layers=(3, 1), tp=2, pp=2)
    for found in run_ranks(on_a_layout, 4, config):
        assert found["cached"] == found["uncached"] == found["again"] == expected


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


def test_all_ranks_end_together() -> None:
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
    ("prompts", "new", "said"),
    [
        ([[1] * 20], 5, "prompt 0: its 20 tokens and max_new_tokens=5 exceed the 24 positions .* max_new_tokens=4"),
        ([[1], [1] * 24], 1, "prompt 1: .* a prompt of at most 23 tokens"),
        ([[1], []], 1, "prompt 1: has no token"),
        ([[37]], 1, "prompt 0: id 37 is outside model.vocab=37"),
        ([[1]], 0, "max_new_tokens=0"),
        ([], 1, "no prompt"),
    ],
)
def test_what_the_model_cannot_take_is_refused_before_anything_runs(prompts: Any, new: int, said: str) -> None:
    each = generator(config_of(MODELS["gpt2"]), Mesh.single())
    each.stages = []  # nothing could run
    with pytest.raises(ConfigError, match=said):
        each(prompts, max_new_tokens=new)


def test_rotary_positions_have_no_end() -> None:
    assert len(generator(config_of(LLAMA), Mesh.single())([[1] * 30], max_new_tokens=2)[0].ids) == 2


def test_logits_that_are_no_numbers_are_an_error() -> None:
    each = generator(config_of(LLAMA), Mesh.single())
    each.stages[0].get_parameter("norm.weight").fill_(float("nan"))
    with pytest.raises(MegastackError, match="prompt 0: the logits after 2 tokens are not finite"):
        each(PROMPTS, max_new_tokens=1)


class Windowed(ParallelAttention):
    """A key is mixed with the one before it, which takes the whole row."""

    def attend(self, q_BSHK, k_BSGK, v_BSGK, context):  # type: ignore[no-untyped-def]
        return super().attend(q_BSHK, k_BSGK + F.pad(k_BSGK, (0, 0, 0, 0, 1, 0))[:, :-1], v_BSGK, context)


class Tempered(ParallelAttention):
    """Says that it can work with a cache, and can."""

    uses_cache = True

    def attend(self, q_BSHK, k_BSGK, v_BSGK, context):  # type: ignore[no-untyped-def]
        return super().attend(q_BSHK * 0.5, k_BSGK, v_BSGK, context)


class Renamed(ParallelAttention):
    """Overrides nothing that matters."""


class Outer(Block):
    """A block with a way of its own through its layers."""

    def forward(self, hidden_BSD, context=None, *values):  # type: ignore[no-untyped-def]
        return super().forward(hidden_BSD, context, *values)


def test_what_overrides_nothing_that_matters_is_cached() -> None:
    assert Renamed.uses_cache and type("Deeper", (Tempered,), {}).uses_cache
    assert not type("Deeper", (Tempered,), {"attend": Windowed.attend}).uses_cache
    own = LLAMA | {"block": {"_target_": f"{__name__}.Outer"}}
    assert not generator(config_of(own), Mesh.single()).can_cache


@pytest.mark.parametrize(("layer", "caches"), [("Windowed", False), ("Tempered", True)])
def test_attention_of_ones_own_is_cached_only_if_it_can_be(layer: str, caches: bool) -> None:
    config = config_of(LLAMA | {"attention": {"_target_": f"{__name__}.{layer}"}}, tp=2)
    expected = alone(replace(config, parallel=ParallelOptions()), Sampling())
    for found in run_ranks(on_a_layout, 2, config):
        assert found["can"] is caches and (found["entries"] > 0) is caches
        assert found["cached"] == found["uncached"] == expected
