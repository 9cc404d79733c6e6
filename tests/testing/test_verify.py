"""verify accepts correct layers; of wrong ones it reports what differs, by how much and why."""

from __future__ import annotations

import json
import re

import pytest

from megastack.errors import ConfigError, PlacementError
from megastack.testing.finding import Finding, Held, finding_text
from megastack.testing.ranks import RankFailure
from megastack.testing.training import composed
from megastack.testing.verify import PACKAGE, Verdict, Verifier, failure_summary

HERE = "tests.testing.wrong_layers"
BASE = [
    *("experiment=parity", "model.layers=2", "model.hidden=16", "model.ffn=16", "model.vocab_multiple=8"),
    *("batch.global_size=2", "batch.sequence_length=8"),
]
TEXT = " ".join(["rank stage tensor the of pipeline sum a gradient layout and is"] * 4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} {TEXT}"}) + "\n" for number in range(20)))
    return ["data.source=jsonl", f"data.paths=[{path}]"]


def verify(data: list[str], *overrides: str, steps: int = 1) -> Verdict:
    verifier = Verifier(composed(BASE, data, overrides), steps=steps)
    return verifier.check(verifier.own_layout())


def mlp(name: str) -> str:
    return f"model.mlp={{_target_: {HERE}.{name}}}"


def test_a_correct_layer_is_equal_with_adamw_and_sgd_in_fp64_at_any_configured_precision(data: list[str]) -> None:
    layout = ("parallel.tp=2", "parallel.pp=2", "parallel.dp=2")
    verdict = verify(data, mlp("GainMLP"), *layout, "optim=adamw", "precision=fp32", steps=2)
    assert verdict.status == "equal", verdict
    assert set(verdict.worst) == {"adamw", "sgd"}
    assert verdict.config.precision.compute == "fp64"
    assert max(x for worst in verdict.worst.values() for x in worst.values()) < 1e-11


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.zero.stage=2", "parallel.tp=2", "model.tied=true", "optim=adamw"],
        ["parallel.zero.stage=3", "parallel.pp=2", "model.tied=true"],
        ["parallel.zero.stage=3", "parallel.dp=4", "parallel.zero.shard_size=2"],
    ],
    ids=" ".join,
)
def test_a_correct_layer_is_equal_with_parameters_sharded_over_data_ranks(data: list[str], layout: list[str]) -> None:
    verdict = verify(data, mlp("GainMLP"), "batch.global_size=4", "parallel.dp=2", *layout)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("stage", [1, 3])
def test_errors_are_explained_with_parameters_sharded_over_data_ranks_too(data: list[str], stage: int) -> None:
    layout = ("parallel.dp=2", "parallel.tp=2", f"parallel.zero.stage={stage}")
    undeclared = verify(data, mlp("UndeclaredGain"), *layout).finding
    assert undeclared is not None
    assert undeclared.name == "blocks.1.mlp.gain"
    assert "undeclared partial" in (undeclared.cause or "")
    early = verify(data, mlp("EarlyBias"), *layout).finding
    assert early is not None
    assert (early.name, early.owner) == ("blocks.0.mlp.down", "EarlyRow")
    assert "off by exactly 1 × blocks.0.mlp.down.bias" in (early.cause or "")


def test_an_undeclared_partial_gradient_is_named_although_the_placements_are_valid(data: list[str]) -> None:
    verdict = verify(data, mlp("UndeclaredGain"), "parallel.tp=2")
    assert verdict.status == "differs"
    finding = verdict.finding
    assert finding is not None
    assert (finding.kind, finding.name, finding.step) == ("gradient", "blocks.1.mlp.gain", 0)
    assert finding.also == ("blocks.0.mlp.gain",)
    assert finding.owner == "UndeclaredGain"
    assert finding.cause is not None
    assert finding.cause.startswith("undeclared partial gradient over tp")


def test_it_is_found_on_sharded_heads_without_sequence_parallelism_and_beside_other_axes(data: list[str]) -> None:
    own = f"model.attention={{_target_: {HERE}.UndeclaredScale}}"
    layout = ("parallel.tp=2", "parallel.dp=2", "parallel.sequence_parallel=false")
    finding = verify(data, own, *layout).finding
    assert finding is not None
    assert finding.name == "blocks.1.attention.scale"
    assert "undeclared partial" in (finding.cause or "")


def test_a_complete_gradient_that_is_declared_partial_is_t_times_the_reference(data: list[str]) -> None:
    finding = verify(data, mlp("OverdeclaredGain"), "parallel.tp=2", "parallel.sequence_parallel=false").finding
    assert finding is not None
    assert finding.name == "blocks.1.mlp.gain"
    assert finding.ratio == pytest.approx(2.0)
    assert "declared partial over tp, but complete on every rank: it is exactly 2 times" in (finding.cause or "")


@pytest.mark.parametrize(
    "layout", [["parallel.tp=4"], ["parallel.tp=2", "parallel.sequence_parallel=false"]], ids=" ".join
)
def test_a_bias_added_before_the_reduction_is_recognised_by_its_multiple(data: list[str], layout: list[str]) -> None:
    finding = verify(data, mlp("EarlyBias"), *layout).finding
    assert finding is not None
    assert (finding.kind, finding.name, finding.owner) == ("module", "blocks.0.mlp.down", "EarlyRow")
    extra = 3 if "parallel.tp=4" in layout else 1
    assert f"off by exactly {extra} × blocks.0.mlp.down.bias" in (finding.cause or "")


def test_a_wrong_forward_names_the_module_whose_code_is_wrong_and_not_the_linear_layer_in_it(data: list[str]) -> None:
    finding = verify(data, mlp("LocalNorm"), "parallel.tp=2", "parallel.pp=2").finding
    assert finding is not None
    assert (finding.kind, finding.name) == ("module", "blocks.0.mlp")
    assert finding.relative is not None
    assert finding.relative > 1e-6


IMPURE = "tests.testing.impure_layers"
TP, ROWS = ["parallel.tp=2"], ["parallel.tp=2", "parallel.sequence_parallel=false"]
OWN, DRAWS = (
    "the error is in its own code: it depends on the rank, or treats this rank's part",
    "draws from torch's generator",
)


@pytest.mark.parametrize(
    ("layer", "layout", "words"),
    [
        ("attention.LocalHeads", TP, OWN),
        ("attention.LocalHeads", [*ROWS, "parallel.pp=2"], OWN),
        ("mlp.LocalFeatures", [*TP, "recompute.mode=full"], OWN),
        ("mlp.RankConstant", ROWS, OWN),
        ("mlp.RankConstant", ["parallel.dp=2"], OWN),
        ("mlp.WrongDim", TP, OWN),
        ("block.LocalBlock", [*TP, "parallel.dp=2", "parallel.zero.stage=3", "batch.global_size=4"], OWN),
        (
            "mlp.OneRankPair",
            ROWS,
            "missing reduction over tp.*inside it, blocks.0.mlp.down .RowParallelLinear. diff",
        ),
        ("mlp.Dropping", ROWS, f"it {DRAWS}"),
        ("mlp.Dropping", ["parallel.pp=2"], f"it {DRAWS}"),
        ("mlp.Dropping", [], f"it {DRAWS}"),
        ("mlp.DroppingModule", TP, f"blocks.0.mlp.drop .Dropout. {DRAWS}"),
        ("attention.DroppingHeads", TP, f"it {DRAWS}"),
        ("mlp.PythonNoise", TP, "it draws from Python's random module"),
        ("mlp.NumpyNoise", TP, "it draws from NumPy's global generator"),
        ("mlp.Clock", TP, "it is not deterministic"),
        ("mlp.Counting", ["parallel.dp=2"], "it keeps state between calls"),
        ("mlp.Counting", [*TP, "recompute.mode=full"], "it keeps state between calls"),
    ],
    ids=str,
)
def test_the_users_class_is_named_with_what_it_depends_on(
    data: list[str], layer: str, layout: list[str], words: str
) -> None:
    part, _, name = layer.partition(".")
    finding = verify(data, f"model.{part}={{_target_: {IMPURE}.{name}}}", *layout).finding
    assert finding is not None
    place = "blocks.0" if part == "block" else f"blocks.0.{part}"
    assert (finding.kind, finding.owner) == ("module", name)
    assert finding.name in (place, place.replace("blocks.0", "blocks.1"))
    assert re.search(words, finding.cause or ""), finding.cause


def test_a_backward_that_draws_is_found_without_a_more_specific_cause(data: list[str]) -> None:
    finding = verify(data, f"model.mlp={{_target_: {IMPURE}.NoisyBackward}}", *TP).finding
    assert finding is not None
    assert (finding.kind, finding.module, finding.owner) == ("gradient", "blocks.1.mlp", "NoisyBackward")
    assert (
        "right at the output of blocks.1.mlp (NoisyBackward) and wrong at its input: the error is in its own code"
        in (finding.cause or "")
    )


def test_a_parameter_of_a_packaged_layer_is_attributed_to_the_users_class_that_built_it(data: list[str]) -> None:
    finding = verify(data, f"model.mlp={{_target_: {IMPURE}.WholeNorm}}", *TP).finding
    assert finding is not None
    assert (finding.name, finding.owner) == ("blocks.1.mlp.norm.weight", "WholeNorm")
    assert "undeclared partial gradient over tp" in (finding.cause or "")


@pytest.mark.parametrize(
    ("name", "words"), [("Bent", None), ("OneRankPair", r"returns \(1, 8, 16\) for an input of \(1, 4, 16\)")]
)
def test_a_layout_that_does_not_run_names_the_users_class(data: list[str], name: str, words: str | None) -> None:
    verdict = verify(data, f"model.mlp={{_target_: {IMPURE}.{name}}}", *TP)
    assert verdict.status == "failed"
    finding = verdict.finding
    assert finding is not None
    assert (finding.name, finding.owner) == ("blocks.0.mlp", name)
    assert re.search(words, finding.cause or "") if words else finding.cause is None


def test_a_missing_reduction_is_recognised_by_the_sum(data: list[str]) -> None:
    finding = verify(data, mlp("NoReduction"), "parallel.tp=2", "parallel.sequence_parallel=false").finding
    assert finding is not None
    assert finding.name == "blocks.0.mlp"
    assert "missing reduction over tp" in (finding.cause or "")


def test_a_layout_that_does_not_run_names_the_module_that_returns_another_shape(data: list[str]) -> None:
    verdict = verify(data, mlp("NoReduction"), "parallel.tp=2")
    assert verdict.status == "failed"
    assert "RuntimeError" in (verdict.reason or "")
    assert verdict.finding is not None
    assert "blocks.0.mlp returns (1, 8, 16) for an input of (1, 4, 16)" in (verdict.finding.cause or "")


def test_a_wrong_backward_names_the_first_wrong_gradient_and_the_module_at_fault(data: list[str]) -> None:
    finding = verify(data, mlp("NoCopy"), "parallel.tp=2", "parallel.sequence_parallel=false").finding
    assert finding is not None
    assert (finding.kind, finding.name, finding.module) == ("gradient", "blocks.1.mlp_norm.weight", "blocks.1.mlp")
    assert "copy_to" in (finding.cause or "")


def test_a_small_error_of_a_gradient_on_one_rank_is_found(data: list[str]) -> None:
    finding = verify(data, mlp("Rounded"), "parallel.tp=2", "parallel.sequence_parallel=false").finding
    assert finding is not None
    assert finding.name == "blocks.1.mlp.gain"
    assert finding.cause is None


def test_a_failure_shows_the_users_line_before_the_one_of_the_package() -> None:
    inner = f"{PACKAGE}/layers/linear.py"
    lines = [
        f'File "{inner}", line 1, in a',
        'File "/home/me/mine.py", line 2, in forward',
        f'File "{inner}", line 3, in b',
    ]
    failure = RankFailure("\n".join(["rank 1 failed", *lines, f'File "{inner}", line 4, in c']), 1, ValueError("no"))
    assert failure_summary(failure).splitlines() == [
        "rank 1: ValueError: no",
        'File "/home/me/mine.py", line 2, in forward',
        f'File "{inner}", line 4, in c',
    ]


def test_a_parameter_without_a_placement_is_rejected(data: list[str]) -> None:
    verifier = Verifier(composed(BASE, data, mlp("Undeclared"), "parallel.tp=2"), steps=1)
    with pytest.raises(PlacementError, match=r"blocks.0.mlp.extra: has no placement"):
        verifier.check(verifier.own_layout())


def test_too_many_ranks_for_one_machine_are_rejected(data: list[str]) -> None:
    verifier = Verifier(composed("model=llama3_8b", "parallel.tp=8", "parallel.pp=16", data, "batch.sequence_length=8"))
    with pytest.raises(ConfigError, match=r"ranks=128: must be at most 64"):
        verifier.own_layout()


@pytest.mark.full
def test_every_layout_of_four_ranks_is_equal_for_a_correct_layer(data: list[str]) -> None:
    verifier = Verifier(composed(BASE, data, mlp("GainMLP"), "batch.global_size=8"), steps=2)
    verdicts = [verifier.check(layout) for layout in verifier.layouts(4)]
    assert len(verdicts) > 20
    assert {verdict.status for verdict in verdicts} == {"equal"}


def test_persistent_buffers_are_compared_as_weights_are(data: list[str]) -> None:
    def layer(name: str) -> tuple[str, str]:
        return f"model.mlp={{_target_: tests.buffer_layers.{name}}}", "parallel.sequence_parallel=false"

    assert verify(data, *layer("TrackingMLP"), "parallel.tp=2").status == "equal"
    verdict = verify(data, *layer("HiddenMLP"), "parallel.tp=2")
    assert verdict.status == "differs" and verdict.finding is not None
    assert (verdict.finding.kind, verdict.finding.name) == ("weight", "blocks.0.mlp.quiet")
    text = finding_text(verdict.finding)
    assert text.startswith("differs  the buffer blocks.0.mlp.quiet (HiddenMLP), at step 1\n")
    assert "gradient" not in text and "reduce what updates it" in text


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ("trained", "the weight a.b after step 2, although its gradient matches"),
        ("frozen", "the frozen weight a.b, at step 2"),
        ("buffer", "the buffer a.b, at step 2"),
        ("missing", "the weight a.b, which no rank holds"),
    ],
)
def test_a_gradient_is_mentioned_only_of_a_trained_weight(held: Held, words: str) -> None:
    text = finding_text(Finding("weight", "a.b", 1, 0.5, held=held))
    assert text.splitlines()[0] == f"differs  {words}"


def test_parameters_sharded_over_data_ranks_are_compared_and_named(data: list[str]) -> None:
    layout = ("parallel.dp=2", "parallel.tp=2", "parallel.zero.stage=3")
    assert verify(data, mlp("GainMLP"), *layout).status == "equal"
    finding = verify(data, mlp("UndeclaredGain"), *layout).finding
    assert finding is not None and finding.name == "blocks.1.mlp.gain"
    assert finding.cause is not None and finding.cause.startswith("undeclared partial gradient over tp")
