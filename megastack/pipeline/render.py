"""Draw a schedule: as text for a terminal, as SVG for a page, or as a trace for Chrome's or Perfetto's viewer.

All three draw a `Timeline`; a schedule without times is timed with ``Costs()`` (F 1, B 2) first. They are pure
functions to a string.
"""

from __future__ import annotations

from megastack.errors import ScheduleError
from megastack.pipeline.render_chrome import chrome
from megastack.pipeline.render_svg import svg
from megastack.pipeline.render_text import text
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import Timeline, simulate

FORMATS = {"text": text, "svg": svg, "chrome": chrome}


def render(schedule_or_timeline: Schedule | Timeline, format: str = "text") -> str:
    """The drawing as a string.

    Args:
        schedule_or_timeline: what to draw.
        format: ``text``, ``svg``, or ``chrome`` (JSON of trace events).

    Raises:
        ScheduleError: for another format, or a schedule whose ranks wait for one another for ever.
    """
    if format not in FORMATS:
        raise ScheduleError(f"format={format}: is no drawing; use {', '.join(FORMATS)}")
    drawn = schedule_or_timeline
    return FORMATS[format](drawn if isinstance(drawn, Timeline) else simulate(drawn))
