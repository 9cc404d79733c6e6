"""Drawings: a terminal's text, pictures and traces."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megastack.errors import ScheduleError
from megastack.pipeline.render import render
from megastack.pipeline.schedules import registry
from megastack.pipeline.schedules.registry import build_schedule
from megastack.pipeline.simulate import Costs, simulate

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_text_by_hand() -> None:
    assert render(build_schedule("1f1b", 2, 1, 2)).splitlines() == [
        "1f1b: 2 ranks, 2 microbatches",
        "bubble 33.3%, step bubble 33.3%, peak activations 2 microbatches (rank 0)",
        "",
        "rank 0 |F0 F1 ·  ·  B0━━━ ·  B1━━━",
        "rank 1 |·  F0 B0━━━ F1 B1━━━ ·  ·",
    ]


def test_text_names_chunks_and_fits_a_terminal() -> None:
    lines = render(build_schedule("interleaved", 4, 2, 8)).splitlines()
    assert "F0a" in lines[3] and "F0b" in lines[3] and max(map(len, lines)) <= 120
    for rank in range(4):
        drawn = " ".join(line.partition("|")[2] for line in lines if line.startswith(f"rank {rank}"))
        for label in (f"{op}{m}{chunk}" for op in "FB" for m in range(8) for chunk in "ab"):
            assert drawn.count(label) == 1, "a block starts with ━ where a box goes on"
    assert any("|━" in line for line in lines)


def test_text_of_a_long_step_says_that_it_is_cut() -> None:
    lines = render(build_schedule("1f1b", 4, 1, 400)).splitlines()
    assert len(lines) < 50 and lines[-1].startswith("… the first ")


def test_text_of_uneven_times() -> None:
    timeline = simulate(build_schedule("interleaved", 3, 2, 4), Costs(F=1.0, I=0.7, W=0.9, p2p=0.1))
    assert len(render(timeline).splitlines()) > 4


@pytest.mark.parametrize(("name", "size"), [("1f1b", (4, 1, 8)), ("interleaved", (4, 2, 8)), ("gpipe", (1, 1, 1))])
def test_svg_has_a_box_for_each_computation(name: str, size: tuple[int, int, int]) -> None:
    timeline = simulate(build_schedule(name, *size))
    root = ElementTree.fromstring(render(timeline, "svg"))
    tag = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in root.iter(f"{tag}rect") if box.find(f"{tag}title") is not None]
    assert len(boxes) == len(timeline.spans)
    words = " ".join(root.itertext())
    assert "step bubble" in words and f"rank {size[0] - 1}" in words
    width = float(root.attrib["width"])
    assert all(float(box.attrib["x"]) + float(box.attrib["width"]) < width for box in boxes)
    colours = {box.attrib["fill"] for box in boxes}
    assert len(colours) == 2 * size[1], "an own colour for each op and chunk"


def test_svg_boxes_lie_where_they_run() -> None:
    root = ElementTree.fromstring(render(build_schedule("1f1b", 2, 1, 2), "svg"))
    tag = "{http://www.w3.org/2000/svg}"
    boxes = {box.find(f"{tag}title").text.split(":")[0]: box.attrib for box in root.iter(f"{tag}rect") if len(box)}
    assert float(boxes["0B0"]["width"]) == pytest.approx(2 * float(boxes["0F0"]["width"]))
    assert float(boxes["1F0"]["x"]) == pytest.approx(float(boxes["0F1"]["x"]))
    assert float(boxes["1F0"]["y"]) > float(boxes["0F0"]["y"])


def test_chrome_trace() -> None:
    timeline = simulate(build_schedule("interleaved", 2, 2, 3), Costs(p2p=0.25))
    events = json.loads(render(timeline, "chrome"))["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(slices) == len(timeline.spans)
    assert slices["2F0"]["args"] == {"stage": 2, "chunk": 1, "microbatch": 0}
    assert slices["2F0"]["tid"] == 0 and slices["2F0"]["dur"] == 500.0
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 3 * 2 * 3
    assert all(ends[key] >= starts[key] + 250.0 - 1e-9 for key in starts)
    live = [event["args"]["chunks"] for event in events if event["ph"] == "C" and event["tid"] == 0]
    assert max(live) == 2 * timeline.peaks[0] and live[-1] == 0


def test_another_format_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="format=png: unknown; use text, svg, chrome"):
        render(build_schedule("1f1b", 2, 1, 2), "png")


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_h2", 1)])
def test_pictures_of_the_documentation_are_current(name: str, chunks: int) -> None:
    drawn, path = render(build_schedule(name, 4, chunks, 8), "svg"), IMAGES / f"{name}.svg"
    assert path.read_text(encoding="utf-8") == drawn, (
        f"write render(build_schedule({name!r}, 4, {chunks}, 8), 'svg') to {path}"
    )


def test_the_code_of_the_documentation_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    page = (IMAGES.parent / "pipeline.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, {})
    said = capsys.readouterr().out
    assert said.startswith("3F0 3F1 3F2 3F3 3F4 7F0\n") and "one_by_one: 3 ranks, 2 microbatches" in said


def test_figures_of_the_documentation_are_current() -> None:
    page = (IMAGES.parent / "pipeline.md").read_text(encoding="utf-8")
    for name in ("1f1b", "zb_h1", "zb_h2"):
        drawn = re.search(rf"```text\n({name}: .*?)```", page, re.DOTALL)
        assert drawn is not None and drawn[1] == render(build_schedule(name, 4, 1, 8))
