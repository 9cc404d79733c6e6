"""Operations of a block that are one kernel each on a GPU, as operators of ``torch.library``.

An operator stays whole under ``torch.compile``, in a ``FakeTensorMode`` and on the meta device. A compiler cannot fuse
it with its neighbours, so layers that are traced use differentiable formulas instead (:func:`rms_normed`,
:func:`layer_normed`, :func:`rotated`, :func:`gated`). The eager implementation of an operator consists of torch
operations and runs on every device. On CUDA, torch's fused kernel or the Triton kernel of
:mod:`megastack.layers.triton_kernels` replaces it: torch's for RMSNorm if input and weight have one dtype, otherwise
Triton's. Without Triton, and for fp64, the eager implementation runs there too; a warning says so once.

The operators have no autograd formulas. The autograd functions of the layers call them, and save as little as before.
Outputs are contiguous.

Shapes: B microbatch, S sequence, L positions, D hidden, F inner features, H heads, K head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.random import dropout_key, dropout_mask, dropout_threshold
from megastack.torch_private import fused_rms_norm, fused_rms_norm_backward

_LIBRARY = torch.library.Library("megastack", "DEF")


def _operator(
    schema: str, eager: Callable[..., Any], fake: Callable[..., Any], cuda: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Register an operator, and return it."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    if cuda is not None:
        _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"megastack::{name}", fake, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.megastack, name).default
    return operator


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        from megastack.layers import triton_kernels
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "Triton is not available, so operations of a block run as several kernels: %s", error
        )
        return None
    return triton_kernels


def _triton_for(*tensors: Tensor) -> Any:
    """The module of Triton kernels if they run on these tensors, else None."""
    kernels = _triton_kernels()
    return kernels if kernels is not None and kernels.supports(*tensors) else None


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the norms of ``x`` are computed: its own, and at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


# RMSNorm.


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, computed in :func:`wide_dtype`; differentiable."""
    wide = x.to(wide_dtype(x))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(wide_dtype(x))
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype).contiguous(), scale.contiguous()


def _rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype == weight.dtype:
        return fused_rms_norm(x, weight, eps)
    if (triton := _triton_for(x, weight)) and triton.supports_row(x):
        return triton.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    grad, normed = grad.to(scale.dtype), x * scale
    grad_weight = (grad * normed).flatten(0, -2).sum(0) if x.dim() > 1 else grad * normed
    scaled = grad * weight
    along = (scaled * normed).mean(-1, keepdim=True)
    grad_x = scaled.sub_(normed.mul_(along)).mul_(scale).to(x.dtype)
    return grad_x.contiguous(), grad_weight.to(weight.dtype)


def _rms_norm_backward_cuda(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == weight.dtype:
        return fused_rms_norm_backward(grad, x, weight, scale)
    if (triton := _triton_for(grad, x, weight)) and triton.supports_row(x):
        return triton.rms_norm_backward(grad, x, weight, scale)
    return _rms_norm_backward(grad, x, weight, scale)


rms_norm = _operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _rms_norm,
    lambda x, weight, eps: (x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x))),
    _rms_norm_cuda,
)
"""The normalised rows in the dtype of ``x``, and the scale of each row, ``(…, 1)`` in the dtype of the computation."""

rms_norm_backward = _operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    _rms_norm_backward,
    lambda grad, x, weight, scale: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    _rms_norm_backward_cuda,
)
"""The gradients of the input and the weight, from the scale that :data:`rms_norm` returned."""


# LayerNorm.


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dim, computed in :func:`wide_dtype`; differentiable."""
    dtype = wide_dtype(x)
    return F.layer_norm(x.to(dtype), weight.shape, weight.to(dtype), bias.to(dtype), eps).to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dtype = wide_dtype(x)
    normed, mean, scale = torch.native_layer_norm(x.to(dtype), weight.shape, weight.to(dtype), bias.to(dtype), eps)
    return normed.to(x.dtype).contiguous(), mean, scale


def _layer_norm_cuda(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if (triton := _triton_for(x, weight, bias)) and triton.supports_row(x):
        return triton.layer_norm(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, ...]:
    dtype = mean.dtype
    grads = torch.ops.aten.native_layer_norm_backward(
        *(grad.to(dtype), x.to(dtype), weight.shape, mean, scale, weight.to(dtype), bias.to(dtype), [True] * 3)
    )
    return tuple(g.to(like.dtype).contiguous() for g, like in zip(grads, (x, weight, bias), strict=True))


def _layer_norm_backward_cuda(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, ...]:
    if (triton := _triton_for(grad, x, weight, bias)) and triton.supports_row(x):
        return triton.layer_norm_backward(grad, x, weight, bias, mean, scale)
    return _layer_norm_backward(grad, x, weight, bias, mean, scale)


def _layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, scale = (x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x)) for _ in range(2))
    return x.new_empty(x.shape), mean, scale


layer_norm = _operator(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
    _layer_norm_fake,
    _layer_norm_cuda,
)
"""The normalised rows in the dtype of ``x``, and mean and scale of each row, in the dtype of the computation.

The layer calls torch's LayerNorm itself where that does the same: on a GPU if all operands have one dtype, on a CPU if
that is also the dtype of the computation.
"""

layer_norm_backward = _operator(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor scale)"
    " -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward,
    lambda grad, x, weight, bias, mean, scale: tuple(each.new_empty(each.shape) for each in (x, weight, bias)),
    _layer_norm_backward_cuda,
)
"""The gradients of input, weight and bias."""


# Rotary positions.


def rotated(heads_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) of every head, in the dtype of the tables ``(B or 1, S, K/2)``; differentiable."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    if torch.compiler.is_compiling():
        return _rotated_at_once(heads_BSHK, cos, sin)
    first, second = heads_BSHK.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads_BSHK.dtype)


def _rotated_at_once(heads_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same as one elementwise expression. A compiler computes the parts of a concatenation separately."""
    pairs = heads_BSHK.unflatten(-1, (2, -1))
    sign_21 = torch.arange(-1, 2, 2, device=heads_BSHK.device)[:, None]
    turned = pairs * cos.unsqueeze(-2) + pairs.flip(-2) * (sin.unsqueeze(-2) * sign_21)
    return turned.flatten(-2).to(heads_BSHK.dtype)


def _rotate(q_BSHK: Tensor, k_BSGK: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    sin = -sin if backward else sin
    return rotated(q_BSHK, cos, sin), rotated(k_BSGK, cos, sin)


def _rotate_cuda(q_BSHK: Tensor, k_BSGK: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    triton = _triton_for(q_BSHK, k_BSGK, cos)
    return (triton.rotate if triton else _rotate)(q_BSHK, k_BSGK, cos, sin, backward)


rotate = _operator(
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool backward) -> (Tensor, Tensor)",
    _rotate,
    lambda q, k, cos, sin, backward: (q.new_empty(q.shape), k.new_empty(k.shape)),
    _rotate_cuda,
)
"""Queries and keys as :func:`rotated`; by the negative angles with ``backward``."""


# SwiGLU.


def gated(up: Tensor) -> Tensor:
    """``silu(gate) * value`` of ``(…, 2, F)``, gate first; differentiable."""
    gate_BSF, value_BSF = up.unbind(-2)
    return F.silu(gate_BSF) * value_BSF


def _swiglu(up: Tensor) -> Tensor:
    gate_BSF, value_BSF = up.unbind(-2)
    return F.silu(gate_BSF).mul_(value_BSF).contiguous()


def _swiglu_backward(grad_BSF: Tensor, up: Tensor) -> Tensor:
    gate_BSF, value_BSF = up.unbind(-2)
    grad_up = torch.empty_like(up, memory_format=torch.contiguous_format)
    grad_gate_BSF, grad_value_BSF = grad_up.unbind(-2)
    torch.mul(F.silu(gate_BSF), grad_BSF, out=grad_value_BSF)
    torch.ops.aten.silu_backward(grad_BSF * value_BSF, gate_BSF, grad_input=grad_gate_BSF)
    return grad_up


def _swiglu_cuda(up: Tensor) -> Tensor:
    triton = _triton_for(up)
    return (triton.swiglu if triton else _swiglu)(up)


def _swiglu_backward_cuda(grad_BSF: Tensor, up: Tensor) -> Tensor:
    triton = _triton_for(grad_BSF, up)
    return (triton.swiglu_backward if triton else _swiglu_backward)(grad_BSF, up)


swiglu = _operator(
    "swiglu(Tensor up) -> Tensor",
    _swiglu,
    lambda up: up.new_empty((*up.shape[:-2], up.shape[-1])),
    _swiglu_cuda,
)
"""``silu(gate) * value`` of ``(…, 2, F)``, gate first."""

swiglu_backward = _operator(
    "swiglu_backward(Tensor grad, Tensor up) -> Tensor",
    _swiglu_backward,
    lambda grad, up: up.new_empty(up.shape),
    _swiglu_backward_cuda,
)
"""The gradients of gate and value."""


# Dropout.


def _dropout_mask(
    samples_B: Tensor, seed: int, step: int, site: str, start: int, length: int, features: int, p: float
) -> Tensor:
    return dropout_mask(seed, step, samples_B, site, start=start, length=length, features=features, p=p)


def _dropout(x_BLF: Tensor, samples_B: Tensor, seed: int, step: int, site: str, start: int, p: float) -> Tensor:
    _, length, features = x_BLF.shape
    kept = _dropout_mask(samples_B, seed, step, site, start, length, features, p)
    return x_BLF.masked_fill(~kept, 0).mul_(1 / (1 - p)).contiguous()


def _dropout_cuda(x_BLF: Tensor, samples_B: Tensor, seed: int, step: int, site: str, start: int, p: float) -> Tensor:
    if triton := _triton_for(x_BLF):
        key, threshold = dropout_key(seed, step, site), dropout_threshold(p)
        return triton.dropout(x_BLF, samples_B, key, start, threshold, 1 / (1 - p))
    return _dropout(x_BLF, samples_B, seed, step, site, start, p)


mask = _operator(
    "dropout_mask(Tensor samples, int seed, SymInt step, str site, SymInt start, SymInt length, SymInt features,"
    " float p) -> Tensor",
    _dropout_mask,
    lambda samples, seed, step, site, start, length, features, p: samples.new_empty(
        (samples.shape[0], length, features), dtype=torch.bool
    ),
)
"""As :func:`megastack.random.dropout_mask`. The site's key is hashed inside the operator, where nothing is traced."""

dropout = _operator(
    "dropout(Tensor x, Tensor samples, int seed, SymInt step, str site, SymInt start, float p) -> Tensor",
    _dropout,
    lambda x, samples, seed, step, site, start, p: x.new_empty(x.shape),
    _dropout_cuda,
)
"""``x`` ``(B, L, F)`` scaled by 1/(1−p) where :data:`mask` keeps an element, else zero. Linear in ``x``."""


def _dropout_in_block(
    x_BLF: Tensor, samples_B: Tensor, origin: Tensor, seed: int, site: str, start: int, p: float
) -> Tensor:
    step, block = origin.tolist()
    dropped: Tensor = dropout(x_BLF, samples_B, seed, step, site.replace("*", str(block)), start, p)
    return dropped


dropout_in_block = _operator(
    "dropout_in_block(Tensor x, Tensor samples, Tensor origin, int seed, str site, SymInt start, float p) -> Tensor",
    _dropout_in_block,
    lambda x, samples, origin, seed, site, start, p: x.new_empty(x.shape),
)
"""As :data:`dropout`, with ``[step, block]`` as a host tensor: compiled code is then the same for all of them.

It stays an operator: inductor's C++ computes the hash of an index with signed products, which overflow.
"""
