"""Tiny random Hugging Face folders of every family, written with the safetensors library and no code of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB = 37
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
_GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 16,
    "n_head": 4,
    "n_inner": None,
    "n_positions": 32,
    "vocab_size": VOCAB,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "bos_token_id": 36,
}


def _new_style(values: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in ("rope_theta", "torch_dtype")}
    return kept | {"rope_parameters": parameters, "dtype": "float32"}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": LLAMA | {"num_key_value_heads": 4, "rope_scaling": None},
    "llama3": LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "llama3 of transformers 5": _new_style(LLAMA, LLAMA3_SCALING | {"rope_theta": 500000.0}),
    "llama with linear scaling": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama, tied, with biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": LLAMA
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64, "head_dim": 6},
    "qwen2": LLAMA
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
    | {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1, "rms_norm_eps": 1e-6},
    "qwen3": _new_style(LLAMA, {"rope_theta": 1e6, "rope_type": "default"})
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8},
    "gpt2": _GPT2,
    "gpt2, untied, wide": _GPT2 | {"tie_word_embeddings": False, "n_inner": 40},
}


def shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as the Hugging Face classes have them."""
    return _gpt2_shapes(values) if values["model_type"] == "gpt2" else _llama_shapes(values)


def _llama_shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, f, v = values["hidden_size"], values["intermediate_size"], values["vocab_size"]
    h, g = values["num_attention_heads"], values["num_key_value_heads"]
    k, kind = values.get("head_dim") or d // h, values["model_type"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not values["tie_word_embeddings"]:
        found["lm_head.weight"] = (v, d)
    for layer in range(values["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        sizes = {"q": (h * k, d), "k": (g * k, d), "v": (g * k, d), "o": (d, h * k)}
        found |= {f"{at}self_attn.{name}_proj.weight": size for name, size in sizes.items()}
        found |= {f"{at}mlp.{name}_proj.weight": (f, d) for name in ("gate", "up")} | {
            f"{at}mlp.down_proj.weight": (d, f)
        }
        if kind == "qwen3":
            found |= {f"{at}self_attn.{name}_norm.weight": (k,) for name in "qk"}
        biased = "qkv" if kind == "qwen2" else "qkvo" if values.get("attention_bias") else ""
        found |= {f"{at}self_attn.{name}_proj.bias": sizes[name][:1] for name in biased}
        if values.get("mlp_bias"):
            found |= {f"{at}mlp.{name}_proj.bias": (n,) for name, n in (("gate", f), ("up", f), ("down", d))}
    return found


def _gpt2_shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, v = values["n_embd"], values["vocab_size"]
    f = values["n_inner"] or 4 * d
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (v, d),
        "transformer.wpe.weight": (values["n_positions"], d),
    }
    if not values.get("tie_word_embeddings", True):
        found["lm_head.weight"] = (v, d)
    norms = ["transformer.ln_f"]
    for layer in range(values["n_layer"]):
        at = f"transformer.h.{layer}."
        norms += [at + "ln_1", at + "ln_2"]
        for name, (rows, columns) in {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, f),
            "mlp.c_proj": (f, d),
        }.items():
            found |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (columns,)}
    return found | {f"{name}.{part}": (d,) for name in norms for part in ("weight", "bias")}


def tensors(values: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors, large enough that each of them affects the logits."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (0.3 * torch.randn(shape, generator=generator) + ("norm" in name or "ln_" in name)).to(dtype)
        for name, shape in shapes(values).items()
    }


def write(folder: Path, values: dict[str, Any], named: dict[str, Tensor] | None = None, *, files: int = 1) -> Path:
    """A folder of one file, or of several with an index."""
    folder.mkdir(parents=True)
    named = tensors(values) if named is None else named
    (folder / "config.json").write_text(json.dumps(values))
    if files == 1:
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" for number, name in enumerate(named)}
    for file in set(where.values()):
        save_file({n: x for n, x in named.items() if where[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(x.nbytes for x in named.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder by name; no tensor is in two files."""
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert sum(map(len, parts)) == len({name for part in parts for name in part})
    return {name: tensor for part in parts for name, tensor in part.items()}


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same names, dtypes, shapes and bits."""
    return first.keys() == second.keys() and all(
        x.dtype == second[name].dtype and torch.equal(x, second[name]) for name, x in first.items()
    )
