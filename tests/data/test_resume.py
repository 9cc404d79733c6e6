"""The data state of a checkpoint, compared with the data of a run that would resume from it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastack.data.dataset import DataPhase, build_dataset
from megastack.data.resume import data_state, resume_errors

Phases = list[tuple[int, str, int]]
"""First step, text and sequence length of each phase."""

FIRST = (0, "early", 16)
LONGER = (2, "early", 24)
OTHER = (4, "late", 24)
OTHER_SAMPLES = r"data\.phases\[1\]: not the samples of the checkpoint's run; use the same files"


def record(folder: Path, phases: Phases, step: int = 0) -> dict[str, Any]:
    """The trainer record of a checkpoint at this step, of a run with these phases."""
    data = []
    for _, word, length in phases:
        path = folder / f"{word}.jsonl"
        path.write_text("".join(f'{{"text": "{word} {n} and so on and on"}}\n' for n in range(60)))
        data.append(build_dataset(source="jsonl", paths=[path], sequence_length=length, vocab=256))
    later = tuple(DataPhase(begin, each) for (begin, _, _), each in zip(phases[1:], data[1:], strict=True))
    return {"step": step} | data_state(replace(data[0], later_phases=later), seed=1, global_size=4)


@pytest.mark.parametrize(
    ("before", "step", "after", "error"),
    [
        ([FIRST], 3, [FIRST, (3, "early", 24)], None),
        ([FIRST, LONGER, OTHER], 4, [FIRST, LONGER], None),
        ([FIRST, LONGER, OTHER], 2, [FIRST, (3, "early", 12)], None),
        ([FIRST, LONGER], 3, [FIRST, LONGER, OTHER], None),
        ([FIRST], 3, [FIRST, LONGER], r"phases\[0\]\.from_step=2: .* reached step 3 without this phase; use 3 or more"),
        ([FIRST, LONGER], 3, [FIRST], r"data\.phases: .* has one from step 2 on; use the same up to step 3"),
        ([FIRST, LONGER], 3, [FIRST, (1, "early", 24)], r"data\.phases\[0\]\.from_step=1: .* has 2; use 2"),
        ([FIRST, LONGER], 3, [FIRST, (2, "early", 12)], r"phases\[0\]\.sequence_length=12: .* has 24; use 24"),
        ([FIRST, LONGER, OTHER], 5, [FIRST, LONGER, (4, "early", 24)], OTHER_SAMPLES),
        ([FIRST, LONGER], 3, [(0, "late", 16), LONGER], r"data: not the samples of the checkpoint's run"),
    ],
    ids=["add", "drop", "move", "add_another", "too_late", "dropped", "moved", "cut", "other_text", "other_first"],
)
def test_only_phases_that_have_not_begun_may_change(
    before: Phases, step: int, after: Phases, error: str | None, tmp_path: Path
) -> None:
    errors = resume_errors(record(tmp_path, before, step), record(tmp_path, after))
    assert len(errors) == (error is not None), errors
    assert error is None or re.search(error, errors[0])


def test_a_run_without_phases_has_the_usual_record(tmp_path: Path) -> None:
    assert set(record(tmp_path, [FIRST])) == {"step", "seed", "batch", "data"}
