"""Import and export of Hugging Face folders: the same bits after a round trip and the same logits, on any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from megastack.assemble.stages import build_stages
from megastack.checkpoint.load import load
from megastack.checkpoint.save import save
from megastack.checkpoint.state import State, model_items
from megastack.config.reading import from_yaml
from megastack.config.schema import TrainConfig
from megastack.interop.hub_config import ARCHITECTURES, read_hub_config
from megastack.interop.hub_folder import HubFolder
from megastack.interop.proof import decoder_logits, proof_tokens
from megastack.interop.reference import hub_logits
from megastack.interop.stored_weights import StoredWeights, fill_
from megastack.interop.transfer import export_model, import_model
from megastack.interop.weight_map import weights_of
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.stages import configured_schedule
from megastack.testing.ranks import run_ranks
from tests.interop.hub_folders import CONFIGS, VOCAB, same_bits, stored, tensors, write
from tests.interop.plain_hub import plain_logits

LAYOUT = {"tp": 2, "pp": 2, "dp": 1, "layers_per_stage": [1, 2]}


def imported_config(folder: Path, **sections: Any) -> TrainConfig:
    """A run of an imported model; the command line's use of the YAML is tested with the commands."""
    (file,) = (folder / "model").glob("*.yaml")
    given = {"run": {"steps": 1}, "batch": {"global_size": 4, "sequence_length": 16}} | sections
    return from_yaml(OmegaConf.to_yaml(OmegaConf.create(given | {"model": OmegaConf.load(file)})))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_round_trip_changes_no_bit_and_no_logit(family: str, tmp_path: Path) -> None:
    values = CONFIGS[family]
    source = write(tmp_path / "source", values, files=3)
    done = import_model(source, tmp_path / "in", proof="reference")
    assert done.proof is not None and done.proof.difference < 1e-10
    config = imported_config(tmp_path / "in")
    kind = ARCHITECTURES[values["model_type"]]

    tokens = proof_tokens(config)
    own = decoder_logits(
        config, weights_of(config, kind), StoredWeights(tmp_path / "in" / "weights"), tokens, torch.float64
    )
    plain = torch.stack([plain_logits(values, tensors(values), row) for row in tokens])
    assert float(plain.std()) > 0.1
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-10 * float(plain.abs().max()))

    out = tmp_path / "out"
    name = None if values["model_type"] != "mistral" else "mistral"
    export_model(tmp_path / "in" / "weights", out, config, architecture=name, proof="reference")
    assert same_bits(stored(out), stored(source))
    again = json.loads((out / "config.json").read_text())
    assert read_hub_config(again).options == read_hub_config(values).options == config.model
    assert again["architectures"] == values["architectures"]
    assert again["bos_token_id"] == values["bos_token_id"]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_packages_reference_agrees_with_the_tests_reference(family: str, tmp_path: Path) -> None:
    values = CONFIGS[family]
    folder = HubFolder(write(tmp_path / "x", values))
    tokens = torch.arange(12) * 5 % VOCAB
    torch.testing.assert_close(
        hub_logits(folder, tokens[None])[0], plain_logits(values, tensors(values), tokens), rtol=1e-11, atol=1e-11
    )


def load_both_ways(root: Path, family: str) -> bool:
    """On every rank, boxes from the checkpoint and from the folder itself are identical; then save from here."""
    config = imported_config(root / "in", parallel=LAYOUT)
    mesh = Mesh.from_environment(MeshShape(pp=2, tp=2))
    stages = build_stages(config, mesh, configured_schedule(config, mesh.shape))
    items = model_items(stages, mesh)
    with torch.no_grad():
        load(root / "in" / "weights", State(items), mesh, weights_only=True)
        first = {item.name: [x.clone() for _, x in item.boxes] for item in items}
        named = [pair for stage in stages for pair in stage.named_parameters()]
        rows = [len(p) for name, p in named if name in ("embedding.weight", "head.weight")]
        assert rows == [64]  # 37 are 128 with padding, over tp 2, on the first stage and on the last
        for item in items:
            for _, x in item.boxes:
                x.fill_(7)
        kind = ARCHITECTURES[CONFIGS[family]["model_type"]]
        fill_(items, weights_of(config, kind), HubFolder(root / "source").read)
    identical = all(torch.equal(x, y) for item in items for (_, x), y in zip(item.boxes, first[item.name], strict=True))
    save(root / "step", State(items), mesh)
    return identical and len(items) > 0


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_tp_2_and_uneven_stages_load_boxes_and_export_the_same_bits(family: str, tmp_path: Path) -> None:
    write(tmp_path / "source", CONFIGS[family])
    import_model(tmp_path / "source", tmp_path / "in", proof="none")
    assert run_ranks(load_both_ways, 4, tmp_path, family) == [True] * 4
    export_model(tmp_path / "step", tmp_path / "out", imported_config(tmp_path / "in"), proof="reference")
    assert same_bits(stored(tmp_path / "out"), stored(tmp_path / "source"))
    rows = {name: tuple(x.shape) for name, x in stored(tmp_path / "out").items() if x.shape[0] == VOCAB}
    assert set(rows) >= {"transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"}


def test_export_splits_files_at_the_requested_size_and_lists_each_tensor_once(tmp_path: Path) -> None:
    source = write(tmp_path / "source", CONFIGS["llama3"])
    import_model(source, tmp_path / "in", proof="none")
    config = imported_config(tmp_path / "in")
    done = export_model(tmp_path / "in" / "weights", tmp_path / "out", config, shard_bytes=4000, proof="reference")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(done.files) > 3 and set(index["weight_map"].values()) == set(done.files)
    assert index["weight_map"].keys() == tensors(CONFIGS["llama3"]).keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors(CONFIGS["llama3"]).values())
    assert same_bits(stored(tmp_path / "out"), stored(source))


def test_dtypes_are_kept_or_converted(tmp_path: Path) -> None:
    values = CONFIGS["qwen3"]
    source = write(tmp_path / "source", values, tensors(values, torch.bfloat16))
    import_model(source, tmp_path / "kept", proof="reference")
    import_model(source, tmp_path / "wide", dtype="fp32", proof="reference")
    assert StoredWeights(tmp_path / "kept" / "weights").dtype("norm.weight") == torch.bfloat16
    assert StoredWeights(tmp_path / "wide" / "weights").dtype("norm.weight") == torch.float32
    config = imported_config(tmp_path / "wide")
    export_model(tmp_path / "wide" / "weights", tmp_path / "out", config, dtype="bf16", proof="reference")
    assert same_bits(stored(tmp_path / "out"), stored(source))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_old_names_and_computed_buffers_and_an_equal_tied_head(tmp_path: Path) -> None:
    named = tensors(CONFIGS["gpt2"])
    bare = {name.removeprefix("transformer."): x for name, x in named.items()} | {"h.0.attn.bias": torch.ones(1, 1)}
    import_model(write(tmp_path / "bare", CONFIGS["gpt2"], bare), tmp_path / "in", proof="reference")
    values = CONFIGS["qwen2"]
    tied = tensors(values)
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"].clone()
    tied["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    import_model(write(tmp_path / "tied", values, tied), tmp_path / "tied in", proof="reference")
    names = StoredWeights(tmp_path / "tied in" / "weights").names
    assert "head.weight" not in names and "embedding.weight" in names


def test_tokenizer_files_and_token_ids_are_exported(tmp_path: Path) -> None:
    source = write(tmp_path / "source", CONFIGS["llama2"])
    files: dict[str, Any] = {
        "tokenizer.json": {"model": {"vocab": {"a": 0, "b": 36}}, "added_tokens": []},
        "tokenizer_config.json": {"eos_token": "b"},
    }
    for name, content in files.items():
        (source / name).write_text(json.dumps(content))
    import_model(source, tmp_path / "in", proof="none")
    export_model(tmp_path / "in" / "weights", tmp_path / "out", imported_config(tmp_path / "in"), proof="none")
    assert {name: json.loads((tmp_path / "out" / name).read_text()) for name in files} == files
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["max_position_embeddings"]) == (2, 64)
