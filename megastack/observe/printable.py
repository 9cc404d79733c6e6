"""Escape control characters in text for a terminal: generated text, prompts, documents, file names and keys.

Control characters in such text could clear the terminal or forge its output. Everything written to a terminal passes
through :func:`printable`; records keep the text unchanged.
"""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except newline and tab, line separators, bidirectional marks and lone surrogates."""


def printable(text: str) -> str:
    r"""Escape control characters in `text`, as in ``\x1b``; newlines and tabs are kept."""
    return _HIDDEN.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
