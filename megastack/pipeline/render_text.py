"""A timeline as lines of text: one a rank, time from left to right, cut into blocks that fit a terminal.

    rank 0 |F0  F1  ·   ·   B0━━━━━ B1━━━━━

A column is the shortest computation. F and B say the microbatch, a letter the chunk (where a rank has several), ``━``
that a computation goes on, ``·`` that the rank is idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megastack.pipeline.simulate import Span, Timeline

WIDTH = 118
BLOCKS = 6
_COLUMNS = 20_000


def text(timeline: Timeline) -> str:
    """The drawing, with the bubbles and the peak activations in its first lines."""
    names = [f"rank {rank}" for rank in range(timeline.schedule.pp)]
    margin = max(map(len, names))
    quantum = _quantum(timeline)
    rows = [_cells(timeline, rank, quantum) for rank in range(timeline.schedule.pp)]
    width = 1 + max((len(label) for row in rows for label, _, _ in row), default=1)
    columns = max((end for row in rows for _, _, end in row), default=0)
    step = _even(columns, max(1, (WIDTH - margin - 2) // width))
    lines = heading(timeline)
    starts = list(range(0, columns, step))
    for start in starts[:BLOCKS]:
        lines.append("")
        lines += [
            f"{name:<{margin}} |{_line(row, start, min(start + step, columns), width)}".rstrip()
            for name, row in zip(names, rows, strict=True)
        ]
    if len(starts) > BLOCKS:
        share = BLOCKS * step / columns
        lines += ["", f"… the first {share:.0%} of the step; the svg and chrome formats show all of it"]
    return "\n".join(lines) + "\n"


def _even(columns: int, most: int) -> int:
    """Columns of a block so that the last block is about as long as the others."""
    blocks = max(1, -(-columns // most))
    return max(1, -(-columns // blocks))


def heading(timeline: Timeline) -> list[str]:
    """What it is, both bubbles, and the peak activations."""
    return [title(timeline), figures(timeline)]


def title(timeline: Timeline) -> str:
    """Name and sizes."""
    schedule = timeline.schedule
    sizes = [(schedule.pp, "rank"), (schedule.chunks, "chunk"), (schedule.microbatches, "microbatch")]
    words = [_count(*sizes[0]), _count(*sizes[1]) + " each", _count(*sizes[2])]
    return f"{schedule.name}: {', '.join(words if schedule.chunks > 1 else [words[0], words[2]])}"


def figures(timeline: Timeline) -> str:
    """Both bubbles and the largest peak."""
    peak = max(timeline.peaks)
    rank = timeline.peaks.index(peak)
    shares = f"bubble {timeline.bubble:.1%}, step bubble {timeline.step_bubble:.1%}"
    return f"{shares}, peak activations {peak:.3g} {'microbatch' if peak == 1 else 'microbatches'} (rank {rank})"


def _count(number: int, noun: str) -> str:
    plural = noun if number == 1 else noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {plural}"


def label(timeline: Timeline, span: Span) -> str:
    """``F3``, or ``F3b`` on the second chunk of a rank that has several."""
    action = span.action
    chunk = timeline.schedule.chunk(action.stage)
    letter = chr(ord("a") + chunk) if timeline.schedule.chunks > 1 and chunk < 26 else ""
    return f"{action.op.value}{action.microbatch}{letter}"


def _quantum(timeline: Timeline) -> float:
    """The shortest computation, but so long that the drawing keeps a size that can be made."""
    lengths = (e - s for times in timeline.times for s, e in zip(times[::2], times[1::2], strict=True) if e > s)
    return max(min(lengths, default=1.0), timeline.makespan / _COLUMNS) or 1.0


def _cells(timeline: Timeline, rank: int, quantum: float) -> list[tuple[str, int, int]]:
    """(label, first column, column behind the last) of each computation."""
    return [
        (label(timeline, span), round(span.start / quantum), round(span.end / quantum))
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
