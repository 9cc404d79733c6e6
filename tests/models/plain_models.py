"""Plain Llama and GPT-2 in a few lines of torch, written from the papers and sharing no code with the package.

Weights come as a dict of whole tensors by global name. Attention is written with loops over heads and an explicit
list of the keys each query sees; rotary positions as products of complex numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def llama_logits(w: Weights, layers: int, tokens: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
    """RMSNorm, rotary positions, SwiGLU; q/k norms and qkv biases where the weights have them."""
    x = w["embedding.weight"][tokens]
    for layer in range(layers):
        b = {name.split(".", 2)[2]: value for name, value in w.items() if name.startswith(f"blocks.{layer}.")}
        x = x + _attention(b, _rms(x, b["attention_norm.weight"]), positions, documents, rotary=True)
        y = _rms(x, b["mlp_norm.weight"])
        gate, up = (y @ b["mlp.up.weight"][part].T for part in (0, 1))
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ b["mlp.down.weight"].T
    return _rms(x, w["norm.weight"]) @ w.get("head.weight", w["embedding.weight"]).T


def gpt2_logits(w: Weights, layers: int, tokens: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
    """LayerNorm, learned positions, GELU by tanh, biases, and the embedding as output projection."""
    x = w["embedding.weight"][tokens] + w["positions.weight"][positions]
    for layer in range(layers):
        b = {name.split(".", 2)[2]: value for name, value in w.items() if name.startswith(f"blocks.{layer}.")}
        y = _layer_norm(x, b["attention_norm.weight"], b["attention_norm.bias"])
        x = x + _attention(b, y, positions, documents, rotary=False)
        y = _layer_norm(x, b["mlp_norm.weight"], b["mlp_norm.bias"])
        y = y @ b["mlp.up.weight"].T + b["mlp.up.bias"]
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ b["mlp.down.weight"].T + b["mlp.down.bias"]
    return _layer_norm(x, w["norm.weight"], w["norm.bias"]) @ w["embedding.weight"].T


def loss_sums(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sums over the labelled tokens: cross-entropy, and what z-loss adds to it."""
    kept, targets = logits[labels != -100], labels[labels != -100]
    log_z = kept.exp().sum(-1).log()
    log_p = kept - log_z[:, None]
    hit = log_p[torch.arange(len(targets)), targets]
    cross_entropy = -((1 - label_smoothing) * hit + label_smoothing * log_p.mean(-1)).sum()
    return cross_entropy, z_loss * (log_z**2).sum()


def _attention(b: Weights, x: Tensor, positions: Tensor, documents: Tensor | None, *, rotary: bool) -> Tensor:
    q_weight, kv_weight = b["attention.q.weight"], b["attention.kv.weight"]
    heads, width = q_weight.shape[:2]
    per_group = heads // kv_weight.shape[0]
    rows = []
    for sample in range(x.shape[0]):
        outputs = []
        for head in range(heads):
            group = head // per_group
            q = x[sample] @ q_weight[head].T
            k, v = (x[sample] @ kv_weight[group, part].T for part in (0, 1))
            if "attention.q.bias" in b:
                q = q + b["attention.q.bias"][head]
                k, v = k + b["attention.kv.bias"][group, 0], v + b["attention.kv.bias"][group, 1]
            if "attention.q_norm.weight" in b:
                q, k = _rms(q, b["attention.q_norm.weight"]), _rms(k, b["attention.k_norm.weight"])
            if rotary:
                q, k = _turn(q, positions[sample]), _turn(k, positions[sample])
            outputs.append(_attend(q, k, v, None if documents is None else documents[sample], width))
        rows.append(torch.cat(outputs, -1))
    out = torch.stack(rows) @ b["attention.out.weight"].T
    return out + b["attention.out.bias"] if "attention.out.bias" in b else out


def _attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, width: int) -> Tensor:
    rows = []
    for i in range(len(q)):
        seen = [j for j in range(i + 1) if documents is None or documents[j] == documents[i]]
        weights = torch.softmax(k[seen] @ q[i] / math.sqrt(width), 0)
        rows.append(weights @ v[seen])
    return torch.stack(rows)


def _turn(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=x.dtype)
    angles = positions.to(x.dtype)[:, None] * frequencies
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * weight + bias
