"""``megastack import`` and ``megastack export``: find what is meant, do it, print what was done and its proof."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megastack.errors import CheckpointError, ConfigError
from megastack.interop.proof import ProofError
from megastack.interop.saved_model import find_saved_model
from megastack.interop.transfer import HUB, WEIGHTS, Transfer, export_model, import_model
from megastack.observe.console import Console

DONE, DIFFERS = 0, 1


def import_command(options: argparse.Namespace) -> int:
    """The verb ``import``; returns the exit code.

    Raises:
        ConfigError: the folder is refused; nothing was kept.
    """
    return _transfer(options, _import)


def export_command(options: argparse.Namespace) -> int:
    """The verb ``export``; returns the exit code.

    Raises:
        ConfigError: the checkpoint or the model is refused; nothing was kept.
    """
    return _transfer(options, _export)


def _transfer(options: argparse.Namespace, run: Any) -> int:
    console = Console()
    try:
        done: Transfer = run(options, console)
    except ProofError as error:
        console.line(f"{error}\nnothing was kept", style="red")
        return DIFFERS
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    for note in done.notes:
        console.line(f"note      {note}")
    console.line(str(done.proof) if done.proof else "proof     none was wanted")
    if options.json:
        Path(options.json).write_text(json.dumps(_record(done), indent=1) + "\n", encoding="utf-8")
    return DONE


def _import(options: argparse.Namespace, console: Console) -> Transfer:
    done = import_model(
        options.source,
        options.out,
        name=options.name,
        dtype=options.dtype,
        sequence_length=options.sequence_length,
        proof=options.proof,
    )
    console.line(f"imported  {done.parameters:,} parameters into {done.folder}")
    if done.unread:
        console.line(f"note      keys of config.json that were not looked at: {', '.join(done.unread)}")
    tokenizer = done.folder / HUB / "tokenizer.json"
    more = f" data.tokenizer={tokenizer}" if tokenizer.is_file() else ""
    chosen = f"--config-dir {done.folder} model={done.name} checkpoint.load_weights={done.folder / WEIGHTS}"
    console.line(f"train     megastack train {chosen}{more}")
    return done


def _export(options: argparse.Namespace, console: Console) -> Transfer:
    saved = find_saved_model(options.source, config_dir=options.config_dir, config_name=options.config_name)
    partial_config = saved.compose_partial(options.overrides)
    if partial_config.errors:
        with partial_config.located_errors():
            raise ConfigError.of(partial_config.errors)
    done = export_model(
        saved.checkpoint,
        options.out,
        partial_config.config,
        architecture=options.architecture,
        like=options.like,
        dtype=options.dtype,
        shard_bytes=options.shard_size,
        proof=options.proof,
    )
    console.line(f"exported  {done.parameters:,} parameters as {done.name} into {done.folder}: {', '.join(done.files)}")
    return done


def _record(done: Transfer) -> dict[str, Any]:
    proof = None if done.proof is None else asdict(done.proof) | {"holds": done.proof.holds}
    return asdict(done) | {
        "folder": str(done.folder),
        "files": list(done.files),
        "notes": list(done.notes),
        "proof": proof,
    }
