"""Times, bubbles and peaks."""

import pytest

from megastack.errors import ScheduleError
from megastack.pipeline.action import Action
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.registry import build_schedule
from megastack.pipeline.simulate import Costs, Span, simulate


def lists(*lines: str) -> Schedule:
    return Schedule.from_actions([[Action.parse(cell) for cell in line.split()] for line in lines])


def test_spans_of_two_ranks_by_hand() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 1, 2), Costs(F=1, I=1, W=1))
    assert timeline.spans == [
        Span(0, Action("F", 0, 0), 0, 1),
        Span(0, Action("F", 0, 1), 1, 2),
        Span(0, Action("B", 0, 0), 4, 6),
        Span(0, Action("B", 0, 1), 7, 9),
        Span(1, Action("F", 1, 0), 1, 2),
        Span(1, Action("B", 1, 0), 2, 4),
        Span(1, Action("F", 1, 1), 4, 5),
        Span(1, Action("B", 1, 1), 5, 7),
    ]
    assert (timeline.makespan, timeline.peaks) == (9, (2, 1))
    assert timeline.bubble == timeline.step_bubble == pytest.approx(1 / 3)


def test_the_two_bubbles_differ_where_no_rank_spans_the_step() -> None:
    """Rank 0 ends early, rank 1 starts late: each works without a gap, but the step is longer than both."""
    timeline = simulate(lists("0F0 0I0 0W0", "1F0 1I0 1W0"), Costs(F=(4, 4), I=(0.5, 0.5), W=(0.25, 9)))
    assert timeline.bubble == pytest.approx(0.0)
    assert timeline.step_bubble == pytest.approx(1 - 13.5 / 17.5)


def test_latency_is_paid_on_each_hop() -> None:
    plain, slow = (simulate(build_schedule("1f1b", 4, 1, 1), Costs(p2p=p2p)) for p2p in (0.0, 0.5))
    assert slow.makespan == pytest.approx(plain.makespan + 6 * 0.5)
    one_way = {(r, r + 1): 0.5 for r in range(3)} | {(r + 1, r): 0.0 for r in range(3)}
    assert simulate(build_schedule("1f1b", 4, 1, 1), Costs(p2p=one_way)).makespan == pytest.approx(plain.makespan + 1.5)
    assert simulate(build_schedule("interleaved", 1, 4, 2), Costs(p2p=9.0)).makespan == pytest.approx(6.0)


def test_durations_of_single_stages() -> None:
    costs = Costs(F=(1, 1, 1, 3), I=1, W=1)
    assert (
        simulate(build_schedule("1f1b", 4, 1, 8), costs).makespan > simulate(build_schedule("1f1b", 4, 1, 8)).makespan
    )
    with pytest.raises(ScheduleError, match=r"Costs\.F: has 3 numbers; use one for each of 4 stages"):
        simulate(build_schedule("1f1b", 4, 1, 8), Costs(F=(1, 1, 1)))


def test_a_chunk_takes_its_share_of_the_rank() -> None:
    assert simulate(build_schedule("interleaved", 1, 4, 3), Costs(F=4, I=2, W=2)).makespan == pytest.approx(24)


def test_split_backwards_let_the_neighbour_start_early() -> None:
    whole = simulate(lists("0F0 0B0", "1F0 1B0"))
    split = simulate(lists("0F0 0B0", "1F0 1I0 1W0"))
    assert (whole.makespan, split.makespan) == (6, 5)
    assert simulate(lists("0F0 0I0 0W0", "1F0 1I0 1W0"), Costs(weight_share=0.25)).peaks == (1, 1)


def test_activations_that_wait_for_the_weight_gradient() -> None:
    schedule = lists("0F0 0I0 0F1 0I1 0W0 0W1")
    assert simulate(schedule, Costs(weight_share=0.0)).peaks == (1.0,)
    assert simulate(schedule, Costs(weight_share=0.25)).peaks == (1.25,)
    assert simulate(schedule).peaks == (2.0,)


def test_parts_provide_their_outputs_at_the_end_of_the_action() -> None:
    timeline = simulate(lists("0F0 0F1 (0B0;0F2)OVERLAP_F_B 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"))
    starts = {str(span.action): span.start for span in timeline.spans}
    assert (starts["0B0"], starts["0F2"]) == (4, 6)
    assert starts["1F2"] >= 7


@pytest.mark.parametrize(
    ("published", "pp", "chunks", "microbatches", "times"),
    [
        (0.2431, 8, 1, 24, (18.52, 18.09, 9.34, 0.60)),
        (0.1055, 8, 3, 24, (18.52, 18.09, 9.34, 0.60)),
        (0.2347, 8, 1, 24, (29.72, 29.44, 19.93, 0.53)),
        (0.0808, 8, 4, 24, (29.72, 29.44, 19.93, 0.53)),
        (0.2552, 16, 1, 48, (11.35, 11.25, 8.13, 0.38)),
        (0.1104, 16, 3, 48, (11.35, 11.25, 8.13, 0.38)),
        (0.2646, 32, 1, 96, (10.42, 10.21, 7.72, 0.41)),
        (0.1493, 32, 2, 96, (10.42, 10.21, 7.72, 0.41)),
    ],
)
def test_bubbles_measured_in_the_zero_bubble_paper(
    published: float, pp: int, chunks: int, microbatches: int, times: tuple[float, float, float, float]
) -> None:
    """1F1B and interleaved of arXiv 2401.10241, from its profiled times: 1 - M(F+B+W) over the longest stage."""
    forward, inputs, weights, latency = times
    name = "1f1b" if chunks == 1 else "interleaved"
    costs = Costs(F=forward, I=inputs, W=weights, p2p=latency)
    assert simulate(build_schedule(name, pp, chunks, microbatches), costs).bubble == pytest.approx(published, abs=0.004)


def test_one_rank_never_waits() -> None:
    timeline = simulate(build_schedule("1f1b", 1, 1, 5), Costs(F=0.1, I=0.2, W=0.3))
    assert timeline.bubble == timeline.step_bubble == pytest.approx(0.0, abs=1e-12)
