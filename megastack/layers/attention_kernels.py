"""Fused attention: which kernel computes it on which device, and the calls.

:func:`choose_kernel` is the only place that decides. Attention over whole rows is one call of torch's
``scaled_dot_product_attention``, which selects that kernel on a GPU. Packed documents are computed by their offsets:

* On a GPU ``varlen_attn`` (FlashAttention) computes all of them in one call. It requires fp16 or bf16.
* Elsewhere there is a call for each document, or for several (:class:`megastack.attention_mask.Segment`). On a CPU they
  share one output, so that attention saves as much as without documents.

The work is then proportional to the visible pairs, and no mask of S × S is formed. The exception is a microbatch on a
CPU that is so small that calls cost more than pairs: its documents share one call with a dense mask.

Shapes: B microbatch, S sequence, H heads, G kv groups, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.attention_mask import AttentionMask, Segment
from megastack.layers.attention_spec import prefers_dense_mask
from megastack.layers.autocast import Function, once_differentiable, product_dtype
from megastack.layers.context import Context
from megastack.torch_private import cpu_attention, cpu_attention_backward, efficient_attention, flash_attention

LOW_PRECISION = (torch.float16, torch.bfloat16)


class Kernel(StrEnum):
    """A fused kernel, or ``MATH``, which forms all scores."""

    CPU = "fused CPU kernel"
    FLASH = "FlashAttention"
    VARLEN = "variable-length FlashAttention"
    EFFICIENT = "memory-efficient attention"
    MATH = "unfused attention"


@dataclass(frozen=True)
class AttentionCase:
    """The properties of a call that determine its kernel.

    Args:
        device: the type of the device; any type but ``cpu`` is treated as ``cuda``.
        capability: the compute capability of a GPU.
        dtype: the dtype of queries, keys and values.
        head_dim: K.
        grouped: whether there are fewer groups than heads.
        documents: whether rows are packed with documents.
        dense: whether the documents are a dense mask, as in a compiled block.
        small: whether a CPU computes documents fastest with a dense mask.
        varlen: whether this version of torch has ``varlen_attn`` for grouped queries.
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    grouped: bool = False
    documents: bool = False
    dense: bool = False
    small: bool = False
    varlen: bool = True

    @staticmethod
    def of(
        device: torch.device,
        dtype: torch.dtype,
        q: Sequence[int],
        groups: int,
        *,
        documents: bool,
        dense: bool = False,
    ) -> AttentionCase:
        """The case for queries of shape ``q`` (B, S, H, K) on a device of this machine.

        A type of device that torch has no kernels for, as in a simulation, counts as a recent GPU.
        """
        batch, length, heads, head_dim = q
        small = prefers_dense_mask(batch, length, heads * head_dim)
        return _case(device, dtype, head_dim, groups != heads, documents, dense, small)


@cache  # every attention layer asks
def _case(
    device: torch.device, dtype: torch.dtype, head_dim: int, grouped: bool, documents: bool, dense: bool, small: bool
) -> AttentionCase:
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None  # a compiler can trace it
    capability = (9, 0) if gpu is None else (gpu.major, gpu.minor)
    varlen = device.type == "cpu" or dense or not documents or _varlen_attn() is not None
    return AttentionCase(device.type, capability, dtype, head_dim, grouped, documents, dense, small, varlen)


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, and the reason why it is not the fastest one; prints as a phrase for the log.

    Args:
        kernel: the kernel.
        by_document: whether documents take calls of their own.
        repeats: whether the kernel needs the keys and values of a group once for each head.
        because: what the fastest kernel requires; None if this is the one.
    """

    kernel: Kernel
    by_document: bool = False
    repeats: bool = False
    because: str | None = None

    def __str__(self) -> str:
        calls = ", one call for each document" if self.by_document else ""
        repeats = ", keys and values repeated for each head" if self.repeats else ""
        return f"{self.kernel}{calls}{repeats}" + (f" ({self.because})" if self.because else "")


@cache
def choose_kernel(case: AttentionCase) -> KernelChoice:
    """The kernel of a case: a function of its values alone.

    On a GPU it follows the conditions of torch 2.13: FlashAttention for fp16 and bf16 from compute capability 8.0, with
    K up to 256; memory-efficient attention for other dtypes but fp64.
    """
    if case.device == "cpu":
        return KernelChoice(Kernel.CPU, by_document=case.documents and not (case.small or case.dense))
    if (reason := _why_not_flash(case)) is not None:
        by_document = case.documents and not case.dense
        if _has_efficient(case):
            return KernelChoice(Kernel.EFFICIENT, by_document, repeats=case.grouped, because=reason)
        return KernelChoice(Kernel.MATH, by_document, because=reason)
    if not case.documents:
        return KernelChoice(Kernel.FLASH)
    if (reason := _why_not_varlen(case)) is not None:
        return KernelChoice(Kernel.FLASH, by_document=True, because=reason)
    return KernelChoice(Kernel.VARLEN)


def _why_not_flash(case: AttentionCase) -> str | None:
    if case.dtype not in LOW_PRECISION:
        return f"{Kernel.FLASH} requires fp16 or bf16, not {str(case.dtype).removeprefix('torch.')}"
    if case.capability < (8, 0):
        return f"{Kernel.FLASH} requires compute capability 8.0, this GPU has {'.'.join(map(str, case.capability))}"
    if case.documents and case.dense:
        return f"{Kernel.FLASH} has no dense mask, by which a compiled block separates documents"
    if case.head_dim > 256:
        return f"{Kernel.FLASH} requires a head dim of at most 256, not {case.head_dim}"
    if case.capability in _SMALL_SHARED_MEMORY and 192 < case.head_dim <= 224:
        return f"{Kernel.FLASH} has no backward for a head dim of {case.head_dim} on this GPU"
    return None


_SMALL_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Compute capabilities with less shared memory per block than data-center GPUs."""


def _why_not_varlen(case: AttentionCase) -> str | None:
    if case.head_dim % 8:
        return f"{Kernel.VARLEN} requires a head dim that is a multiple of 8, not {case.head_dim}"
    return None if case.varlen else f"torch {torch.__version__} has no {Kernel.VARLEN} for grouped queries"


def _has_efficient(case: AttentionCase) -> bool:
    lowest = {torch.float32: (5, 0), torch.float16: (5, 0), torch.bfloat16: (8, 0)}.get(case.dtype)
    return lowest is not None and case.capability >= lowest and case.head_dim * case.dtype.itemsize % 16 == 0


@cache
def _varlen_attn() -> Callable[..., Any] | None:
    """``torch.nn.attention.varlen.varlen_attn`` if this torch has it with grouped queries (from 2.13)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in signature(varlen_attn).parameters else None


def attention(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, context: Context | None = None) -> Tensor:
    """Attention within the documents of the context, to the positions of its cache, or else causal over whole rows.

    Args:
        q_BSHK: queries.
        k_BSGK: keys, where G divides H; with a cache there are more of them than queries.
        v_BSGK: values.
        context: the microbatch.

    Returns:
        The attended values, in the shape of the queries.
    """
    mask = None if context is None else context.attention_mask
    dense = context is not None and context.origin is not None and context.documents_BS is not None
    packed, dtype = dense or (mask is not None and mask.has_boundaries), product_dtype(q_BSHK)
    shape, groups = q_BSHK.shape, k_BSGK.shape[2]
    choice = choose_kernel(AttentionCase.of(q_BSHK.device, dtype, shape, groups, documents=packed, dense=dense))
    if context is not None and mask is not None and (choice.kernel is Kernel.VARLEN or choice.by_document):
        q_BSHK, k_BSGK, v_BSGK = (x.to(dtype) for x in (q_BSHK, k_BSGK, v_BSGK))
        if choice.by_document:
            return _by_document(choice, q_BSHK, k_BSGK, v_BSGK, mask)
        return _varlen(q_BSHK, k_BSGK, v_BSGK, mask, context.cu_seqlens)
    bias = context.mask_for(q_BSHK.dtype) if context is not None and (packed or mask is None) else None
    q_BHSK, k_BGSK, v_BGSK = q_BSHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)
    return _call(choice, q_BHSK, k_BGSK, v_BGSK, bias).transpose(1, 2)


def _call(choice: KernelChoice, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, bias: Tensor | None = None) -> Tensor:
    """One call for a batch of sequences, causal without a bias."""
    heads = q_BHSK.shape[1]
    if choice.repeats:  # torch would form all scores
        k_BGSK, v_BGSK = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_BGSK, v_BGSK))
    if q_BHSK.device.type not in ("cpu", "cuda") and choice.kernel is not Kernel.MATH:  # torch selects none by itself
        flash = choice.kernel is Kernel.FLASH and bias is None
        return flash_attention(q_BHSK, k_BGSK, v_BGSK) if flash else efficient_attention(q_BHSK, k_BGSK, v_BGSK, bias)
    grouped = k_BGSK.shape[1] != heads
    return F.scaled_dot_product_attention(
        q_BHSK, k_BGSK, v_BGSK, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
    )


def _varlen(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: AttentionMask, cu_seqlens: Tensor | None) -> Tensor:
    """All documents in one call of FlashAttention."""
    varlen_attn, longest = _varlen_attn(), mask.max_seqlen
    assert varlen_attn is not None and cu_seqlens is not None and mask.covers_rows
    operands = (x.flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    offsets, causal = (cu_seqlens, cu_seqlens, longest, longest), (-1, 0)
    attended: Tensor = varlen_attn(*operands, *offsets, window_size=causal, enable_gqa=True)
    return attended.unflatten(0, q_BSHK.shape[:2])


def _by_document(choice: KernelChoice, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: AttentionMask) -> Tensor:
    """Calls for the documents: on a CPU as one operation of autograd, elsewhere one by one."""
    heads, head_dim = q_BSHK.shape[2:]
    if choice.kernel is Kernel.CPU and v_BSGK.shape[3] == head_dim:
        attended: Tensor = _SegmentAttention.apply(q_BSHK, k_BSGK, v_BSGK, mask.segments(heads * head_dim))
        return attended
    calls = _split(mask.segments(), q_BSHK, k_BSGK, v_BSGK)
    return _joined([_call(choice, q, k, v) for q, k, v in calls], q_BSHK.shape[:2])


class _SegmentAttention(Function):
    """Attention of each segment by torch's fused CPU kernel, with one output and one log-sum-exp for all of them."""

    @staticmethod
    def forward(ctx: Any, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, segments: Sequence[Segment]) -> Tensor:
        operands, found = [_aligned(x) for x in (q_BSHK, k_BSGK, v_BSGK)], []
        for segment, (q, k, v) in zip(segments, _split(segments, *operands), strict=True):
            found.append(cpu_attention(q, k, v, _bias(segment, q.dtype)))
        out_BSHK, lse_BSH = (_joined(parts, q_BSHK.shape[:2]) for parts in zip(*found, strict=True))
        ctx.save_for_backward(*operands, out_BSHK, lse_BSH)
        ctx.segments = segments
        return out_BSHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHK: Tensor) -> tuple[Tensor | None, ...]:
        segments, found = ctx.segments, []
        tensors = _aligned(grad_BSHK), *ctx.saved_tensors
        for segment, (grad, q, k, v, out, lse) in zip(segments, _split(segments, *tensors), strict=True):
            found.append(cpu_attention_backward(grad, q, k, v, out, lse, _bias(segment, q.dtype)))
        return *(_joined(parts, grad_BSHK.shape[:2]) for parts in zip(*found, strict=True)), None


def _split(segments: Sequence[Segment], *tensors_BSH: Tensor) -> Iterator[list[Tensor]]:
    """For each segment its tokens in all tensors, as (batch, H, length, …)."""
    if len(segments) == 1 and (segments[0].batch, segments[0].length) == tensors_BSH[0].shape[:2]:
        yield [x.transpose(1, 2) for x in tensors_BSH]
        return
    sizes = [segment.tokens for segment in segments]
    for segment, *parts in zip(segments, *(x.flatten(0, 1).split(sizes) for x in tensors_BSH), strict=True):
        yield [x.view(segment.batch, segment.length, *x.shape[1:]).transpose(1, 2) for x in parts]


def _joined(parts_BHS: Sequence[Tensor], rows: torch.Size) -> Tensor:
    """Tensors (batch, H, length, …) one after another as (B, S, H, …), where ``rows`` is (B, S)."""
    parts_BSH = [x.transpose(1, 2) for x in parts_BHS]
    if len(parts_BSH) == 1 and parts_BSH[0].shape[:2] == rows:
        return parts_BSH[0]
    return torch.cat([x.flatten(0, 1) for x in parts_BSH]).unflatten(0, rows)


def _aligned(x: Tensor) -> Tensor:
    """The tensor, with adjacent elements in its last dim, which fused kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(segment: Segment, dtype: torch.dtype) -> Tensor | None:
    """The mask of several documents in a sequence as a bias, (length, length); None for one document."""
    hidden = segment.hidden
    return None if hidden is None else torch.from_numpy(np.where(hidden, -np.inf, 0.0)).to(dtype)
