"""A sample of the fault matrix, and all of it; what there is to a cell stands in ``fault_matrix``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.fault_block import INSIDE_STEP
from tests.launch.fault_matrix import CELLS, LAYOUTS, Cell, find_errors, run_cell

SAMPLE = (
    Cell("raise", "pp3", 1, "before step 1"),
    Cell("SIGKILL", "pp3", 2, "before step 1"),
    Cell("SIGKILL", "pp3", 0, "validation"),
    Cell("SIGSTOP", "pp3", 2, "step"),
    Cell("SIGTERM", "pp3", 1, "save"),
    Cell("NaN", "pp3", 1, "step"),
    Cell("disk full", "pp3", 0, "step"),
    Cell("sleep", "dp3", 2, "step"),
    Cell("sleep", "tp4", 1, "step"),
)


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_fault_ends_as_it_should(tmp_path: Path, cell: Cell) -> None:
    assert find_errors(tmp_path, cell, run_cell(tmp_path, cell)) == []


@pytest.mark.full
@pytest.mark.parametrize("cell", [c for c in CELLS if c not in SAMPLE and not c.impossible], ids=str)
def test_every_fault_ends_as_it_should(tmp_path: Path, cell: Cell) -> None:
    assert find_errors(tmp_path, cell, run_cell(tmp_path, cell)) == []


@pytest.mark.full
@pytest.mark.parametrize("phase", INSIDE_STEP)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_sleeps_is_named_on_every_layout(tmp_path: Path, layout: str, phase: str) -> None:
    cell = Cell("sleep", layout, 1, phase)
    assert find_errors(tmp_path, cell, run_cell(tmp_path, cell)) == []
