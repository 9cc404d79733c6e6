"""Foreign text on a terminal: generated text, prompts, documents, and names of files and keys in errors.

Such text may hold control characters, with which it could colour, clear or forge what a terminal shows. Everything that
goes to a terminal passes through :func:`printable`; records keep the text as it is.
"""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for newline and tab, line separators, changes of direction, halves of surrogate pairs."""


def printable(text: str) -> str:
    r"""`text` with its control characters written out, such as ``\x1b``; newlines and tabs stay as they are."""
    return _HIDDEN.sub(_written_out, text.replace("\r\n", "\n"))


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
