"""Run the cells of the fault-injection matrix and write the table of ``docs/failures.md``.

``python scripts/make_fault_table.py dp3 tp4 SIGSTOP sleep`` runs only the cells of these layouts and kinds, and keeps
the other rows. All cells take about twenty minutes. The exit code is 1 if a cell does not end as expected.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.launch.fault_block import KINDS, PHASES  # noqa: E402
from tests.launch.fault_matrix import CELLS, RANKS, Cell, find_errors, outcome, run_cell  # noqa: E402

PAGE = ROOT / "docs" / "failures.md"
BEGIN, END = "<!-- begin of the fault matrix -->\n", "<!-- end of the fault matrix -->\n"


def main() -> int:
    """Run the cells of the given layouts and kinds, or all, and update the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="LAYOUT|FAULT", help="run only these; by default all")
    named = set(parser.parse_args().names)
    if unknown := named - {*RANKS, *KINDS}:
        parser.error(f"{', '.join(sorted(unknown))}: use {', '.join([*RANKS, *KINDS])}")
    torch.set_num_threads(1)
    layouts, kinds = named & {*RANKS} or {*RANKS}, named & {*KINDS} or {*KINDS}
    cells = [cell for cell in CELLS if cell.layout in layouts and cell.kind in kinds]
    endings: dict[Cell, str] = {}
    wrong = 0
    for number, cell in enumerate(cells, 1):
        endings[cell] = f"– ({cell.impossible})" if cell.impossible else ""
        if not cell.impossible:
            endings[cell], expected = run(cell)
            wrong += not expected
        sys.stderr.write(f"{number}/{len(cells)}  {cell}: {endings[cell]}\n")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {row_name(line): line for line in old.splitlines(keepends=True)}
    rows |= {row_name(line): line for line in table(endings).splitlines(keepends=True)}
    PAGE.write_text(before + BEGIN + "".join(sorted(rows.values(), key=order)) + END + after, encoding="utf-8")
    return 1 if wrong else 0


def row_name(line: str) -> tuple[str, ...]:
    """The first three columns, which identify the row."""
    return tuple(part.strip() for part in line.split("|")[1:4])


def order(line: str) -> tuple[int, int, str]:
    """The sort key of a row: the header first, then by layout and kind."""
    layout, kind, rank = row_name(line)
    if layout not in RANKS:
        return -1, layout == "---", ""
    return list(RANKS).index(layout), KINDS.index(kind), rank


def run(cell: Cell) -> tuple[str, bool]:
    """How a cell ended, as text, and whether that is as expected."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ending = run_cell(folder, cell)
        found = find_errors(folder, cell, ending)
    return (f"**wrong**: {'; '.join(found)}" if found else outcome(cell, ending)), not found


def table(endings: Mapping[Cell, str]) -> str:
    """The endings, one row for each fault on each rank."""
    rows = [["layout", "fault", "rank", *PHASES], ["---"] * (3 + len(PHASES))]
    for cell in endings:
        if cell.phase == PHASES[0]:
            phases = (endings[replace(cell, phase=phase)] for phase in PHASES)
            rows.append([cell.layout, cell.kind, str(cell.rank), *phases])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
