"""An imported model is trained on another layout from one command line and exported from the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megastack.cli import main
from megastack.interop.hub_folder import HubFolder
from megastack.interop.reference import hub_logits
from tests.interop.hub_folders import LLAMA, stored, tensors, write
from tests.tiny_runs import status, text


def test_training_continues_from_imported_weights_and_export_finds_the_run(tmp_path: Path) -> None:
    values = LLAMA | {"vocab_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": True}
    source = write(tmp_path / "small", values, tensors(values, torch.bfloat16))
    imported = tmp_path / "in"
    assert main(["import", str(source), "--out", str(imported), "--proof", "none"]) == 0
    place = ["--config-dir", str(imported), "model=small", f"checkpoint.load_weights={imported / 'weights'}"]
    data = ["data.source=jsonl", f"data.paths=[{text(tmp_path)}]", f"run.dir={tmp_path / 'run'}"]
    size = ["run.steps=1", "batch.global_size=2", "batch.sequence_length=16", "observe.tensorboard=false"]
    layout = ["parallel.pp=2", "parallel.layers_per_stage=[2,0]", "optim.lr=0", "run.validate_every=0"]
    assert main(["train", *place, *data, *size, *layout]) == 0
    assert status(tmp_path / "run")["status"] == "completed"

    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--proof", "reference", "--dtype", "bf16"]) == 0
    before, after = stored(source), stored(out)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 16
    tokens = torch.arange(9)[None]
    assert torch.equal(hub_logits(HubFolder(source), tokens), hub_logits(HubFolder(out), tokens))
