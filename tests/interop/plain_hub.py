"""Reference implementation of the Hugging Face model classes for the tests, with loops and complex numbers.

It shares no code with the package. Attention handles one query at a time, and a rotary pair (i, i + K/2) is one complex
number that is rotated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def plain_logits(values: dict[str, Any], named: Tensors, tokens: Tensor) -> Tensor:
    """Logits (S, V) of one sequence in fp64."""
    named = {name: tensor.double() for name, tensor in named.items()}
    return _gpt2(values, named, tokens) if values["model_type"] == "gpt2" else _llama(values, named, tokens)


def _llama(values: dict[str, Any], w: Tensors, tokens: Tensor) -> Tensor:
    eps, heads, groups = values["rms_norm_eps"], values["num_attention_heads"], values["num_key_value_heads"]
    width = values.get("head_dim") or values["hidden_size"] // heads
    rotations = [_rotations(values, width, position) for position in range(len(tokens))]
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(values["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        b = {name.removeprefix(at): tensor for name, tensor in w.items() if name.startswith(at)}
        y = _rms(x, b["input_layernorm.weight"], eps)
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            q, k, v = (
                _rows(y, b, f"self_attn.{name}_proj", number * width, width)
                for name, number in (("q", head), ("k", group), ("v", group))
            )
            if "self_attn.q_norm.weight" in b:
                q, k = _rms(q, b["self_attn.q_norm.weight"], eps), _rms(k, b["self_attn.k_norm.weight"], eps)
            outputs.append(_attend(_rotated(q, rotations), _rotated(k, rotations), v))
        x = x + _rows(torch.cat(outputs, -1), b, "self_attn.o_proj")
        y = _rms(x, b["post_attention_layernorm.weight"], eps)
        gate, up = _rows(y, b, "mlp.gate_proj"), _rows(y, b, "mlp.up_proj")
        x = x + _rows(gate / (1 + torch.exp(-gate)) * up, b, "mlp.down_proj")
    return _rms(x, w["model.norm.weight"], eps) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def _gpt2(values: dict[str, Any], w: Tensors, tokens: Tensor) -> Tensor:
    width, hidden = values["n_embd"] // values["n_head"], values["n_embd"]
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: len(tokens)]
    for layer in range(values["n_layer"]):
        at = f"transformer.h.{layer}."
        b = {name.removeprefix(at): tensor for name, tensor in w.items() if name.startswith(at)}
        qkv = _layer_norm(x, b, "ln_1") @ b["attn.c_attn.weight"] + b["attn.c_attn.bias"]
        outputs = []
        for head in range(values["n_head"]):
            q, k, v = (qkv[:, part * hidden + head * width :][:, :width] for part in range(3))
            outputs.append(_attend(q, k, v))
        x = x + torch.cat(outputs, -1) @ b["attn.c_proj.weight"] + b["attn.c_proj.bias"]
        y = _layer_norm(x, b, "ln_2") @ b["mlp.c_fc.weight"] + b["mlp.c_fc.bias"]
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ b["mlp.c_proj.weight"] + b["mlp.c_proj.bias"]
    return _layer_norm(x, w, "transformer.ln_f") @ w.get("lm_head.weight", w["transformer.wte.weight"]).T


def _rows(x: Tensor, w: Tensors, name: str, start: int = 0, count: int | None = None) -> Tensor:
    rows = slice(start, None if count is None else start + count)
    y = x @ w[f"{name}.weight"][rows].T
    return y + w[f"{name}.bias"][rows] if f"{name}.bias" in w else y


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = []
    for at in range(len(q)):
        scores = k[: at + 1] @ q[at] / math.sqrt(q.shape[-1])
        rows.append(torch.softmax(scores, 0) @ v[: at + 1])
    return torch.stack(rows)


def _rotations(values: dict[str, Any], width: int, position: int) -> Tensor:
    """The unit complex numbers by which one position rotates each pair."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or values["rope_theta"]
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    angles = []
    for pair in range(width // 2):
        frequency = theta ** (-2 * pair / width)
        if kind == "linear":
            frequency /= scaling["factor"]
        if kind == "llama3":
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            frequency *= kept + (1 - kept) / scaling["factor"]
        angles.append(position * frequency)
    return torch.polar(torch.ones(width // 2, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64))


def _rotated(x: Tensor, rotations: list[Tensor]) -> Tensor:
    half = x.shape[-1] // 2
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.stack(rotations)
    return torch.cat((pairs.real, pairs.imag), -1)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _layer_norm(x: Tensor, w: Tensors, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]
