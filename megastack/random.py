"""Counter-based random numbers: each number depends only on its key and index, not on the layout or the call order.

A stateful generator produces different numbers on each rank when the parallel layout changes. Here, each number is the
hash of a key (derived from the seed and the purpose of the number) and a counter (a global index). Any rank can compute
just its own shard, repeatedly if needed (recomputation, resume), with no state to save or synchronise.

- :func:`counter_normal`: initial values, keyed by seed and parameter name, counted by the global element index.
- :func:`dropout_mask`: keyed by seed, step, site and sample, counted by position and feature.
- :class:`Permutation`: a shuffle with random access, for the data order.

The hash is the finaliser of splitmix64 (Steele et al., 2014) on int64 tensors, whose products and sums wrap. On a CPU,
the numbers are computed in chunks that fit in the cache. For meta and fake tensors, only shape and dtype are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import isqrt, pi, prod
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from megastack.errors import ConfigError
from megastack.torch_private import has_values

_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 24
_LOW_32 = (1 << 32) - 1
_ARGSORT_LIMIT = 1 << 16
_FEISTEL_ROUNDS = 12

Indices = TypeVar("Indices", Tensor, "np.ndarray")


class IndexBox(Protocol):
    """A rectangular part of a tensor, such as ``megastack.placement.boxes.Box``."""

    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> tuple[int, ...]: ...


def stream_key(*parts: int | str) -> int:
    """Derive the 64-bit key of a stream of numbers from its purpose; different parts yield unrelated streams."""
    plain = tuple(str(part) if isinstance(part, str) else int(part) for part in parts)
    return int.from_bytes(blake2b(repr(plain).encode(), digest_size=8).digest(), "little")


def counter_bits(key: int | Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits per index, as int64: a hash of ``key`` and ``index``, broadcast if both are tensors."""
    start = _signed(key) if isinstance(key, int) else key
    return _mix_(index * _GAMMA + start)


def counter_normal(
    seed: int,
    name: str,
    shape: Sequence[int],
    box: IndexBox,
    *,
    std: float,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the part ``box`` of a tensor of zero-mean normal numbers; the elements do not depend on the box.

    Element i (in row-major order of the whole ``shape``) depends only on ``seed``, ``name`` and i. It is computed in
    fp64, rounded to fp32 and then cast to ``dtype``, so runs of any precision start from the same values.
    """
    out = torch.empty(tuple(box.size), dtype=dtype, device=device)
    if not has_values(out) or not out.numel():
        return out
    key = stream_key("normal", seed, name)
    outer, run_length = _runs(shape, box)
    out_rows = out.view(-1, run_length)
    for rows, columns in _chunks(len(out_rows), run_length, _chunk_size(out.device)):
        starts = _run_starts(shape, box, outer, torch.arange(rows.start, rows.stop, device=out.device))
        index = starts[:, None] + torch.arange(columns.start, columns.stop, device=out.device)
        out_rows[rows, columns] = _normals(counter_bits(key, index), std)
    return out


def dropout_mask(
    seed: int,
    step: int,
    samples_B: Tensor,
    site: str,
    *,
    start: int,
    length: int,
    features: int,
    p: float,
    feature_start: int = 0,
) -> Tensor:
    """Return which elements dropout keeps, as bool ``(B, length, features)``: True with probability ``1 - p``.

    An element depends on the seed, the step, its sample's global number, the site, its position and its feature, so any
    slice of the sequence, the features or the batch sees the matching slice of one mask.

    Args:
        seed: the run's seed.
        step: the optimizer step.
        samples_B: the global number of each sample, int64; the mask is on its device.
        site: the global name of the dropout in the model.
        start: the first position.
        length: the number of positions.
        features: the number of features in this slice.
        p: the probability of dropping, in [0, 1).
        feature_start: the first feature of this slice.

    Raises:
        ConfigError: ``p`` is not in [0, 1).
    """
    threshold = dropout_threshold(p)
    keep = torch.empty((len(samples_B), length, features), dtype=torch.bool, device=samples_B.device)
    if not has_values(keep) or not keep.numel():
        return keep
    key_B11 = counter_bits(dropout_key(seed, step, site), samples_B)[:, None, None]
    for rows, columns in _chunks(length, features, max(1, _chunk_size(keep.device) // len(samples_B))):
        position_L1 = torch.arange(start + rows.start, start + rows.stop, device=keep.device)[:, None]
        feature_F = torch.arange(feature_start + columns.start, feature_start + columns.stop, device=keep.device)
        keep[:, rows, columns] = counter_bits(counter_bits(key_B11, position_L1), feature_F) >= threshold
    return keep


def dropout_key(seed: int, step: int, site: str) -> int:
    """Return the key of a dropout site in a step, as a signed 64-bit number."""
    return _signed(stream_key("dropout", seed, step, site))


def dropout_threshold(p: float) -> int:
    """Return the smallest signed bits that keep an element.

    Raises:
        ConfigError: ``p`` is not in [0, 1).
    """
    if not 0 <= p < 1:
        raise ConfigError(f"dropout={p}: must be at least 0 and below 1")
    return round(p * 2**64) - 2**63


class Permutation:
    """A random order of ``0 … n-1`` with random access: ``Permutation(n, key)[i]`` is the i-th entry.

    Up to 65,536 entries, the order is the argsort of their hashes. Beyond that, it is a Feistel network over a grid of
    about ``sqrt(n)`` rows and columns, reapplied to results outside the range (cycle walking; Black and Rogaway, 2002).
    This is a bijection of n entries that needs no table.

    Args:
        n: the number of entries, at least 1.
        key: selects the order, e.g. ``stream_key(seed, "order", epoch)``.
    """

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ConfigError(f"n={n}: a permutation needs at least 1 entry")
        self.n = n
        self._table = None if n > _ARGSORT_LIMIT else torch.argsort(counter_bits(key, torch.arange(n)))
        self._round_keys = () if n <= _ARGSORT_LIMIT else _round_keys(key)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return int(self.many(torch.tensor([index]))[0])

    def many(self, indices: Indices) -> Indices:
        """Return the entries at several indices, in a container of the same type.

        Raises:
            IndexError: an index is outside ``0 … n-1``.
        """
        if isinstance(indices, np.ndarray):
            return self.many(torch.from_numpy(indices.astype(np.int64))).numpy()
        outside = indices[(indices < 0) | (indices >= self.n)]
        if len(outside):
            raise IndexError(f"index {int(outside[0])}: must lie in 0 … {self.n - 1}")
        return self._table[indices] if self._table is not None else _feistel_walk(indices, self.n, self._round_keys)


def _signed(bits: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (bits & (1 << 64) - 1) - ((bits >> 63 & 1) << 64)


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FACTORS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _mix_(bits: Tensor) -> Tensor:
    """Return the finaliser of splitmix64, in place."""
    for shift, factor in _FACTORS:
        _xor_shift_(bits, shift).mul_(factor)
    return _xor_shift_(bits, 31)


def _xor_shift_(bits: Tensor, shift: int) -> Tensor:
    """``bits ^= bits >>> shift``; int64 shifts extend the sign, which the mask removes."""
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << 64 - shift) - 1))


def _normals(bits: Tensor, std: float) -> Tensor:
    """Box-Muller in fp64, rounded to fp32; the high half of the bits sets the radius, the low half the angle."""
    radius = (bits >> 32).bitwise_and_(_LOW_32).double().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = bits.bitwise_and_(_LOW_32).double().mul_(2.0 * pi / 2**32)
    return radius.mul_(angle.cos_()).mul_(std).float()


def _chunk_size(device: torch.device) -> int:
    """Number of elements per chunk: as many as fit in a CPU's cache, or fill an accelerator."""
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def _chunks(rows: int, columns: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Split a table into blocks of at most ``size`` elements: whole rows if they fit, otherwise pieces of one row."""
    height, width = max(1, size // columns), min(columns, size)
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, min(row + height, rows)), slice(column, min(column + width, columns))


def _runs(shape: Sequence[int], box: IndexBox) -> tuple[int, int]:
    """Return the number of outer dims across which a box is not contiguous, and the length of its contiguous runs."""
    outer = max(len(shape) - 1, 0)
    while outer > 0 and box.size[outer] == shape[outer]:
        outer -= 1
    return outer, prod(box.size[outer:])


def _run_starts(shape: Sequence[int], box: IndexBox, outer: int, runs: Tensor) -> Tensor:
    """Return the global row-major index of the first element of each given run of a box."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = torch.full_like(runs, sum(at * stride for at, stride in zip(box.offset, strides, strict=True)))
    rest = runs
    for dim in reversed(range(outer)):
        starts += rest % box.size[dim] * strides[dim]
        rest = rest // box.size[dim]
    return starts


def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(stream_key("feistel", key, index) for index in range(_FEISTEL_ROUNDS))


def _feistel_walk(indices: Tensor, n: int, round_keys: Sequence[int]) -> Tensor:
    """Bijection of ``0 … n-1``: a Feistel network over a slightly larger grid, reapplied until results are in range."""
    columns = isqrt(n - 1) + 1
    rows = -(-n // columns)
    out = _feistel(indices, rows, columns, round_keys)
    while len(outside := (out >= n).nonzero()[:, 0]):
        out[outside] = _feistel(out[outside], rows, columns, round_keys)
    return out


def _feistel(indices: Tensor, rows: int, columns: int, round_keys: Sequence[int]) -> Tensor:
    """Bijection of ``rows * columns`` numbers: row and column alternately shift each other by their hash."""
    row, column = indices // columns, indices % columns
    for index, key in enumerate(round_keys):
        if index % 2:
            row = (row + _below(key, column, rows)) % rows
        else:
            column = (column + _below(key, row, columns)) % columns
    return row * columns + column


def _below(key: int, index: Tensor, limit: int) -> Tensor:
    """Hash each index to a number below ``limit``."""
    return (counter_bits(key, index) >> 1).bitwise_and_((1 << 63) - 1) % limit
