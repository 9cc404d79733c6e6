"""Rotary positions: frequencies against independent formulas, and the rotation against complex numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.errors import ConfigError
from megastack.layers.context import Context
from megastack.layers.rope import Rope, RotaryTables, rotate


def turned(x_BSHK: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Heads rotated as queries, and as keys."""
    q_BSHK, k_BSHK = rotate(x_BSHK, x_BSHK, tables)
    assert torch.equal(q_BSHK, k_BSHK)
    return q_BSHK


LLAMA_31 = Rope(128, theta=5e5, scaling="llama3", factor=8.0)


def test_frequencies_are_a_geometric_series():
    expected = [1.0, 10000 ** (-1 / 4), 10000 ** (-1 / 2), 10000 ** (-3 / 4)]
    assert Rope(8).frequencies().tolist() == pytest.approx(expected, rel=1e-15)
    assert Rope(8).frequencies().dtype == torch.float64


def test_linear_scaling_squeezes_positions():
    stretched, plain = Rope(8, scaling="linear", factor=4.0), Rope(8)
    fourfold = plain.tables(torch.arange(10)[None], torch.float64)
    tables = stretched.tables(4 * torch.arange(10)[None], torch.float64)
    torch.testing.assert_close(tables.cos, fourfold.cos)
    torch.testing.assert_close(tables.sin, fourfold.sin)


def test_llama3_scaling_by_wavelength():
    """By the published rule: long waves are divided, short ones kept, those between are blended by their wavelength."""
    found = LLAMA_31.frequencies().tolist()
    kinds = set()
    for pair, frequency in enumerate(found):
        plain = 5e5 ** (-pair / 64)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            kind, expected = "kept", plain
        elif wavelength > 8192 / 1:
            kind, expected = "divided", plain / 8
        else:
            kind, smooth = "blended", (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        kinds.add(kind)
        assert frequency == pytest.approx(expected, rel=1e-12)
    assert kinds == {"kept", "divided", "blended"}


@pytest.mark.parametrize("rope", [Rope(6), LLAMA_31])
def test_component_i_turns_with_component_i_plus_half(rope):
    generator = torch.Generator().manual_seed(0)
    x_BSHK = torch.randn(2, 5, 3, rope.head_dim, generator=generator, dtype=torch.float64)
    positions_BS = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 0, 1, 100_000]])
    half = rope.head_dim // 2
    angles = positions_BS[..., None, None] * rope.frequencies()
    expected = torch.complex(x_BSHK[..., :half], x_BSHK[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((expected.real, expected.imag), -1)
    torch.testing.assert_close(
        turned(x_BSHK, rope.tables(positions_BS, torch.float64)), expected, rtol=1e-12, atol=1e-12
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_scores_depend_on_the_distance_alone(first, second, shift):
    rope = Rope(8)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(first), dtype=torch.float64)

    def score(a: int, b: int) -> float:
        placed = [turned(x, rope.tables(torch.tensor([[p]]), torch.float64)) for x, p in ((q, a), (k, b))]
        return (placed[0] * placed[1]).sum().item()

    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=1e-9)


def test_low_precision_is_rotated_in_fp32_with_exact_angles():
    rope, positions_BS = Rope(64), torch.tensor([[0, 131_071]])
    tables = rope.tables(positions_BS, torch.bfloat16)
    assert tables.cos.dtype == torch.float32
    exact = rope.tables(positions_BS, torch.float64)
    torch.testing.assert_close(tables.cos, exact.cos.float(), rtol=0, atol=0)
    x_BSHK = torch.ones(1, 2, 1, 64, dtype=torch.bfloat16)
    assert turned(x_BSHK, tables).dtype == torch.bfloat16


def test_a_context_shares_the_tables_of_equal_frequencies_only():
    positions_BS = torch.arange(4)[None]
    context = Context.of(positions_BS, rope=Rope(8), dtype=torch.float64)
    device = positions_BS.device
    assert context.tables(Rope(8), 4, torch.float64, device) is context.rotary
    other = context.tables(Rope(8, theta=500.0), 4, torch.float64, device)
    assert not torch.equal(other.cos, context.rotary.cos)
    counted = Context().tables(Rope(8), 4, torch.float64, device)
    torch.testing.assert_close(counted.cos, context.rotary.cos)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"head_dim": 5}, "head_dim=5: .*even"),
        ({"head_dim": 8, "scaling": "yarn"}, "scaling=yarn: unknown; use none, linear, llama3"),
        ({"head_dim": 8, "scaling": "llama3", "high_freq_factor": 1.0}, "high_freq_factor=1: must exceed"),
    ],
)
def test_invalid_frequencies_are_rejected(options, says):
    with pytest.raises(ConfigError, match=says):
        Rope(**options)
