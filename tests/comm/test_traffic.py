"""Communication counters: ring-nominal bytes by axis and operation."""

import pytest

from megastack.comm.traffic import Ledger, Traffic, wire_bytes


@pytest.mark.parametrize(
    ("op", "size", "payload", "expected"),
    [
        ("all_reduce", 2, 100, 100),
        ("all_reduce", 4, 100, 150),
        ("all_gather", 4, 100, 75),
        ("reduce_scatter", 8, 80, 70),
        ("all_to_all", 5, 100, 80),
        ("send", 2, 100, 100),
        ("broadcast", 4, 100, 100),
    ],
)
def test_wire_bytes_are_ring_nominal(op: str, size: int, payload: int, expected: int) -> None:
    assert wire_bytes(op, size, payload) == expected


def test_large_payloads_are_exact() -> None:
    assert wire_bytes("all_reduce", 3, 3 * 2**60) == 4 * 2**60


def test_an_operation_without_a_cost_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="no wire cost for gossip"):
        Ledger().record("tp", "gossip", 2, 8)


def test_totals_are_by_axis_by_operation_and_over_all() -> None:
    ledger = Ledger()
    ledger.record("tp", "all_reduce", 2, 10)
    ledger.record("tp", "all_reduce", 2, 30)
    ledger.record("tp", "all_gather", 2, 8)
    ledger.record("dp", "all_reduce", 4, 100)
    assert ledger.total("tp", "all_reduce") == Traffic(2, 40, 40)
    assert ledger.total("tp") == Traffic(3, 48, 44)
    assert ledger.total(op="all_reduce") == Traffic(3, 140, 190)
    assert ledger.total() == Traffic(4, 148, 194)
    assert ledger.total("pp") == Traffic()
    assert set(ledger.records()) == {("tp", "all_reduce"), ("tp", "all_gather"), ("dp", "all_reduce")}


def test_reset_forgets_and_records_are_a_copy() -> None:
    ledger = Ledger()
    ledger.record("tp", "send", 2, 10)
    before = ledger.records()
    ledger.reset()
    assert ledger.total() == Traffic()
    assert before == {("tp", "send"): Traffic(1, 10, 10)}
