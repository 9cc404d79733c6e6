"""With transformers itself: it saves, megastack imports; megastack exports, it loads. Skipped if not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megastack.interop.hub_folder import HubFolder
from megastack.interop.proof import proof_tokens
from megastack.interop.reference import hub_logits
from megastack.interop.transfer import export_model, import_model
from tests.interop.hub_folders import CONFIGS, LLAMA3_SCALING, same_bits, stored
from tests.interop.test_transfer import imported_config

transformers = pytest.importorskip("transformers")
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4} | {
    "num_key_value_heads": 2, "vocab_size": 37, "max_position_embeddings": 64, "initializer_range": 0.3
}  # fmt: skip
ROPE = LLAMA3_SCALING | {"rope_theta": 5e5}
MODELS = {
    "Llama": SIZES | {"rope_parameters": ROPE},
    "Mistral": SIZES | {"sliding_window": None, "head_dim": 6},
    "Qwen2": SIZES | {"tie_word_embeddings": True},
    "Qwen3": SIZES | {"head_dim": 8},
    "GPT2": {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 32, "vocab_size": 37, "initializer_range": 0.3}
    | {"bos_token_id": 0, "eos_token_id": 0},
}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_that_it_saves_survives_a_round_trip(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = MODELS[family]
    config = getattr(transformers, f"{family}Config")(**values)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    model.save_pretrained(tmp_path / "source", max_shard_size="8KB")
    done = import_model(tmp_path / "source", tmp_path / "in", proof="transformers")
    assert done.proof is not None and done.proof.difference <= 1e-5 * done.proof.scale
    assert done.unread == ()
    run = imported_config(tmp_path / "in")
    name = family.lower() if family == "Mistral" else None
    back = export_model(tmp_path / "in" / "weights", tmp_path / "out", run, architecture=name, proof="transformers")
    assert back.proof is not None and back.proof.difference <= 1e-5 * back.proof.scale
    assert same_bits(stored(tmp_path / "out"), stored(tmp_path / "source"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model)
    for key in ("bos_token_id", "eos_token_id"):
        assert getattr(again.config, key) == getattr(again.generation_config, key) == getattr(config, key)
    tokens = proof_tokens(run)
    with torch.no_grad():
        torch.testing.assert_close(again.to(torch.float32)(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_it_agrees_with_the_reference_on_files_of_either_version(family: str, tmp_path: Path) -> None:
    from tests.interop.hub_folders import write

    folder = write(tmp_path / "x", CONFIGS[family])
    tokens = (torch.arange(16) * 5 % 37)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.float32).eval()
    with torch.no_grad():
        theirs = model(tokens).logits
    ours = hub_logits(HubFolder(folder), tokens)
    torch.testing.assert_close(theirs.double(), ours, rtol=0, atol=1e-5 * float(ours.abs().max()))


class _NeverFp32(TorchFunctionMode):
    """Keep the library's casts to fp32 (norms, rotary tables, softmax) in fp64, so that only rounding is left."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_wider, args), **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_the_librarys_up_to_rounding_in_fp64(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**MODELS[family], attn_implementation="eager")
    with _NeverFp32():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.save_pretrained(tmp_path / "source")
    tokens = (torch.arange(32) * 7 % 37).view(2, 16)
    with torch.no_grad(), _NeverFp32():
        theirs = model(tokens).logits
    assert theirs.dtype == torch.float64
    done = import_model(tmp_path / "source", tmp_path / "in", proof="reference")
    assert done.proof is not None and done.proof.dtype == "float64" and done.proof.difference <= 1e-10
    ours = hub_logits(HubFolder(tmp_path / "source"), tokens)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
