"""Rows of metrics.jsonl: exact numbers, null for values that are not finite, the last row of each step."""

from __future__ import annotations

import json
import math

from megastack.observe.metrics import MetricsWriter, read_metrics, row, scalars


def test_floats_read_back_exactly_and_what_is_not_finite_is_null(tmp_path):
    values = {
        "loss": 0.1 + 0.2,
        "grad_norm": 5e-324,
        "lr": 1 / 3,
        "mfu": None,
        "bad": math.nan,
        "nested": {"x": -math.inf},
    }
    writer = MetricsWriter(tmp_path / "metrics.jsonl", tensorboard=False)
    writer.write(row("train", 1, values))
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert '"loss": 0.30000000000000004' in line and "NaN" not in line
    found = json.loads(line)
    assert found["lr"] == 1 / 3 and found["grad_norm"] == 5e-324
    assert found["mfu"] is None and found["bad"] is None and found["nested"] == {"x": None}
    assert list(found)[:3] == ["kind", "step", "time"]


def test_the_last_row_of_a_step_counts(tmp_path):
    """A resumed run appends; rows beyond the resumed step are superseded."""
    path = tmp_path / "metrics.jsonl"
    for loss, steps in (("a", (1, 2, 3)), ("b", (2, 3, 4))):
        writer = MetricsWriter(path, tensorboard=False)
        for step in steps:
            writer.write(row("train", step, {"loss": loss}))
            writer.write(row("validation", step, {"loss": loss + "v"}))
        writer.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, "a"), (2, "b"), (3, "b"), (4, "b")]
    assert [r["loss"] for r in read_metrics(path, "validation")] == ["av", "bv", "bv", "bv"]


def test_tensorboard_tags():
    entry = row("train", 3, {"loss": 1.0, "mfu": None, "step_time_s": 2.0, "wire_bytes": {"tp": 7}, "exposed_s": {}})
    assert scalars(entry) == {"train/loss": 1.0, "perf/step_time_s": 2.0, "comm/tp/wire_bytes": 7}
    assert scalars(row("validation", 3, {"loss": 2.0, "tokens": 5})) == {"val/loss": 2.0}
    assert scalars(row("event", 3, {"name": "start"})) == {}


def test_tensorboard_events_are_written_beside_the_rows(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path / "metrics.jsonl", tensorboard=True)
    writer.write(row("train", 5, {"loss": 1.5}))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(5, 1.5)]
