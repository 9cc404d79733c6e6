"""Generate docs/configuration.md from the configuration's dataclasses; --check only checks that it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from megastack.config.explain import reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def main() -> int:
    """Return 0, or 1 if --check finds a page that is out of date."""
    text = reference()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
