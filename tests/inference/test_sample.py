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


def test_logits_that_are_no_numbers_are_no_choice() -> None:
    broken = LOGITS.clone()
    broken[2] = float("nan")
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=2)):
        assert choose(torch.stack([LOGITS, broken]), sampling, [0, 1], [0, 0])[1] == NOT_FINITE


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 3}, "top_k=3: temperature=0"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sampling(**values)  # type: ignore[arg-type]
