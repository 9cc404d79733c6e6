"""Code shared by ``import`` and ``export``: run the transfer, print its notes and its logit comparison."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megastack.errors import CheckpointError, ConfigError
from megastack.interop.proof import ProofError
from megastack.interop.transfer import Transfer
from megastack.observe.console import Console

DONE, DIFFERS = 0, 1


def run_transfer(options: argparse.Namespace, function: Callable[[argparse.Namespace, Console], Transfer]) -> int:
    """Run and report an import or an export, and return the exit code.

    Raises:
        ConfigError: the source cannot be used; nothing was kept.
    """
    console = Console()
    try:
        done = function(options, console)
    except ProofError as error:
        console.line(f"{error}\nnothing was kept", style="red")
        return DIFFERS
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    for note in done.notes:
        console.line(f"note      {note}")
    console.line(str(done.proof) if done.proof else "proof     none")
    if options.json:
        Path(options.json).write_text(json.dumps(_as_record(done), indent=1) + "\n", encoding="utf-8")
    return DONE


def _as_record(done: Transfer) -> dict[str, Any]:
    proof = None if done.proof is None else asdict(done.proof) | {"holds": done.proof.holds}
    return asdict(done) | {
        "folder": str(done.folder),
        "files": list(done.files),
        "notes": list(done.notes),
        "proof": proof,
    }
