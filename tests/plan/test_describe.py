"""The lines that open a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megastack.config.compose import compose
from megastack.plan.describe import as_record, short
from megastack.plan.layout import Layout


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["precision=bf16"], "bf16 compute, fp32 main parameters, fp32 reduction"),
        (["precision=bf16", "precision.reduce=bf16"], "bf16 compute, fp32 main parameters, bf16 reduction"),
        (["precision=fp16"], "fp16 compute, fp32 main parameters, fp32 reduction, dynamic loss scale"),
        (
            ["precision=fp16", "precision.loss_scale=64"],
            "fp16 compute, fp32 main parameters, fp32 reduction, loss scale 64",
        ),
        (["precision=fp32"], "fp32 compute, fp32 reduction"),
        (["precision=fp64"], "fp64 compute, fp64 reduction"),
    ],
)
def test_the_first_line_has_the_number_formats(overrides: list[str], words: str) -> None:
    assert short(compose(["experiment=laptop", *overrides])).splitlines()[0].endswith(f", {words}")


def test_the_second_line_has_the_ranks_that_share_the_optimizer_state() -> None:
    grid = ["experiment=laptop", "parallel.dp=4", "parallel.tp=1", "parallel.pp=1"]
    zero = [*grid, "parallel.zero.stage=1"]
    assert short(compose(grid)).splitlines()[1].endswith("4 ranks")
    assert short(compose(zero)).splitlines()[1].endswith("4 ranks, ZeRO-1 over 4 of 4 data ranks")
    hybrid = [*zero, "parallel.zero.shard_size=2", "parallel.zero.offload=true"]
    assert short(compose(hybrid)).splitlines()[1].endswith("ZeRO-1 over 2 of 4 data ranks on the host")


def test_user_defined_layers_are_named_and_counted_as_built_in() -> None:
    builtin = short(compose([])).splitlines()
    one = short(compose(["model.mlp._target_=mine.MLP"])).splitlines()
    assert one == [builtin[0], "layers    mlp is mine.MLP; counted as the built-in one", *builtin[1:]]
    two = short(compose(["model.mlp._target_=mine.MLP", "model.attention={_target_: his.Attention, window: 4}"]))
    assert two.splitlines()[1] == "layers    attention is his.Attention, mlp is mine.MLP; counted as the built-in ones"


def test_a_count_of_one_is_singular_and_equal_bubbles_are_printed_once(monkeypatch):
    config = compose(["batch.global_size=1", "batch.micro_size=1"])
    lines = short(config).splitlines()
    assert lines[2].startswith("batch     1 sequence = 1 microbatch × 1")
    assert lines[3] == "schedule  1f1b, 1 stage; bubble 0.0%; at most 1 microbatch in flight"
    assert lines[4].startswith("memory    weights, gradients and optimizer state of the largest rank: ")
    monkeypatch.setattr(Layout, "timeline", replace(Layout(config).timeline, bubble=0.1, step_bubble=0.25))
    assert "; bubble 10.0% of a rank's own span, 25.0% of the whole step; " in short(config).splitlines()[3]


def test_each_data_phase_has_a_line_and_the_longest_determines_activations() -> None:
    stages = "data.phases=[{from_step:2,sequence_length:64},{from_step:5,blend:[{paths:[a],weight:1}]}]"
    plain = compose(["experiment=parity", "run.steps=9", "batch.global_size=8", "batch.sequence_length=32"])
    config = compose(
        ["experiment=parity", "run.steps=9", "batch.global_size=8", "batch.sequence_length=32", f"{stages}"]
    )
    assert short(config).splitlines()[3:6] == [
        "phases    steps 1–2: builtin; sequences of 32 tokens, 256 a step",
        "          steps 3–5: builtin; sequences of 64 tokens, 512 a step",
        "          steps 6–9: bin a 100.0%; sequences of 64 tokens, 512 a step",
    ]
    assert [each["from_step"] for each in as_record(config)["data_stages"]] == [0, 2, 5]
    longer = replace(plain, batch=replace(plain.batch, sequence_length=64))
    shares = [Layout(each).pipeline_ranks()[0].activation_bytes for each in (plain, config, longer)]
    assert shares[0] < shares[1] == shares[2]
