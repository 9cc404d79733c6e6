"""Suggestions for unknown keys."""

from __future__ import annotations

import pytest

from megastack.config.suggestions import OTHER_SYSTEMS, known_keys, suggest


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("parallel.tpp", "parallel.tp"),
        ("paralel.tp", "parallel.tp"),
        ("tp", "parallel.tp"),
        ("hidden", "model.hidden"),
        ("model.n_headz", "model.heads"),
        ("zero.stage", "parallel.zero.stage"),
        ("optim.learning_rate", "optim.lr"),
        ("tensor_model_parallel_size", "parallel.tp"),
        ("--tensor-model-parallel-size", "parallel.tp"),
        ("parallel.tensor_model_parallel_size", "parallel.tp"),
        ("train_micro_batch_size_per_gpu", "batch.micro_size"),
        ("parallelism.pipeline_parallel_degree", "parallel.pp"),
        ("num_key_value_heads", "model.kv_groups"),
        ("pipeline_model_parallel_size", "parallel.pp"),
        ("num_layers", "model.layers"),
        ("num_query_groups", "model.kv_groups"),
        ("micro_batch_size", "batch.micro_size"),
        ("global_batch_size", "batch.global_size"),
        ("sequence_parallel", "parallel.sequence_parallel"),
        ("use_distributed_optimizer", "parallel.zero.stage"),
        ("zero_optimization", "parallel.zero.stage"),
        ("zero_optimization.stage", "parallel.zero.stage"),
        ("zero_optimization.offload_optimizer.device", "parallel.zero.offload"),
        ("train_batch_size", "batch.global_size"),
        ("gradient_clipping", "optim.clip_norm"),
        ("optimizer.type", "optim.name"),
        ("optimizer.params.lr", "optim.lr"),
        ("scheduler.params.warmup_num_steps", "lr.warmup_steps"),
        ("bf16.enabled", "precision.compute"),
        ("pipeline.stages", "parallel.pp"),
        ("data_stages", "data.phases"),
        ("compile.mode", "compile"),
        ("parallel.tp.size", "parallel.tp"),
    ],
)
def test_the_suggested_key(written: str, meant: str) -> None:
    assert suggest(written) == meant


@pytest.mark.parametrize("written", ["foo", "xyzzy.plugh", ""])
def test_no_suggestion_without_a_similar_key(written: str) -> None:
    assert suggest(written) is None


def test_suggestions_from_given_keys() -> None:
    assert suggest("groups[0].lr_scal", ("groups[0].pattern", "groups[0].lr_scale")) == "groups[0].lr_scale"


def test_names_of_other_systems_map_to_existing_keys() -> None:
    assert {name: key for name, key in OTHER_SYSTEMS.items() if key not in known_keys()} == {}


def test_no_key_is_also_a_name_of_another_system() -> None:
    ours = {key.split(".")[-1]: key for key in known_keys()}
    assert {name: key for name, key in OTHER_SYSTEMS.items() if name in ours and ours[name] != key} == {}
