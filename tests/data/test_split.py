"""Documents on the training and the validation side."""

import pytest

from megastack.data.split import check_fraction, held_out
from megastack.errors import DataError

DOCUMENTS = [f"document {number}".encode() for number in range(4000)]
SIDES = [True, True, True, False, False, False, True, True]


@pytest.mark.parametrize("fraction", [0.05, 0.5])
def test_about_the_fraction_is_held_out(fraction: float) -> None:
    assert sum(held_out(d, fraction) for d in DOCUMENTS) / len(DOCUMENTS) == pytest.approx(fraction, abs=0.02)


def test_a_larger_fraction_only_adds_documents() -> None:
    assert not any(held_out(document, 0.0) for document in DOCUMENTS)
    assert all(held_out(document, 0.3) for document in DOCUMENTS if held_out(document, 0.1))


def test_the_side_depends_on_the_document_alone() -> None:
    """Written down, so that a change of the hash, which would mix old validation text into training, is seen."""
    assert [held_out(document, 0.5) for document in DOCUMENTS[:8]] == SIDES


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fractions_that_leave_nothing_are_refused(fraction: float) -> None:
    with pytest.raises(DataError, match=r"data.validation_fraction="):
        check_fraction(fraction)
