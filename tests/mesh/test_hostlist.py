"""Slurm host lists against an expansion that knows how each list was made."""

from __future__ import annotations

from itertools import islice, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastack.errors import MeshError
from megastack.mesh.hostlist import first_host, hosts

TEXT = st.text("abz-_.", max_size=3)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A number or a range as text, and the numbers it stands for."""
    width, first, more = draw(st.integers(1, 3)), draw(st.integers(0, 120)), draw(st.integers(0, 4))
    numbers = [f"{number:0{width}d}" for number in range(first, first + more + 1)]
    return (numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{first + more}"), numbers


@st.composite
def terms(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A term with up to three brackets, and its hosts."""
    text = "n" + draw(TEXT)
    pieces: list[list[str]] = [[text]]
    for _ in range(draw(st.integers(0, 3))):
        bracket, suffix = draw(st.lists(ranges(), min_size=1, max_size=3)), draw(TEXT)
        text += f"[{','.join(written for written, _ in bracket)}]{suffix}"
        pieces += [[number for _, numbers in bracket for number in numbers], [suffix]]
    return text, ["".join(parts) for parts in product(*pieces)]


@given(st.lists(terms(), min_size=1, max_size=3))
def test_a_list_expands_in_its_order(made: list[tuple[str, list[str]]]) -> None:
    text, expected = ",".join(term for term, _ in made), [host for _, found in made for host in found]
    assert list(hosts(text)) == expected
    assert first_host(text) == expected[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1,3-5]", ["n1", "n3", "n4", "n5"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[98-101],x", ["n98", "n99", "n100", "n101", "x"]),
        ("rack[1-2]n[03-04]", ["rack1n03", "rack1n04", "rack2n03", "rack2n04"]),
        ("gpu[003,007]-ib,x", ["gpu003-ib", "gpu007-ib", "x"]),
        ("[1-2].example.org", ["1.example.org", "2.example.org"]),
    ],
)
def test_the_forms_that_slurm_writes(text: str, expected: list[str]) -> None:
    assert list(hosts(text)) == expected


def test_a_long_range_is_not_expanded_for_its_first_host() -> None:
    assert first_host("n[1-999999999999]x[0-999999999999]") == "n1x0"
    assert list(islice(hosts("n[1-999999999999]"), 2)) == ["n1", "n2"]


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[1", "n1]", "n[[1]]", "n[1-]", "n[-1]", "n[3-1]", "n[a-b]"),
        *("n[1,]", "n[1-2-3]", "a b", "n[1 - 2]", "a,n[", "n[²]", "n[1]]"),
    ],
)
def test_a_malformed_list_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(MeshError) as caught:
        first_host(text)
    assert str(caught.value).startswith(f"{text!r} is not a Slurm host list (")
