"""Generate docs/configuration.md from the configuration's dataclasses; --check only checks that it is current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megastack.config.explain import reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def main() -> int:
    """Return 0, or 1 if --check finds a page that is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check = parser.parse_args().check
    text = reference()
    if check:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
