"""What a checkpoint says of its data, held against the data of a run that would go on from it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastack.data.continuity import identity, identity_errors
from megastack.data.dataset import DataPhase, build_dataset

Stages = list[tuple[int, str, int]]
"""First step, text and sequence length of each stage."""

FIRST = (0, "early", 16)
LONGER = (2, "early", 24)
OTHER = (4, "late", 24)
NOT_THOSE = r"data\.phases\[1\]: not the samples of the checkpoint's run; use the same files"


def record(folder: Path, stages: Stages, step: int = 0) -> dict[str, Any]:
    """What a checkpoint of this step says of a run with these stages."""
    data = []
    for _, word, length in stages:
        path = folder / f"{word}.jsonl"
        path.write_text("".join(f'{{"text": "{word} {n} and so on and on"}}\n' for n in range(60)))
        data.append(build_dataset(source="jsonl", paths=[path], sequence_length=length, vocab=256))
    later = tuple(DataPhase(begin, each) for (begin, _, _), each in zip(stages[1:], data[1:], strict=True))
    return {"step": step} | identity(replace(data[0], later=later), seed=1, global_size=4)


@pytest.mark.parametrize(
    ("before", "step", "after", "fault"),
    [
        ([FIRST], 3, [FIRST, (3, "early", 24)], None),
        ([FIRST, LONGER, OTHER], 4, [FIRST, LONGER], None),
        ([FIRST, LONGER, OTHER], 2, [FIRST, (3, "early", 12)], None),
        ([FIRST, LONGER], 3, [FIRST, LONGER, OTHER], None),
        ([FIRST], 3, [FIRST, LONGER], r"stages\[0\]\.from_step=2: .* to step 3 without this stage; use 3 or more"),
        ([FIRST, LONGER], 3, [FIRST], r"data\.phases: .* has one from step 2 on; use the same up to step 3"),
        ([FIRST, LONGER], 3, [FIRST, (1, "early", 24)], r"data\.phases\[0\]\.from_step=1: .* has 2; use 2"),
        ([FIRST, LONGER], 3, [FIRST, (2, "early", 12)], r"stages\[0\]\.sequence_length=12: .* has 24; use 24"),
        ([FIRST, LONGER, OTHER], 5, [FIRST, LONGER, (4, "early", 24)], NOT_THOSE),
        ([FIRST, LONGER], 3, [(0, "late", 16), LONGER], r"data: not the samples of the checkpoint's run"),
    ],
    ids=["add", "drop", "move", "add_another", "too_late", "dropped", "moved", "cut", "other_text", "other_first"],
)
def test_only_stages_that_have_not_begun_may_change(
    before: Stages, step: int, after: Stages, error: str | None, tmp_path: Path
) -> None:
    errors = identity_errors(record(tmp_path, before, step), record(tmp_path, after))
    assert len(errors) == (error is not None), errors
    assert error is None or re.search(error, errors[0])


def test_a_run_without_stages_says_what_it_always_said(tmp_path: Path) -> None:
    assert set(record(tmp_path, [FIRST])) == {"step", "seed", "batch", "data"}
