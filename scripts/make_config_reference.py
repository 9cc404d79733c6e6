"""Write docs/configuration.md from the configuration's dataclasses, or with --check say whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from megastack.config.reference import reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def main() -> int:
    """0, or 1 when --check finds another page than would be written."""
    text = reference()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
