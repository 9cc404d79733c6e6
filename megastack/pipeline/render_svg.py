"""A timeline as an SVG picture: a lane for each rank, a box for each computation with its microbatch in it.

The hue says what is computed (F, B, I, W), the shade which chunk of the rank it belongs to, the grey of the lane is
idle time. It needs no style sheet or script and looks alike in a browser, on a page and in an editor.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from megastack.pipeline.action import Op
from megastack.pipeline.render_text import figures, title
from megastack.pipeline.simulate import Span, Timeline

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


def svg(timeline: Timeline) -> str:
    """The picture as the text of an SVG file."""
    scale = _scale(timeline)
    lanes = timeline.schedule.pp * (_LANE + _GAP)
    width = max(_LEFT + timeline.makespan * scale + _RIGHT, 520.0)
    height = _TOP + lanes + 40
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}' "
        f"viewBox='0 0 {width:.0f} {height}' {_FONT}>",
        f"<title>{escape(title(timeline))}; {escape(figures(timeline))}</title>",
        f"<rect width='{width:.0f}' height='{height}' fill='#ffffff'/>",
        _text(_LEFT, 26, title(timeline), size=15, weight=600),
        _text(_LEFT, 45, figures(timeline), size=12, fill=_MUTED),
        _text(_LEFT + timeline.makespan * scale + 8, _TOP - 6, "peak", size=11, fill=_MUTED),
    ]
    for rank in range(timeline.schedule.pp):
        parts += _lane(timeline, rank, scale)
    parts += _legend(timeline, _TOP + lanes + 12)
    parts.append(_text(width - _RIGHT, _TOP + lanes + 23, "time →", size=12, fill=_MUTED, anchor="end"))
    return "\n".join([*parts, "</svg>", ""])


def _scale(timeline: Timeline) -> float:
    """Pixels per unit of time: the shortest computation 26 wide, unless the picture would be wider than 1500."""
    lengths = (e - s for times in timeline.times for s, e in zip(times[::2], times[1::2], strict=True) if e > s)
    wide = 26 / min(lengths, default=1.0)
    return min(wide, 1500 / timeline.makespan) if timeline.makespan else wide


def _lane(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    y = _TOP + rank * (_LANE + _GAP)
    middle = y + _LANE / 2 + 4
    end = timeline.makespan * scale
    yield _text(_LEFT - 10, middle, f"rank {rank}", size=12, anchor="end")
    yield f"<rect x='{_LEFT}' y='{y}' width='{end:.2f}' height='{_LANE}' fill='{_IDLE}'/>"
    for span in timeline.rank_spans(rank):
        yield from _box(timeline, span, y, scale)
    yield _text(_LEFT + end + 8, middle, f"{timeline.peaks[rank]:.3g}", size=12)


def _box(timeline: Timeline, span: Span, y: float, scale: float) -> Iterator[str]:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    chunk = timeline.schedule.chunk(span.action.stage)
    fill, ink = _colours(span.action.op, chunk, timeline.schedule.chunks)
    line = "stroke='#ffffff' stroke-width='1'" if width > 4 else ""
    hint = f"<title>{span.action}: {span.start:.4g} to {span.end:.4g}</title>"
    yield f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{_LANE}' fill='{fill}' {line}>{hint}</rect>"
    number = str(span.action.microbatch)
    if width >= 8 * len(number) + 2:
        yield _text(x + width / 2, y + _LANE / 2 + 4, number, size=11, fill=ink, anchor="middle")


def _colours(op: Op, chunk: int, chunks: int) -> tuple[str, str]:
    """The box and the ink of the number in it."""
    share = chunk / (chunks - 1) if chunks > 1 else 0.25
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(*_HUES[op], strict=True))
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return f"#{red:02x}{green:02x}{blue:02x}", _INK if bright else "#ffffff"


def _legend(timeline: Timeline, y: float) -> Iterator[str]:
    chunks = timeline.schedule.chunks
    x = float(_LEFT)
    for op in sorted({span.action.op for span in timeline.spans}, key=list(Op).index):
        for chunk in range(chunks):
            fill, _ = _colours(op, chunk, chunks)
            yield f"<rect x='{x:.0f}' y='{y}' width='13' height='13' fill='{fill}'/>"
            x += 16
        name = _NAMES[op] + (f", chunks 0 to {chunks - 1}" if chunks > 1 else "")
        yield _text(x + 2, y + 11, name, size=12, fill=_MUTED)
        x += 6.4 * len(name) + 26


def _text(
    x: float, y: float, words: str, *, size: int, fill: str = _INK, anchor: str = "start", weight: int = 400
) -> str:
    style = f"font-size='{size}' font-weight='{weight}' fill='{fill}' text-anchor='{anchor}'"
    return f"<text x='{x:.2f}' y='{y:.2f}' {style}>{escape(words)}</text>"
