"""The choice of a token from whole logits."""

from __future__ import annotations

import pytest
import torch

from megastack.errors import ConfigError
from megastack.inference.sample import NOT_FINITE, Sampling, choose

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 2.0]).log_softmax(-1)


def draw(sampling: Sampling, count: int = 2000, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """How often each id is chosen."""
    rows = logits.repeat(count, 1)
    ids = choose(rows, sampling, [3] * count, range(count))
    return ids.bincount(minlength=len(logits)) / count


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert choose(LOGITS[None], Sampling(), [0], [0]).tolist() == [0]
    assert choose(LOGITS.flip(0)[None].float(), Sampling(), [7], [9]).tolist() == [0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_ids_are_drawn_with_their_probabilities(temperature: float) -> None:
    found = draw(Sampling(temperature=temperature))
    torch.testing.assert_close(found, (LOGITS / temperature).softmax(-1), atol=0.05, rtol=0)


def test_top_k_and_top_p_leave_the_most_probable() -> None:
    assert draw(Sampling(temperature=1.0, top_k=1), 100)[0] == 1  # of two equal ones the lower
    assert (draw(Sampling(temperature=1.0, top_k=3), 300) > 0).tolist() == [True, False, True, False, True]
    probabilities = LOGITS.exp()
    just_two = float(probabilities[0] + probabilities[4])
    assert (draw(Sampling(temperature=1.0, top_p=just_two - 1e-3), 300) > 0).tolist() == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert (draw(Sampling(temperature=1.0, top_p=just_two + 1e-3), 300) > 0).tolist() == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert draw(Sampling(temperature=1.0, top_p=1e-9), 100)[0] == 1


def test_a_choice_depends_on_seed_sample_and_position_alone() -> None:
    state = torch.get_rng_state()
    sampling = Sampling(temperature=1.0, seed=5)
    batch = choose(LOGITS.repeat(64, 1), sampling, range(64), range(64))
    alone = [int(choose(LOGITS[None], sampling, [i], [i])) for i in range(64)]
    assert batch.tolist() == alone
    assert torch.equal(state, torch.get_rng_state())
    for other in (
        choose(LOGITS.repeat(64, 1), Sampling(temperature=1.0, seed=6), range(64), range(64)),
        choose(LOGITS.repeat(64, 1), sampling, range(1, 65), range(64)),
        choose(LOGITS.repeat(64, 1), sampling, range(64), range(1, 65)),
    ):
        assert not torch.equal(batch, other)


def test_logits_that_are_not_finite_allow_no_choice() -> None:
    broken = LOGITS.clone()
    broken[2] = float("nan")
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=2)):
        assert choose(torch.stack([LOGITS, broken]), sampling, [0, 1], [0, 0])[1] == NOT_FINITE


EXTREMES = {
    "usual": LOGITS.double(),
    "equal": torch.zeros(5, dtype=torch.float64),
    "masked": torch.tensor([-torch.inf, 0.5, -torch.inf, 0.25, -torch.inf], dtype=torch.float64),
    "one left": torch.tensor([-torch.inf, -torch.inf, -torch.inf, -torch.inf, -700.0], dtype=torch.float64),
    "huge": torch.tensor([1e308, -1e308, 1.7e308, -1.7e308, 0.0], dtype=torch.float64),
    "tiny": torch.tensor([1e-308, 5e-324, 0.0, -5e-324, 2e-308], dtype=torch.float64),
    "fp16": torch.tensor([65504.0, -65504.0, 0.0, 1.0, 65503.0]),
}
LIMITS = [{}, {"top_k": 1}, {"top_k": 10**30}, {"top_p": 5e-324}, {"top_p": 1 - 2**-53}, {"top_p": 1.0}]


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-45, 1e-3, 1.0, 1e30, 1.7e308])
def test_every_temperature_and_limit_chooses_a_token_that_is_possible(
    temperature: float, limits: dict[str, float], name: str
) -> None:
    logits = EXTREMES[name]
    found = draw(Sampling(temperature=temperature, **limits), 200, logits)  # type: ignore[arg-type]
    assert len(found) == len(logits) and float(found.sum()) == pytest.approx(1)
    assert not (found > 0)[logits == -torch.inf].any()
    if limits.get("top_k") == 1 or limits.get("top_p") == 5e-324:
        assert found[choose(logits[None], Sampling(), [0], [0])] == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(64, 37, generator=torch.Generator().manual_seed(0))
    for limits in ({}, {"top_k": 5}, {"top_p": 0.9}):
        drawn = choose(logits, Sampling(temperature=temperature, **limits), range(64), range(64))  # type: ignore[arg-type]
        assert torch.equal(drawn, choose(logits, Sampling(), range(64), range(64)))


def test_of_equal_logits_a_tiny_temperature_draws_any() -> None:
    assert (draw(Sampling(temperature=1e-308), 200) > 0).tolist() == [True, False, False, False, True]


def test_a_tiny_temperature_is_greedy_where_denormal_numbers_are_zero() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps denormal numbers")
    try:
        assert choose(LOGITS[1:4][None], Sampling(temperature=1e-308), [0], [0]).tolist() == [1]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("bad", [[float("inf")], [float("nan")], [float("nan"), float("inf")], [-float("inf")] * 5])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1e-308, top_p=0.5)])
def test_logits_without_a_choice_are_marked_row_by_row(sampling: Sampling, bad: list[float]) -> None:
    broken = LOGITS.clone()
    broken[: len(bad)] = torch.tensor(bad)
    first, second = choose(torch.stack([broken, LOGITS]), sampling, [0, 1], [0, 0]).tolist()
    assert first == NOT_FINITE and 0 <= second < len(LOGITS)


def test_a_temperature_so_large_that_probabilities_are_equal_keeps_the_order() -> None:
    assert (draw(Sampling(temperature=1.7e308, top_k=2), 200, LOGITS.flip(0)) > 0).tolist() == [
        True,
        *[False] * 3,
        True,
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": float("inf")}, "temperature=inf: must be a number of at least 0"),
        ({"temperature": float("-inf")}, "temperature=-inf"),
        ({"temperature": 1.0, "top_p": float("nan")}, "top_p=nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 3}, "top_k=3: temperature=0"),
        ({"top_k": 3, "top_p": 0.5}, "^top_k=3, top_p=0.5: temperature=0 [^\n]*$"),
        ({"top_k": 0, "top_p": 2.0}, "^top_k=0: must be [^\n]*\ntop_p=2.0: must be [^\n]*$"),
    ],
)
def test_values_out_of_range_are_rejected(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)  # type: ignore[arg-type]
