"""An independent implementation of the Hugging Face model classes in a few lines of torch, for comparing logits.

It reads ``config.json``, with the defaults of its class, and the stored tensors with their own names and shapes. It
shares no code with the mapping of names or options, so a wrong row order, convention or key changes the logits. One
block is in memory at a time. It supports neither training nor generation.

Shapes: B batch, S sequence, D hidden, H heads, G kv groups, K head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.interop.config_keys import with_defaults
from megastack.interop.hub_folder import HubFolder

Get = Callable[[str], Tensor]


def hub_logits(folder: HubFolder, tokens_BS: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute the logits (B, S, V) of a folder with one of the known architectures."""

    def get(name: str) -> Tensor:
        return folder.tensor(name).to(dtype)

    values = with_defaults(folder.config)
    with torch.no_grad():
        return _gpt2(values, get, tokens_BS) if values["model_type"] == "gpt2" else _llama(values, get, tokens_BS)


def _llama(values: Mapping[str, Any], get: Get, tokens_BS: Tensor) -> Tensor:
    eps = values["rms_norm_eps"]
    angles_SK = _angles(values, tokens_BS.shape[1])
    x = get("model.embed_tokens.weight")[tokens_BS]
    for layer in range(values["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        x = x + _attention(values, get, at + "self_attn.", _rms(x, get(at + "input_layernorm.weight"), eps), angles_SK)
        y = _rms(x, get(at + "post_attention_layernorm.weight"), eps)
        bias = values["model_type"] == "llama" and values["mlp_bias"]
        gate, up = (_linear(y, get, f"{at}mlp.{name}_proj", bias) for name in ("gate", "up"))
        x = x + _linear(F.silu(gate) * up, get, at + "mlp.down_proj", bias)
    tied = values["tie_word_embeddings"]
    return _rms(x, get("model.norm.weight"), eps) @ get("model.embed_tokens.weight" if tied else "lm_head.weight").T


def _attention(values: Mapping[str, Any], get: Get, at: str, x: Tensor, angles_SK: Tensor) -> Tensor:
    kind, width = values["model_type"], _width(values)
    everywhere = kind == "llama" and values["attention_bias"]
    biased = everywhere or kind == "qwen2"
    q, k, v = (_linear(x, get, f"{at}{name}_proj", biased).unflatten(-1, (-1, width)) for name in "qkv")
    if kind == "qwen3":
        eps = values["rms_norm_eps"]
        q, k = _rms(q, get(at + "q_norm.weight"), eps), _rms(k, get(at + "k_norm.weight"), eps)
    q, k = _rotate(q, angles_SK), _rotate(k, angles_SK)
    return _linear(_attend(q, k, v).flatten(-2), get, at + "o_proj", everywhere)


def _gpt2(values: Mapping[str, Any], get: Get, tokens_BS: Tensor) -> Tensor:
    eps, heads, hidden = values["layer_norm_epsilon"], values["n_head"], values["n_embd"]
    x = get("transformer.wte.weight")[tokens_BS] + get("transformer.wpe.weight")[: tokens_BS.shape[1]]
    for layer in range(values["n_layer"]):
        at = f"transformer.h.{layer}."
        y = _layer_norm(x, get, at + "ln_1", eps)
        fused = y @ get(at + "attn.c_attn.weight") + get(at + "attn.c_attn.bias")
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in fused.split(hidden, dim=-1))
        x = x + _attend(q, k, v).flatten(-2) @ get(at + "attn.c_proj.weight") + get(at + "attn.c_proj.bias")
        y = _layer_norm(x, get, at + "ln_2", eps)
        y = y @ get(at + "mlp.c_fc.weight") + get(at + "mlp.c_fc.bias")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ get(at + "mlp.c_proj.weight") + get(at + "mlp.c_proj.bias")
    tied = values["tie_word_embeddings"]
    head = get("transformer.wte.weight" if tied else "lm_head.weight")
    return _layer_norm(x, get, "transformer.ln_f", eps) @ head.T


def _attend(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    """Causal attention with explicit weights; each kv group serves neighbouring heads."""
    repeats = q_BSHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(repeats, dim=2) for x in (k_BSGK, v_BSGK))
    scores = torch.einsum("bqhk,bshk->bhqs", q_BSHK, k_BSHK) / math.sqrt(q_BSHK.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhqs,bshk->bqhk", scores.masked_fill(future, -math.inf).softmax(-1), v_BSHK)


def _angles(values: Mapping[str, Any], length: int) -> Tensor:
    """Compute the rotary angle of every position and component; the second half of a head repeats the first."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", values["rope_theta"])
    kind, width = scaling.get("rope_type", scaling.get("type", "default")), _width(values)
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    if kind == "linear":
        frequencies = frequencies / scaling["factor"]
    if kind == "llama3":
        frequencies = torch.tensor([_llama3(float(f), scaling, values) for f in frequencies], dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles, angles), dim=-1)


def _llama3(frequency: float, scaling: Mapping[str, Any], values: Mapping[str, Any]) -> float:
    """Scale one frequency as in Llama 3.1."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling.get("original_max_position_embeddings") or values["max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _rotate(x_BSHK: Tensor, angles_SK: Tensor) -> Tensor:
    half = x_BSHK.shape[-1] // 2
    rotated = torch.cat((-x_BSHK[..., half:], x_BSHK[..., :half]), dim=-1)
    cos, sin = (table.to(x_BSHK.dtype)[:, None, :] for table in (angles_SK.cos(), angles_SK.sin()))
    return x_BSHK * cos + rotated * sin


def _width(values: Mapping[str, Any]) -> int:
    return values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]


def _linear(x: Tensor, get: Get, name: str, bias: bool) -> Tensor:
    y = x @ get(name + ".weight").T
    return y + get(name + ".bias") if bias else y


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _layer_norm(x: Tensor, get: Get, name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return scaled * get(name + ".weight") + get(name + ".bias")
