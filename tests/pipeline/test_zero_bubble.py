"""Schedules that split the backward: their orders, memory, idle time and published bubbles."""

from collections.abc import Iterator
from random import Random

import pytest

from megastack.errors import ScheduleError
from megastack.pipeline.check import check
from megastack.pipeline.schedules import zero_bubble
from megastack.pipeline.schedules.registry import build_schedule, closed_form, splits_backward
from megastack.pipeline.simulate import Costs, simulate

DEPTHS = {"zb_h1": 1, "zb_h2": 2}
ALL_SIZES = [(pp, microbatches) for pp in range(1, 9) for microbatches in range(1, 21)]
W_IS_THE_SHORTEST = [(1, 1, 1), (3, 3, 1), (3, 2, 2), (2, 3, 2), (4, 5, 3), (100, 30, 28)]


def near(pp: int) -> set[int]:
    """Numbers of microbatches at which the behaviour changes."""
    return {1, 2, 3, pp - 1, pp, pp + 1, 2 * pp - 2, 2 * pp - 1, 2 * pp, 20} - {0}


def few_sizes() -> Iterator[tuple[int, int]]:
    return ((pp, microbatches) for pp in (1, 2, 3, 5, 8) for microbatches in sorted(near(pp)))


def lines(name: str, pp: int, microbatches: int) -> list[str]:
    """The lists of each rank without the stage."""
    return [
        " ".join(str(action).removeprefix(str(rank)) for action in row)
        for rank, row in enumerate(build_schedule(name, pp, 1, microbatches).ranks)
    ]


def test_h1_by_hand() -> None:
    assert lines("zb_h1", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_h2_by_hand() -> None:
    assert lines("zb_h2", 3, 6) == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5",
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5",
    ]


def test_fewer_microbatches_than_ranks() -> None:
    assert lines("zb_h1", 4, 2) == [
        "F0 F1 B0 B1",
        "F0 F1 I0 W0 I1 W1",
        "F0 F1 I0 W0 I1 W1",
        "F0 I0 F1 I1 W0 W1",
    ]
    assert lines("zb_h2", 4, 1) == ["F0 B0"] + ["F0 I0 W0"] * 3


@pytest.mark.parametrize("name", DEPTHS)
@pytest.mark.parametrize("sizes", [list(few_sizes()), pytest.param(ALL_SIZES, marks=pytest.mark.full)])
def test_they_pass_the_check(name: str, sizes: list[tuple[int, int]]) -> None:
    for pp, microbatches in sizes:
        report = check(build_schedule(name, pp, 1, microbatches))
        assert report.actions == (3 * pp - 1) * microbatches, "rank 0 has B for I and W"
        assert sum(report.sends) == 2 * (pp - 1) * microbatches


@pytest.mark.parametrize("name", DEPTHS)
def test_each_list_is_1f1b_with_deferred_weight_gradients(name: str) -> None:
    """Forwards and input gradients as if with a longer warm-up; weight gradients in order, as late as documented."""
    for pp, microbatches in ALL_SIZES:
        for rank, line in enumerate(lines(name, pp, microbatches)):
            cells = line.split()
            if rank == 0:
                backwards = [cell for cell in cells if cell[0] != "F"]
                assert backwards == [f"B{m}" for m in range(microbatches)], "nobody waits for its I"
                continue
            place = {cell: step for step, cell in enumerate(cells)}
            weights = [int(cell[1:]) for cell in cells if cell[0] == "W"]
            assert weights == list(range(microbatches))
            for m in weights:
                behind = sum(cell[0] == "I" for cell in cells[: place[f"W{m}"]]) - m - 1
                assert 0 <= behind <= DEPTHS[name] * rank
            if rank == pp - 1:
                assert all(place[f"I{m}"] == place[f"F{m}"] + 1 for m in weights), "its gradients leave first"


@pytest.mark.parametrize("name", DEPTHS)
def test_peaks_are_those_of_the_paper(name: str) -> None:
    """(p-r) M_B + r M_W for ZB-H1, (2p-2r-1) M_B + 2r M_W for ZB-H2, and never more with fewer microbatches."""
    depth = DEPTHS[name]
    for pp, microbatches in ALL_SIZES:
        schedule, formula = build_schedule(name, pp, 1, microbatches), closed_form(name, pp, 1, microbatches)
        assert formula is not None and simulate(schedule).peaks == formula.peaks
        most = pp if name == "zb_h1" else 2 * pp - 1
        assert formula.peaks == (min(microbatches, most),) * pp
        for share in (0.0, 0.25, 1.0):
            peaks = simulate(schedule, Costs(weight_share=share)).peaks
            assert peaks == pytest.approx(
                zero_bubble.peaks(pp, 1, microbatches, depth=depth, weight_share=share), abs=1e-12
            )
            if microbatches >= most:
                whole = [pp - r if name == "zb_h1" else 2 * pp - 2 * r - 1 for r in range(pp)]
                assert peaks == pytest.approx([w + share * depth * r for r, w in enumerate(whole)], abs=1e-12)
    first = closed_form("1f1b", 8, 1, 20)
    assert first is not None and simulate(build_schedule("zb_h1", 8, 1, 20)).peaks == (first.peaks[0],) * 8


@pytest.mark.parametrize("name", DEPTHS)
def test_the_closed_form_equals_the_simulation(name: str) -> None:
    for pp, microbatches in ALL_SIZES:
        timeline = simulate(build_schedule(name, pp, 1, microbatches))
        formula = closed_form(name, pp, 1, microbatches)
        assert formula is not None
        assert timeline.bubble == pytest.approx(formula.bubble, abs=1e-12), f"{name} p={pp} M={microbatches}"
        if name == "zb_h1" and microbatches >= pp:
            assert formula.bubble == pytest.approx((pp - 1) / (pp - 1 + 3 * microbatches))
        if name == "zb_h2" and microbatches >= 2 * pp - 1:
            assert formula.bubble == 0


@pytest.mark.parametrize("name", DEPTHS)
@pytest.mark.parametrize("times", W_IS_THE_SHORTEST, ids=str)
def test_idle_time_where_no_forward_or_input_gradient_is_shorter_than_w(name: str, times: tuple[int, int, int]) -> None:
    F, I, W = times  # noqa: E741
    for pp, microbatches in ALL_SIZES:
        if microbatches not in near(pp):
            continue
        timeline = simulate(build_schedule(name, pp, 1, microbatches), Costs(F=F, I=I, W=W))
        idle = zero_bubble.idle(pp, 1, microbatches, depth=DEPTHS[name], F=F, I=I, W=W)
        work = microbatches * (F + I + W)
        where = f"p={pp} M={microbatches}"
        assert timeline.bubble == pytest.approx(idle / (idle + work), abs=1e-12), where
        assert timeline.makespan == pytest.approx(work + max(idle, (pp - 1) * F), rel=1e-12), where
        if microbatches <= pp:
            assert idle + work == (microbatches + pp - 1) * (F + I) + W
        elif name == "zb_h1":
            assert idle == (pp - 1) * (F + I - W)
        elif microbatches >= 2 * pp - 1:
            assert idle == (pp - 1) * (F + I - 2 * W)


def test_h1_is_never_slower_than_1f1b() -> None:
    """For any F, I, W and latency, while stages differ by at most 30 % either way."""
    random = Random(3)
    for _ in range(300):
        pp, microbatches = random.randint(1, 6), random.randint(1, 16)
        usual, spread = [random.uniform(0.1, 10.0) for _ in "FIW"], random.choice([0.0, 0.1, 0.3])
        F, I, W = ([t * random.uniform(1 - spread, 1 + spread) for _ in range(pp)] for t in usual)  # noqa: E741
        costs = Costs(F=F, I=I, W=W, p2p=random.choice([0.0, 0.1, 0.5]))
        plain, split = (simulate(build_schedule(name, pp, 1, microbatches), costs) for name in ("1f1b", "zb_h1"))
        assert split.makespan <= plain.makespan * (1 + 1e-12), (pp, microbatches, costs)


@pytest.mark.parametrize(
    ("pp", "few", "many", "times", "few_published", "many_published"),
    [
        (8, 24, 64, (18.52, 18.09, 9.34, 0.60), (0.1585, 0.1083), (0.0674, 0.0444)),
        (8, 24, 64, (29.72, 29.44, 19.93, 0.53), (0.1323, 0.0698), (0.0554, 0.0294)),
        (16, 48, 128, (11.35, 11.25, 8.13, 0.38), (0.1397, 0.0672), (0.0576, 0.0266)),
        (32, 96, 256, (10.42, 10.21, 7.72, 0.41), (0.1421, 0.0641), (0.0594, 0.0257)),
    ],
)
def test_bubbles_of_the_paper(
    pp: int,
    few: int,
    many: int,
    times: tuple[float, float, float, float],
    few_published: tuple[float, float],
    many_published: tuple[float, float],
) -> None:
    """ZB-H1 and ZB-H2 of arXiv 2401.10241, from its profiled times: 1 - M(F+I+W) over the longest stage.

    At the larger M the published rates lie up to 0.002 above what the same times give.
    """
    forward, inputs, weights, latency = times
    costs = Costs(F=forward, I=inputs, W=weights, p2p=latency)
    for name, at_few, at_many in zip(DEPTHS, few_published, many_published, strict=True):
        assert simulate(build_schedule(name, pp, 1, few), costs).bubble == pytest.approx(at_few, abs=0.0003)
        assert simulate(build_schedule(name, pp, 1, many), costs).bubble == pytest.approx(at_many, abs=0.0025)


@pytest.mark.parametrize("name", DEPTHS)
def test_several_chunks_are_rejected(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"schedule.chunks=2: {name} runs one stage a rank; use 1 or schedule.name"):
        build_schedule(name, 2, 2, 4)


def test_which_schedules_split_backwards() -> None:
    split = [name for name in ("gpipe", "1f1b", *DEPTHS) if splits_backward(name, 4, 1, 8)]
    assert split == list(DEPTHS)
    assert not splits_backward("zb_h1", 1, 1, 8), "one rank has whole backwards"
    assert not splits_backward("interleaved", 4, 2, 8)
