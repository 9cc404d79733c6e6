"""The engine that runs lists of steps as far as they go."""

from megastack.pipeline.progress import Step, run


def test_everything_runs_in_an_order_that_respects_needs() -> None:
    rows = [[Step(("b",), ("a",)), Step()], [Step((), ("b",)), Step(("a",))]]
    reached = run(rows)
    assert reached.positions == [2, 2] and not reached.missing
    assert reached.order.index((1, 0)) < reached.order.index((0, 0)) < reached.order.index((1, 1))


def test_a_cycle_is_named() -> None:
    rows = [[Step(("c",), ("a",))], [Step(("a",), ("b",))], [Step(("b",), ("c",))], [Step(), Step(("c",))]]
    reached = run(rows)
    assert reached.positions == [0, 0, 0, 1]
    assert sorted(reached.cycle(rows)) == [0, 1, 2]


def test_who_only_waits_for_a_cycle_is_not_of_it() -> None:
    rows = [[Step(("a",))], [Step(), Step(("b",), ("a",))], [Step(), Step(("a",), ("b",))]]
    reached = run(rows)
    assert reached.missing.keys() == {0, 1, 2}
    assert sorted(reached.cycle(rows)) == [1, 2]


def test_a_key_that_no_step_provides() -> None:
    rows = [[Step(("never",), ("a",))], [Step(("a",))]]
    assert run(rows).cycle(rows) == [0]


def test_a_step_that_waits_for_itself() -> None:
    rows = [[Step(("a",)), Step((), ("a",))]]
    assert run(rows).cycle(rows) == [0]
