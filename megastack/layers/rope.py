"""Rotary position embedding: frequencies, tables for given positions, and the rotation.

The convention is half-split (Hugging Face, GPT-NeoX): component i of a head pairs with component i + K/2. Frequencies
follow Su et al. (arXiv 2104.09864), with linear position interpolation (arXiv 2306.15595) or the banded stretching of
Llama 3.1.

Tables are computed from positions in fp64, once per microbatch and stage (see :mod:`megastack.layers.context`). There
are no buffers: nothing stays uninitialised after construction on the meta device, nothing is saved, and positions have
no upper limit. Learned positions are in :mod:`megastack.layers.embedding`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megastack.errors import ConfigError
from megastack.layers import fused
from megastack.layers.autocast import Function, once_differentiable
from megastack.layers.kernels import cpu_kernels

SCALINGS = ("none", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies as a value; attention layers with equal frequencies share the tables of a microbatch.

    Args:
        head_dim: K, the width of a head; even.
        theta: base of the geometric series of frequencies.
        scaling: ``none``, ``linear`` (all frequencies divided by ``factor``) or ``llama3``.
        factor: the factor by which the context is extended (``linear``, ``llama3``).
        low_freq_factor: ``llama3`` divides in full if the wavelength exceeds ``original_max_positions`` over this.
        high_freq_factor: ``llama3`` changes nothing if the wavelength is below ``original_max_positions`` over this.
        original_max_positions: the context length before the stretching (``llama3``).

    Raises:
        ConfigError: an odd ``head_dim``, an unknown scaling, or factors that leave no band between them.
    """

    head_dim: int
    theta: float = 1e4
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim}: rotary positions pair components; use an even number")
        if self.scaling not in SCALINGS:
            raise ConfigError(f"model.rope.scaling={self.scaling}: unknown; use {', '.join(SCALINGS)}")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"model.rope.high_freq_factor={self.high_freq_factor:g}: must exceed "
                f"model.rope.low_freq_factor={self.low_freq_factor:g}; use 4 and 1"
            )

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Radians per position of each pair, (K/2,) in fp64."""
        pairs = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64)
        frequencies = self.theta ** (-pairs / self.head_dim)
        if self.scaling == "linear":
            return frequencies / self.factor
        return self._llama3(frequencies) if self.scaling == "llama3" else frequencies

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Stretch long wavelengths, keep short ones, and blend those in between."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)

    def tables(self, positions_BS: Tensor, dtype: torch.dtype) -> RotaryTables:
        """Cosines and sines for these positions, in ``dtype`` but never below fp32."""
        angles = positions_BS.to(torch.float64)[..., None] * self.frequencies(positions_BS.device)
        wide = torch.promote_types(dtype, torch.float32)
        return RotaryTables(self, angles.cos().to(wide), angles.sin().to(wide))


class RotaryTables(NamedTuple):
    """Cosines and sines, each (B, S, K/2), and their frequencies."""

    rope: Rope
    cos: Tensor
    sin: Tensor


def rotate(q_BSHK: Tensor, k_BSGK: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate each pair (i, i + K/2) of every head of queries and keys by its angle, in the tables' dtype.

    The results have the dtype of the inputs.
    """
    cos, sin = tables.cos, tables.sin
    if cpu_kernels(q_BSHK):
        return fused.rotated(q_BSHK, cos, sin), fused.rotated(k_BSGK, cos, sin)
    if torch.compiler.is_compiling():  # in the tables' dtype, so that the gradient is rounded once
        q, k = (fused.rotated(x.to(cos.dtype), cos, sin).to(x.dtype) for x in (q_BSHK, k_BSGK))
        return q, k
    turned: tuple[Tensor, Tensor] = _Rotation.apply(q_BSHK, k_BSGK, cos, sin)
    return turned


class _Rotation(Function):
    """One operator in each direction; saves only the tables."""

    @staticmethod
    def forward(ctx: Any, q_BSHK: Tensor, k_BSGK: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        turned: tuple[Tensor, Tensor] = fused.rotate(q_BSHK, k_BSGK, cos, sin, False)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHK: Tensor, grad_BSGK: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *fused.rotate(grad_BSHK, grad_BSGK, *ctx.saved_tensors, True), None, None
