"""A sample of the fault matrix, and all of it; what there is to a cell stands in ``fault_matrix``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.fault_matrix import CELLS, Cell, faults, run_cell

SAMPLE = (
    Cell("raise", 1, "before step 1"),
    Cell("SIGKILL", 2, "before step 1"),
    Cell("SIGKILL", 0, "validation"),
    Cell("SIGSTOP", 2, "step"),
    Cell("SIGTERM", 1, "save"),
    Cell("NaN", 1, "step"),
    Cell("disk full", 0, "step"),
)


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_fault_ends_as_it_should(tmp_path: Path, cell: Cell) -> None:
    assert faults(tmp_path, cell, run_cell(tmp_path, cell)) == []


@pytest.mark.full
@pytest.mark.parametrize("cell", [c for c in CELLS if c not in SAMPLE and not c.impossible], ids=str)
def test_every_fault_ends_as_it_should(tmp_path: Path, cell: Cell) -> None:
    assert faults(tmp_path, cell, run_cell(tmp_path, cell)) == []
