"""Run every cell of the fault matrix, one after another, and write the table of ``docs/failures.md``.

Takes about five minutes; ends with 1 if a cell does not end as it should.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.launch.fault_block import KINDS, PHASES  # noqa: E402
from tests.launch.fault_matrix import CELLS, STAGES, Cell, faults, outcome, run_cell  # noqa: E402

PAGE = ROOT / "docs" / "failures.md"
BEGIN, END = "<!-- begin of the fault matrix -->\n", "<!-- end of the fault matrix -->\n"


def main() -> int:
    """Run all cells and put the table into the page."""
    torch.set_num_threads(1)
    endings: dict[Cell, str] = {}
    wrong = 0
    for number, cell in enumerate(CELLS, 1):
        endings[cell] = f"– ({cell.impossible})" if cell.impossible else ""
        if not cell.impossible:
            endings[cell], fine = run(cell)
            wrong += not fine
        sys.stderr.write(f"{number}/{len(CELLS)}  {cell}: {endings[cell]}\n")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(endings) + END + rest.partition(END)[2], encoding="utf-8")
    return 1 if wrong else 0


def run(cell: Cell) -> tuple[str, bool]:
    """How a cell ended, in words, and whether that is right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ending = run_cell(folder, cell)
        found = faults(folder, cell, ending)
    return (f"**wrong**: {'; '.join(found)}" if found else outcome(cell, ending)), not found


def table(endings: Mapping[Cell, str]) -> str:
    """The endings, a row for each fault on each stage."""
    rows = [["fault", "stage", *PHASES], ["---"] * (2 + len(PHASES))]
    for kind in KINDS:
        for stage, name in enumerate(STAGES):
            rows.append([kind, name, *(endings[Cell(kind, stage, phase)] for phase in PHASES)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
