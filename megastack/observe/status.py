"""``status.json``: how a run stands or ended, whatever exit code its launcher could pass on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FIELDS = ("status", "step", "checkpoint", "reason", "rank", "coordinates", "exit_code", "pid", "time")
EXIT_CODES = {"completed": 0, "preempted": 75, "failed": 1, "diverged": 1}


def write_status(path: Path, status: str, **fields: Any) -> None:
    """Replace the file at once; fields that are not given are null."""
    unknown = set(fields) - set(FIELDS)
    assert not unknown, unknown
    record = dict.fromkeys(FIELDS) | {"pid": os.getpid(), "time": time.time(), "exit_code": EXIT_CODES.get(status)}
    record |= {"status": status} | fields
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)


def read_status(path: Path) -> dict[str, Any] | None:
    """The record, or ``None`` where there is none to be read."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record
