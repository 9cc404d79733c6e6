"""Generation between training steps: it uses the current weights and does not affect training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastack.assemble.training import build_training
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.testing.ranks import run_ranks
from megastack.testing.training import composed
from tests.tiny_runs import events, overrides, train

PROMPTS = [[65, 66, 67], [70]]


def trained(config: TrainConfig, *, generates: bool) -> tuple[list[float], list[Any]]:
    """Losses of three steps, and the texts between them."""
    training = build_training(config, Mesh.from_environment(mesh_shape(config), device="cpu"))
    losses, texts = [], []
    for step in range(3):
        losses.append(float(training.step(step).loss))
        if generates:
            state = torch.get_rng_state()
            texts.append([text.ids for text in training.generator()(PROMPTS, max_new_tokens=5)])
            assert torch.equal(state, torch.get_rng_state()) and all(stage.training for stage in training.stages)
    return losses, texts


def test_generation_does_not_affect_training(tmp_path: Path) -> None:
    common = ["optim.lr=0.1", "model.dropout=0.1", "model.tied=true"]
    config = composed(overrides(tmp_path), *common)
    losses, texts = trained(config, generates=True)
    assert losses == trained(config, generates=False)[0]
    assert texts[0] != texts[2]
    grid = ["parallel.dp=2", "parallel.tp=2", "parallel.zero.stage=1", "recompute.mode=selective"]
    for found in run_ranks(trained_and_generated, 4, composed(overrides(tmp_path), *common, *grid)):
        assert found[1] == texts
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), rtol=1e-9, atol=0)


def trained_and_generated(config: TrainConfig) -> tuple[list[float], list[Any]]:
    return trained(config, generates=True)


@pytest.mark.parametrize("layout", [["parallel.tp=2"], []], ids=["tp2", "one"])
def test_a_sample_is_written_at_each_validation(layout: list[str], tmp_path: Path) -> None:
    more = ["run.steps=2", "run.validate_every=1", "run.sample_prompt=2 times", "model.positions=learned"]
    assert train(tmp_path, *more, *layout) == 0
    samples = [event for event in events(tmp_path / "run") if event["name"] == "sample"]
    assert [event["step"] for event in samples] == [1, 2]
    assert all(event["prompt"] == "2 times" and isinstance(event["text"], str) for event in samples)


def test_a_sample_prompt_that_is_too_long_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "run.sample_prompt=2 times 2 is four", "model.positions=learned") == 78
    assert "run.sample_prompt='2 times 2 is four': prompt 0: its 17 tokens" in capsys.readouterr().err
