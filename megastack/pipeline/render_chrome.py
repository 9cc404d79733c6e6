"""A timeline as trace events, for ``chrome://tracing`` and https://ui.perfetto.dev.

A thread for each rank, an arrow for each message from the computation that makes a value to the one that takes it, and
a counter of live activations for each rank. One unit of time is drawn as a millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megastack.pipeline.action import Op, pack
from megastack.pipeline.boundary import message, value, wanted
from megastack.pipeline.render_text import figures, title
from megastack.pipeline.simulate import Span, Timeline

_MICROSECONDS = 1000.0
Event = dict[str, Any]


def chrome(timeline: Timeline) -> str:
    """The trace as JSON, an event a line."""
    events = list(_events(timeline))
    lines = ",\n".join(json.dumps(event, sort_keys=True) for event in events)
    other = json.dumps({"title": title(timeline), "figures": figures(timeline)})
    return f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n{lines}\n]}}\n'


def _events(timeline: Timeline) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title(timeline)}}
    for rank in range(timeline.schedule.pp):
        name = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}
    for span in timeline.spans:
        yield _slice(timeline, span)
        yield from _arrows(timeline, span)
    for rank in range(timeline.schedule.pp):
        yield from _counter(timeline, rank)


def _slice(timeline: Timeline, span: Span) -> Event:
    action = span.action
    place = {"stage": action.stage, "chunk": timeline.schedule.chunk(action.stage), "microbatch": action.microbatch}
    return _at(span.rank, span.start) | {
        "ph": "X",
        "name": str(action),
        "cat": action.op.value,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "args": place,
    }


def _arrows(timeline: Timeline, span: Span) -> Iterator[Event]:
    (packed,) = pack(span.action)
    made, taken = value(packed), wanted(timeline.schedule, packed)
    if made is not None and message(timeline.schedule, made):
        yield _at(span.rank, span.end) | {"ph": "s", "id": made, "name": "message", "cat": "message"}
    if taken is not None and message(timeline.schedule, taken):
        yield _at(span.rank, span.start) | {"ph": "f", "bp": "e", "id": taken, "name": "message", "cat": "message"}


def _counter(timeline: Timeline, rank: int) -> Iterator[Event]:
    live = 0
    for span in timeline.rank_spans(rank):
        change = {Op.F: 1, Op.B: -1, Op.W: -1}.get(span.action.op, 0)
        if change:
            live += change
            moment = span.start if change > 0 else span.end
            level = {"chunks": live}
            yield _at(rank, moment) | {"ph": "C", "name": f"activations, rank {rank}", "args": level}


def _at(rank: int, time: float) -> Event:
    return {"pid": 0, "tid": rank, "ts": time * _MICROSECONDS}
