"""``status.json``: the state of a run or how it ended, available even if a launcher does not return the exit code."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from megastack.observe.files import replace_text
from megastack.records import MAX_INTEGER, RecordError, integer, read_record, string

FIELDS = ("status", "step", "checkpoint", "reason", "rank", "coordinates", "exit_code", "pid", "start", "time")
EXIT_CODES = {"completed": 0, "preempted": 75, "failed": 1, "diverged": 1}


def write_status(path: Path, status: str, **fields: object) -> dict[str, Any]:
    """Replace the file atomically and return the record; omitted fields are null."""
    unknown = set(fields) - set(FIELDS)
    assert not unknown, unknown
    record = dict.fromkeys(FIELDS) | {"pid": os.getpid(), "exit_code": EXIT_CODES.get(status)} | fields
    record |= {"status": status, "time": time.time()}
    replace_text(path, json.dumps(record, indent=1) + "\n")
    return record


def update_status(path: Path, status: str, **fields: object) -> dict[str, Any]:
    """Like :func:`write_status`, but an omitted step, checkpoint, pid or start keeps its value."""
    previous = read_status(path) or {}
    kept = {name: previous.get(name) for name in ("step", "checkpoint", "pid", "start")}
    return write_status(path, status, **kept | fields)


def read_status(path: Path) -> dict[str, Any] | None:
    """Read the record with all fields; ``None`` if it is missing or invalid."""
    try:
        record = dict.fromkeys(FIELDS) | read_record(path)
        string(record, "status")
        for name in ("step", "pid", "rank", "exit_code"):
            record[name] is None or integer(record, name, least=-MAX_INTEGER)
        for name in ("checkpoint", "reason", "coordinates", "start"):
            record[name] is None or string(record, name)
    except (OSError, RecordError):
        return None
    return record
