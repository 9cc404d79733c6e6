"""Every file that the walk through the code names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_file_of_the_walk_exists() -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("megastack", "scripts", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    named = set(re.findall(r"`(?:python )?([a-z_/]+\.py)`", (ROOT / "docs" / "walk.md").read_text()))
    assert len(named) > 50
    assert not {name for name in named if not any(file == name or file.endswith(f"/{name}") for file in files)}
