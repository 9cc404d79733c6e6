"""Triton kernels of the fused operators in :mod:`megastack.layers.fused`, one for each direction.

Only that module imports this one, and only if Triton is installed. Each function takes tensors of a GPU whose dtypes
satisfy :func:`supports`, computes in fp32 and rounds once, to the dtype of its output. Integers are int64, whose
products and sums wrap as in :mod:`megastack.random`.

With ``TRITON_INTERPRET=1`` the kernels run on the CPU; ``tests/layers/test_triton.py`` compares them with the eager
implementations.

Shapes: B microbatch, S sequence, D hidden, F inner features, H heads, K head dim.
"""

# mypy: allow-untyped-defs
# The parameters of a kernel are pointers and scalars, for which Triton has no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_ROW = 1 << 15
_BLOCK = 1024
_PROGRAMS_PER_MULTIPROCESSOR = 4
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB - (1 << 64))


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels accept these dtypes; they compute in fp32."""
    return all(x.dtype in (torch.bfloat16, torch.float16, torch.float32) for x in tensors)


def supports_row(x: Tensor) -> bool:
    """Whether a row of the last dim fits in one program of a norm."""
    return x.shape[-1] <= _LARGEST_ROW


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised rows in the dtype of ``x``, and the fp32 scale of each row, ``(…, 1)``."""
    x = x.contiguous()
    size = weight.numel()
    out, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    _rms_norm[(scale.numel(),)](x, weight, out, scale, size, eps, BLOCK=block, num_warps=_warps(block))
    return out, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and of the weight. Each program sums the weight gradient of a fixed range of rows."""
    grad, x, scale = grad.contiguous(), x.contiguous(), scale.contiguous()
    size, rows = weight.numel(), scale.numel()
    programs = _row_programs(rows, x)
    grad_x, partial_PD = torch.empty_like(x), x.new_empty(programs, size, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    _rms_norm_backward[(programs,)](
        *(grad, x, weight, scale, grad_x, partial_PD, rows, triton.cdiv(rows, programs), size),
        BLOCK=block,
        num_warps=_warps(block),
    )
    return grad_x, partial_PD.sum(0).to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised rows in the dtype of ``x``, and the fp32 mean and scale of each row, ``(…, 1)``."""
    x = x.contiguous()
    size = weight.numel()
    out = torch.empty_like(x)
    mean, scale = (x.new_empty(*x.shape[:-1], 1, dtype=torch.float32) for _ in range(2))
    block = triton.next_power_of_2(size)
    _layer_norm[(scale.numel(),)](*(x, weight, bias, out, mean, scale, size, eps), BLOCK=block, num_warps=_warps(block))
    return out, mean, scale


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``x``, weight and bias, the last two summed like the weight's in :func:`rms_norm_backward`."""
    grad, x, mean, scale = grad.contiguous(), x.contiguous(), mean.contiguous(), scale.contiguous()
    size, rows = weight.numel(), scale.numel()
    programs = _row_programs(rows, x)
    grad_x, partial_2PD = torch.empty_like(x), x.new_empty(2, programs, size, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    _layer_norm_backward[(programs,)](
        *(grad, x, weight, mean, scale, grad_x, *partial_2PD.unbind(), rows, triton.cdiv(rows, programs), size),
        BLOCK=block,
        num_warps=_warps(block),
    )
    grad_weight, grad_bias = partial_2PD.sum(1).unbind()
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


def rotate(q_BSHK: Tensor, k_BSGK: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """Rotate the pairs of each head by the angles of its position, or back; one launch for queries and keys."""
    q_BSHK, k_BSGK = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BSHK, k_BSGK))
    out_BSHK, out_BSGK = (x.new_empty(x.shape) for x in (q_BSHK, k_BSGK))
    batch, length, heads, width = q_BSHK.shape
    groups, half, block = k_BSGK.shape[2], width // 2, triton.next_power_of_2(width // 2)
    rows = max(1, min(triton.next_power_of_2(max(heads, groups)), _BLOCK // block))
    q_blocks = triton.cdiv(heads, rows)
    _rotate[(batch * length, q_blocks + triton.cdiv(groups, rows))](
        *(q_BSHK, out_BSHK, *q_BSHK.stride()[:3], heads, q_blocks),
        *(k_BSGK, out_BSGK, *k_BSGK.stride()[:3], groups),
        *(cos.contiguous(), sin.contiguous(), length, half, cos.shape[0] * cos.shape[1]),
        BACKWARD=backward,
        ROWS=rows,
        HALF=block,
    )
    return out_BSHK, out_BSGK


def swiglu(up_BS2F: Tensor) -> Tensor:
    """``silu(gate) * value``."""
    up_BS2F = up_BS2F.contiguous()
    *outer, _, features = up_BS2F.shape
    out_BSF = up_BS2F.new_empty(*outer, features)
    _swiglu[_grid(out_BSF)](up_BS2F, out_BSF, features, BLOCK=_BLOCK)
    return out_BSF


def swiglu_backward(grad_BSF: Tensor, up_BS2F: Tensor) -> Tensor:
    """The gradients of gate and value."""
    grad_BSF, up_BS2F = grad_BSF.contiguous(), up_BS2F.contiguous()
    grad_up_BS2F = torch.empty_like(up_BS2F)
    _swiglu_backward[_grid(grad_BSF)](grad_BSF, up_BS2F, grad_up_BS2F, grad_BSF.shape[-1], BLOCK=_BLOCK)
    return grad_up_BS2F


def dropout(x_BLF: Tensor, samples_B: Tensor, key: int, start: int, threshold: int, scale: float) -> Tensor:
    """``x * scale`` where :func:`megastack.random.dropout_mask` keeps an element, else zero.

    Args:
        key: the signed key of the site, from :func:`megastack.random.dropout_key`.
        start: the first position.
        threshold: the smallest bits that keep an element, from :func:`megastack.random.dropout_threshold`.
        scale: the factor of the kept elements.
    """
    x_BLF, samples_B = x_BLF.contiguous(), samples_B.contiguous()
    out_BLF = torch.empty_like(x_BLF)
    _, length, features = x_BLF.shape
    _dropout[_grid(x_BLF)](x_BLF, out_BLF, samples_B, key, start, length, features, threshold, scale, BLOCK=_BLOCK)
    return out_BLF


def _grid(x: Tensor) -> tuple[int, int]:
    """One program per row of the last dim and block of it."""
    features = x.shape[-1]
    return x.numel() // features, triton.cdiv(features, _BLOCK)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def _row_programs(rows: int, x: Tensor) -> int:
    """The number of programs that share the rows of a norm's backward."""
    return max(1, min(rows, _multiprocessors(x) * _PROGRAMS_PER_MULTIPROCESSOR))


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


@triton.jit
def _rms_norm(x, weight, out, scale, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    place = row * size + column
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(scale + row, factor)
    normed = wide * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(grad, x, weight, scale, grad_x, partial, rows, rows_each, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    for row in range(program * rows_each, tl.minimum((program + 1) * rows_each, rows)):
        place = row * size + column
        factor = tl.load(scale + row)
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * factor
        slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        grad_weight += slope * normed
        scaled = slope * factors
        along = tl.sum(scaled * normed, 0) / size
        tl.store(grad_x + place, ((scaled - normed * along) * factor).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(partial + program * size + column, grad_weight, mask=inside)


@triton.jit
def _layer_norm(x, weight, bias, out, mean, scale, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    place = row * size + column
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    centre = tl.sum(wide, 0) / size
    centred = tl.where(inside, wide - centre, 0.0)
    factor = 1 / tl.sqrt(tl.sum(centred * centred, 0) / size + eps)
    tl.store(mean + row, centre)
    tl.store(scale + row, factor)
    normed = centred * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_backward(
    grad,
    x,
    weight,
    mean,
    scale,
    grad_x,
    partial_weight,
    partial_bias,
    rows,
    rows_each,
    size,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    grad_bias = tl.zeros((BLOCK,), tl.float32)
    for row in range(program * rows_each, tl.minimum((program + 1) * rows_each, rows)):
        place = row * size + column
        factor = tl.load(scale + row)
        normed = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + row)) * factor
        slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        grad_weight += slope * normed
        grad_bias += slope
        scaled = slope * factors
        across = tl.sum(scaled, 0) / size
        along = tl.sum(scaled * normed, 0) / size
        result = (scaled - across - normed * along) * factor
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=inside)
    place = program * size + column
    tl.store(partial_weight + place, grad_weight, mask=inside)
    tl.store(partial_bias + place, grad_bias, mask=inside)


@triton.jit
def _rotate(
    q,
    out_q,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    q_heads,
    q_blocks,
    k,
    out_k,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    k_heads,
    cos,
    sin,
    length,
    half,
    table_rows,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, HALF)[None, :]
    angle = token % table_rows * half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0)
    if BACKWARD:
        s = -s
    if block < q_blocks:
        head = block * ROWS + tl.arange(0, ROWS)[:, None]
        place = token // length * q_batch_stride + token % length * q_token_stride + head * q_head_stride
        _rotate_heads(q + place, out_q + (token * q_heads + head) * 2 * half, c, s, head < q_heads, pair, half)
    else:
        head = (block - q_blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        place = token // length * k_batch_stride + token % length * k_token_stride + head * k_head_stride
        _rotate_heads(k + place, out_k + (token * k_heads + head) * 2 * half, c, s, head < k_heads, pair, half)


@triton.jit
def _rotate_heads(heads, out, c, s, is_head, pair, half):
    inside = is_head & (pair < half)
    first = tl.load(heads + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + half + pair, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + pair, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + half + pair, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(up, out, features, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    place = row * 2 * features + column
    gate = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up + place + features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * features + column, (gate * tl.sigmoid(gate) * value).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(grad, up, grad_up, features, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    place = row * 2 * features + column
    gate = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up + place + features, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * features + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = slope * value * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(grad_up + place, grad_gate.to(grad_up.dtype.element_ty), mask=inside)
    tl.store(grad_up + place + features, (slope * gate * sigmoid).to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _dropout(x, out, samples, key, start, length, features, threshold, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    feature = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = feature < features
    bits = _mix(tl.load(samples + row // length) * _GAMMA + key)
    bits = _mix((start + row % length) * _GAMMA + bits)
    bits = _mix(feature * _GAMMA + bits)
    place = row * features + feature
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    kept = tl.where(bits >= threshold, wide * scale, 0.0)
    tl.store(out + place, kept.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix(bits):
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _FIRST_FACTOR
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _SECOND_FACTOR
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))
