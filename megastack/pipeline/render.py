"""Draws a schedule: as text for a terminal, as SVG for a page, or as a trace for Chrome's or Perfetto's viewer.

All three formats draw a `Timeline`; a schedule without times is first simulated with ``Costs()`` (F 1, B 2). The
functions are pure and return a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from megastack.errors import ScheduleError
from megastack.pipeline.action import Op, pack
from megastack.pipeline.messages import input_key, message_of, output_key
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import Span, Timeline, simulate


def render(schedule_or_timeline: Schedule | Timeline, format: str = "text") -> str:
    """The drawing as a string.

    Args:
        schedule_or_timeline: the object to draw.
        format: ``text``, ``svg``, or ``chrome`` (JSON of trace events).

    Raises:
        ScheduleError: the format is unknown, or the ranks of the schedule deadlock.
    """
    if format not in FORMATS:
        raise ScheduleError(f"format={format}: unknown; use {', '.join(FORMATS)}")
    drawn = schedule_or_timeline
    return FORMATS[format](drawn if isinstance(drawn, Timeline) else simulate(drawn))


# Shared by the formats.


def _title(timeline: Timeline) -> str:
    """Name and sizes."""
    schedule = timeline.schedule
    sizes = [(schedule.pp, "rank"), (schedule.chunks, "chunk"), (schedule.microbatches, "microbatch")]
    words = [_count(*sizes[0]), _count(*sizes[1]) + " each", _count(*sizes[2])]
    return f"{schedule.name}: {', '.join(words if schedule.chunks > 1 else [words[0], words[2]])}"


def _figures(timeline: Timeline) -> str:
    """Both bubbles and the largest peak."""
    peak = max(timeline.peaks)
    rank = timeline.peaks.index(peak)
    shares = f"bubble {timeline.bubble:.1%}, step bubble {timeline.step_bubble:.1%}"
    return f"{shares}, peak activations {peak:.3g} {'microbatch' if peak == 1 else 'microbatches'} (rank {rank})"


def _count(number: int, noun: str) -> str:
    plural = noun if number == 1 else noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {plural}"


def _label(timeline: Timeline, span: Span) -> str:
    """``F3``, or ``F3b`` on the second chunk of a rank that has several."""
    action = span.action
    chunk = timeline.schedule.chunk(action.stage)
    letter = chr(ord("a") + chunk) if timeline.schedule.chunks > 1 and chunk < 26 else ""
    return f"{action.op.value}{action.microbatch}{letter}"


# Text: one line per rank, time from left to right, wrapped into blocks that fit a terminal.
#
#     rank 0 |F0  F1  ·   ·   B0━━━━━ B1━━━━━
#
# A column is the shortest computation. F and B are followed by the microbatch, then by a letter for the chunk if a rank
# has several; ``━`` continues a computation, ``·`` is idle time.

_WIDTH = 118
_BLOCKS = 6
_COLUMNS = 20_000


def _as_text(timeline: Timeline) -> str:
    """The drawing, with the bubbles and the peak activations in its first lines."""
    names = [f"rank {rank}" for rank in range(timeline.schedule.pp)]
    margin = max(map(len, names))
    quantum = _quantum(timeline)
    rows = [_cells(timeline, rank, quantum) for rank in range(timeline.schedule.pp)]
    width = 1 + max((len(label) for row in rows for label, _, _ in row), default=1)
    columns = max((end for row in rows for _, _, end in row), default=0)
    step = _even(columns, max(1, (_WIDTH - margin - 2) // width))
    lines = _heading(timeline)
    starts = list(range(0, columns, step))
    for start in starts[:_BLOCKS]:
        lines.append("")
        lines += [
            f"{name:<{margin}} |{_line(row, start, min(start + step, columns), width)}".rstrip()
            for name, row in zip(names, rows, strict=True)
        ]
    if len(starts) > _BLOCKS:
        share = _BLOCKS * step / columns
        lines += ["", f"… the first {share:.0%} of the step; the svg and chrome formats show all of it"]
    return "\n".join(lines) + "\n"


def _even(columns: int, most: int) -> int:
    """The columns of a block, such that the last block is about as long as the others."""
    blocks = max(1, -(-columns // most))
    return max(1, -(-columns // blocks))


def _heading(timeline: Timeline) -> list[str]:
    """The title, both bubbles, and the peak activations."""
    return [_title(timeline), _figures(timeline)]


def _quantum(timeline: Timeline) -> float:
    """The duration of a column: the shortest computation, but long enough to limit the size of the drawing."""
    lengths = (e - s for times in timeline.times for s, e in zip(times[::2], times[1::2], strict=True) if e > s)
    return max(min(lengths, default=1.0), timeline.makespan / _COLUMNS) or 1.0


def _cells(timeline: Timeline, rank: int, quantum: float) -> list[tuple[str, int, int]]:
    """(label, first column, column after the last) of each computation."""
    return [
        (_label(timeline, span), round(span.start / quantum), round(span.end / quantum))
        for span in timeline.rank_spans(rank)
    ]


def _line(row: Sequence[tuple[str, int, int]], start: int, stop: int, width: int) -> str:
    return "".join(_pieces(row, start, stop, width))


def _pieces(row: Sequence[tuple[str, int, int]], start: int, stop: int, width: int) -> Iterator[str]:
    at = start
    for name, first, end in row:
        if end <= start or first >= stop:
            continue
        yield "·".ljust(width) * (first - at)
        shown = (min(end, stop) - max(first, start)) * width
        head = name if first >= start else "━"
        bar = "━" * (shown - 1 - len(head)) if end - first > 1 else ""
        yield (head + bar)[: max(shown - 1, 0)].ljust(shown)
        at = min(end, stop)
    yield "·".ljust(width) * (stop - at)


# SVG: a lane per rank, and a box with the microbatch's number per computation. The hue shows the op, the shade the
# chunk, the grey of the lane idle time. No style sheet or script is needed.

_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}
# For each op, the shades of the first and of the last chunk, as red, green, blue.
_HUES = {
    Op.F: ((43, 95, 168), (164, 203, 240)),
    Op.B: ((33, 122, 82), (163, 218, 184)),
    Op.I: ((110, 72, 160), (208, 187, 232)),
    Op.W: ((186, 106, 20), (246, 205, 148)),
}
_LANE, _GAP, _LEFT, _TOP, _RIGHT = 26, 6, 62, 66, 70
_FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
_INK, _MUTED, _IDLE = "#1c2430", "#5c6673", "#eef0f3"


def _as_svg(timeline: Timeline) -> str:
    """The picture as the text of an SVG file."""
    scale = _svg_scale(timeline)
    lanes = timeline.schedule.pp * (_LANE + _GAP)
    width = max(_LEFT + timeline.makespan * scale + _RIGHT, 520.0)
    height = _TOP + lanes + 40
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}' "
        f"viewBox='0 0 {width:.0f} {height}' {_FONT}>",
        f"<title>{escape(_title(timeline))}; {escape(_figures(timeline))}</title>",
        f"<rect width='{width:.0f}' height='{height}' fill='#ffffff'/>",
        _svg_text(_LEFT, 26, _title(timeline), size=15, weight=600),
        _svg_text(_LEFT, 45, _figures(timeline), size=12, fill=_MUTED),
        _svg_text(_LEFT + timeline.makespan * scale + 8, _TOP - 6, "peak", size=11, fill=_MUTED),
    ]
    for rank in range(timeline.schedule.pp):
        parts += _svg_lane(timeline, rank, scale)
    parts += _svg_legend(timeline, _TOP + lanes + 12)
    parts.append(_svg_text(width - _RIGHT, _TOP + lanes + 23, "time →", size=12, fill=_MUTED, anchor="end"))
    return "\n".join([*parts, "</svg>", ""])


def _svg_scale(timeline: Timeline) -> float:
    """Pixels per unit of time: the shortest computation is 26 wide, unless the picture would be wider than 1500."""
    lengths = (e - s for times in timeline.times for s, e in zip(times[::2], times[1::2], strict=True) if e > s)
    wide = 26 / min(lengths, default=1.0)
    return min(wide, 1500 / timeline.makespan) if timeline.makespan else wide


def _svg_lane(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    y = _TOP + rank * (_LANE + _GAP)
    middle = y + _LANE / 2 + 4
    end = timeline.makespan * scale
    yield _svg_text(_LEFT - 10, middle, f"rank {rank}", size=12, anchor="end")
    yield f"<rect x='{_LEFT}' y='{y}' width='{end:.2f}' height='{_LANE}' fill='{_IDLE}'/>"
    for span in timeline.rank_spans(rank):
        yield from _svg_box(timeline, span, y, scale)
    yield _svg_text(_LEFT + end + 8, middle, f"{timeline.peaks[rank]:.3g}", size=12)


def _svg_box(timeline: Timeline, span: Span, y: float, scale: float) -> Iterator[str]:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    chunk = timeline.schedule.chunk(span.action.stage)
    fill, ink = _svg_colours(span.action.op, chunk, timeline.schedule.chunks)
    line = "stroke='#ffffff' stroke-width='1'" if width > 4 else ""
    hint = f"<title>{span.action}: {span.start:.4g} to {span.end:.4g}</title>"
    yield f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{_LANE}' fill='{fill}' {line}>{hint}</rect>"
    number = str(span.action.microbatch)
    if width >= 8 * len(number) + 2:
        yield _svg_text(x + width / 2, y + _LANE / 2 + 4, number, size=11, fill=ink, anchor="middle")


def _svg_colours(op: Op, chunk: int, chunks: int) -> tuple[str, str]:
    """The colours of the box and of the number in it."""
    share = chunk / (chunks - 1) if chunks > 1 else 0.25
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(*_HUES[op], strict=True))
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return f"#{red:02x}{green:02x}{blue:02x}", _INK if bright else "#ffffff"


def _svg_legend(timeline: Timeline, y: float) -> Iterator[str]:
    chunks = timeline.schedule.chunks
    x = float(_LEFT)
    for op in sorted({span.action.op for span in timeline.spans}, key=list(Op).index):
        for chunk in range(chunks):
            fill, _ = _svg_colours(op, chunk, chunks)
            yield f"<rect x='{x:.0f}' y='{y}' width='13' height='13' fill='{fill}'/>"
            x += 16
        name = _NAMES[op] + (f", chunks 0 to {chunks - 1}" if chunks > 1 else "")
        yield _svg_text(x + 2, y + 11, name, size=12, fill=_MUTED)
        x += 6.4 * len(name) + 26


def _svg_text(
    x: float, y: float, words: str, *, size: int, fill: str = _INK, anchor: str = "start", weight: int = 400
) -> str:
    style = f"font-size='{size}' font-weight='{weight}' fill='{fill}' text-anchor='{anchor}'"
    return f"<text x='{x:.2f}' y='{y:.2f}' {style}>{escape(words)}</text>"


# Chrome: a thread per rank, an arrow per message between two computations, and a counter of live activations per rank.
# One unit of simulated time is a millisecond.

_MICROSECONDS = 1000.0
_Event = dict[str, Any]


def _as_chrome(timeline: Timeline) -> str:
    """The trace as JSON, one event per line."""
    events = list(_events(timeline))
    lines = ",\n".join(json.dumps(event, sort_keys=True) for event in events)
    other = json.dumps({"title": _title(timeline), "figures": _figures(timeline)})
    return f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n{lines}\n]}}\n'


def _events(timeline: Timeline) -> Iterator[_Event]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": _title(timeline)}}
    for rank in range(timeline.schedule.pp):
        name = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}
    for span in timeline.spans:
        yield _slice(timeline, span)
        yield from _arrows(timeline, span)
    for rank in range(timeline.schedule.pp):
        yield from _counter(timeline, rank)


def _slice(timeline: Timeline, span: Span) -> _Event:
    action = span.action
    place = {"stage": action.stage, "chunk": timeline.schedule.chunk(action.stage), "microbatch": action.microbatch}
    return _at(span.rank, span.start) | {
        "ph": "X",
        "name": str(action),
        "cat": action.op.value,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "args": place,
    }


def _arrows(timeline: Timeline, span: Span) -> Iterator[_Event]:
    (packed,) = pack(span.action)
    made, taken = output_key(packed), input_key(timeline.schedule, packed)
    if made is not None and message_of(timeline.schedule, made):
        yield _at(span.rank, span.end) | {"ph": "s", "id": made, "name": "message", "cat": "message"}
    if taken is not None and message_of(timeline.schedule, taken):
        yield _at(span.rank, span.start) | {"ph": "f", "bp": "e", "id": taken, "name": "message", "cat": "message"}


def _counter(timeline: Timeline, rank: int) -> Iterator[_Event]:
    live = 0
    for span in timeline.rank_spans(rank):
        change = {Op.F: 1, Op.B: -1, Op.W: -1}.get(span.action.op, 0)
        if change:
            live += change
            moment = span.start if change > 0 else span.end
            level = {"chunks": live}
            yield _at(rank, moment) | {"ph": "C", "name": f"activations, rank {rank}", "args": level}


def _at(rank: int, time: float) -> _Event:
    return {"pid": 0, "tid": rank, "ts": time * _MICROSECONDS}


FORMATS = {"text": _as_text, "svg": _as_svg, "chrome": _as_chrome}
