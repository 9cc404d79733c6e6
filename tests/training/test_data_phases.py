"""A run in data phases: stopped and resumed anywhere, on other layouts, with other phases; its records."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megastack.assemble.data import read_dataset
from megastack.assemble.loop import build_loop
from megastack.assemble.training import Training, build_training
from megastack.checkpoint.save import save
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.phases import PhasedLoader
from megastack.errors import CheckpointError, DataError
from megastack.mesh.mesh import Mesh
from megastack.models.profile import flops_per_token
from megastack.observe.folder import RunFolder
from megastack.testing.gather import gather_whole
from megastack.testing.ranks import run_ranks
from megastack.testing.training import composed
from megastack.training.signals import StopRequest
from tests.data.token_cases import write_by_hand
from tests.tiny_runs import events, overrides, rows

# Stops and resumes.

PHASES = "{from_step:2,sequence_length:24},{from_step:4,paths:[OTHER],sequence_length:8}"
MORE = ["run.steps=6", "optim.name=adamw", "optim.lr=0.01", "model.dropout=0.1"]


def tiny(folder: Path, phases: str, *more: str) -> TrainConfig:
    """A tiny run with these phases, in which OTHER is another text."""
    other = folder / "other.jsonl"
    other.write_text("".join(f'{{"text": "{n} plus {n} makes {2 * n}."}}\n' for n in range(40)))
    return composed(overrides(folder), MORE, f"data.phases=[{phases.replace('OTHER', str(other))}]", *more)


def steps_of(config: TrainConfig, cuts: list[int], folder: str) -> Any:
    """Steps from one checkpoint to the next; losses, norms and tokens of each, and the weights at the end."""
    seen = []
    for first, last in pairwise(cuts):
        training = build_training(config, Mesh.from_environment(mesh_shape(config), device="cpu"))
        if first:
            training.restore(Path(folder) / f"step_{first:08d}")
        for step in range(first, last):
            outcome = training.step(step)
            training.progress.step = step + 1
            training.progress.consumed_tokens += outcome.tokens
            seen.append((float(outcome.loss), float(outcome.grad_norm), training.progress.consumed_tokens))
        save(f"{folder}/step_{last:08d}", training.state(), training.mesh).wait()
    return seen, gather_whole(training.weight_items(), training.mesh)[0]


@pytest.mark.parametrize(("layout", "cuts"), [([], [0, 1, 2, 3, 4, 5, 6]), (["parallel.pp=2"], [0, 2, 5, 6])])
def test_a_run_stopped_in_and_between_phases_equals_the_uninterrupted_one_bitwise(
    layout: list[str], cuts: list[int], tmp_path: Path
) -> None:
    config = tiny(tmp_path, PHASES, *layout)
    ranks = mesh_shape(config).world_size
    expected, weights = run_ranks(steps_of, ranks, config, [0, 6], str(tmp_path / "straight"))[0]
    found, others = run_ranks(steps_of, ranks, config, cuts, str(tmp_path / "cut"))[0]
    assert found == expected
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())


def test_a_phase_continues_with_other_degrees(tmp_path: Path) -> None:
    expected, _ = run_ranks(steps_of, 1, tiny(tmp_path, PHASES), [0, 3, 6], str(tmp_path / "at"))[0]
    for layout in (["parallel.dp=2"], ["parallel.dp=2", "parallel.tp=2", "parallel.zero.stage=1"]):
        config = tiny(tmp_path, PHASES, *layout)
        found, _ = run_ranks(steps_of, mesh_shape(config).world_size, config, [3, 6], str(tmp_path / "at"))[0]
        assert [row[2] for row in found] == [row[2] for row in expected[3:]]
        for one, other in zip(found, expected[3:], strict=True):
            assert one == pytest.approx(other, rel=1e-10)


def sent(config: TrainConfig) -> list[int]:
    """Bytes that this rank sends to its neighbour in each step."""
    training, found = build_training(config, Mesh.from_environment(mesh_shape(config), device="cpu")), []
    for step in range(6):
        training.mesh.ledger.reset()
        training.step(step)
        found.append(training.mesh.ledger.total(axis="pp", op="send").payload_bytes)
    return found


def test_stage_inputs_have_the_length_of_the_phase(tmp_path: Path) -> None:
    for found in run_ranks(sent, 2, tiny(tmp_path, PHASES, "parallel.pp=2")):
        assert found[1] * 3 == found[3] * 2 == found[5] * 6 > 0


def test_rows_events_and_figures_follow_the_phases(tmp_path: Path) -> None:
    """Validation stays unchanged; FLOPs follow the sequence length."""
    config = tiny(tmp_path, PHASES, "run.validate_every=2", "checkpoint.every=3", "model.dropout=0")
    place, training = RunFolder(tmp_path / "run"), build_training(config, Mesh.single())
    place.path.mkdir()
    loop = build_loop(training, place, StopRequest())
    loop.recorder.peak_flops = 1e12
    loop.run()
    found = rows(place.path)
    assert [row["consumed_samples"] for row in found] == [4, 8, 12, 16, 20, 24]
    assert sum(row["tokens"] for row in found) == found[-1]["consumed_tokens"]
    assert all(row["tokens"] <= 4 * n for at, n in SIZES for row in found[at : at + 2]) and found[2]["tokens"] > 4 * 16
    flops = [row["mfu"] * 1e12 / row["tokens_per_s"] for row in found]
    assert flops == pytest.approx([flops_per_token(longer(config, n)) for _, n in SIZES for _ in range(2)])
    assert len({row["tokens"] for row in rows(place.path, "validation")}) == 1
    reported = [event for event in events(place.path) if event["name"] in ("stage", "end")]
    assert [(event["name"], event["step"]) for event in reported] == [("stage", 2), ("stage", 4), ("end", 6)]
    assert reported[0]["data"].endswith("sequences of 24 tokens") and "other.jsonl" in reported[1]["data"]
    assert 0 < reported[2]["data_s"] < reported[2]["train_s"]


SIZES = [(0, 16), (2, 24), (4, 8)]


def longer(config: TrainConfig, length: int) -> TrainConfig:
    return replace(config, batch=replace(config.batch, sequence_length=length))


# What a resume may change.


def test_weights_may_change_in_the_current_phase_and_not_in_one_that_is_over(tmp_path: Path) -> None:
    folder, rng = tmp_path, np.random.default_rng(1)
    for name in "ab":
        write_by_hand(folder / name, rng.integers(0, 256, (60, 17)).tolist(), 8)

    def training(first: int, second: int) -> Training:
        parts = [f"[{{paths:[{folder}/a],weight:1}},{{paths:[{folder}/b],weight:{w}}}]" for w in (first, second)]
        blend = [f"data.blend={parts[0]}", "data.source=builtin", "data.paths=[]"]
        return build_training(tiny(folder, f"{{from_step:2,blend:{parts[1]}}}", *blend), Mesh.single())

    before, path = training(1, 2), folder / "step_3"
    before.progress.step = 3
    save(path, before.state(), before.mesh).wait()
    changed = training(1, 5)
    changed.restore(path)
    assert [[change.begin for change in history] for history in changed.histories] == [[0], [8, 12]]
    loader = changed.step.loader
    assert isinstance(loader, PhasedLoader)
    numbers = np.concatenate([loader.sample_numbers(step) for step in range(6)])
    assert len(set(numbers.tolist())) == 24
    with pytest.raises(CheckpointError, match=r"data\.blend: its phase is over, so new weights would have no effect"):
        training(3, 2).restore(path)


def test_data_that_a_later_phase_cannot_use_are_rejected_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.stages\[0\], after step 2: .*nowhere\.jsonl"):
        read_dataset(tiny(tmp_path, f"{{from_step:2,paths:[{tmp_path}/nowhere.jsonl]}}"))
    with pytest.raises(DataError, match=r"data\.stages\[1\], after step 3: batch\.sequence_length=90000"):
        read_dataset(tiny(tmp_path, "{from_step:2,sequence_length:24},{from_step:3,sequence_length:90000}"))
    held_out_too_short = tiny(tmp_path, "{from_step:3,sequence_length:700}")
    described = read_dataset(held_out_too_short).describe().splitlines()
    assert [line.partition(":")[0] for line in described] == ["train", "validation", "after step 3"]
