"""``megastack export``: create a Hugging Face folder from a checkpoint."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from megastack.cli.options import add_checkpoint_argument, add_config_arguments, add_transfer_arguments
from megastack.errors import ConfigError

if TYPE_CHECKING:
    from megastack.interop.transfer import Transfer
    from megastack.observe.console import Console

HELP = "make a Hugging Face folder from a checkpoint of any layout"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    add_checkpoint_argument(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument(
        "--architecture", metavar="NAME", help="llama, mistral, qwen2, qwen3, gpt2 (default: what fits)"
    )
    parser.add_argument(
        "--like", metavar="HF_FOLDER", help="where tokenizer files and token ids come from (default: the tokenizer's)"
    )
    parser.add_argument(
        "--shard-size", metavar="SIZE", type=_size, default="5GB", help="largest weight file (default: 5GB)"
    )
    add_transfer_arguments(parser)
    add_config_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run ``export`` and return the exit code.

    Raises:
        ConfigError: the checkpoint or the model cannot be exported; nothing was kept.
    """
    from megastack.cli.transfer import run_transfer

    return run_transfer(options, _export)


def _export(options: argparse.Namespace, console: Console) -> Transfer:
    from megastack.cli.unused import unused_note
    from megastack.interop.saved_model import find_saved_model
    from megastack.interop.transfer import export_model

    saved = find_saved_model(options.source, config_dir=options.config_dir, config_name=options.config_name)
    given = saved.compose_partial(options.overrides)
    if given.errors:
        with given.located_errors():
            raise ConfigError.of(given.errors)
    done = export_model(
        saved.checkpoint,
        options.out,
        given.config,
        architecture=options.architecture,
        like=options.like,
        dtype=options.dtype,
        shard_bytes=options.shard_size,
        proof=options.proof,
    )
    if note := unused_note("export", options.overrides):
        console.line(f"note      {note}")
    console.line(f"exported  {done.parameters:,} parameters as {done.name} into {done.folder}: {', '.join(done.files)}")
    return done


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text}: must be a size such as 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]
