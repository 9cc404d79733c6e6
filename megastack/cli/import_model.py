"""``megastack import``: create a checkpoint and a model YAML from a Hugging Face folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megastack.cli.options import add_transfer_arguments, positive

if TYPE_CHECKING:
    from megastack.interop.transfer import Transfer
    from megastack.observe.console import Console

HELP = "make a checkpoint and a model YAML from a Hugging Face folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``import``."""
    parser.add_argument("source", metavar="HF_FOLDER", help="a folder with config.json and safetensors")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument("--name", metavar="NAME", help="name of the model's YAML (default: from the folder's name)")
    parser.add_argument(
        "--sequence-length",
        metavar="S",
        type=positive,
        help="the longest sequence it will be trained on (default: the longest the model allows)",
    )
    add_transfer_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run ``import`` and return the exit code.

    Raises:
        ConfigError: the folder cannot be imported; nothing was kept.
    """
    from megastack.cli.transfer import run_transfer

    return run_transfer(options, _import)


def _import(options: argparse.Namespace, console: Console) -> Transfer:
    from megastack.interop.transfer import HUB, WEIGHTS, import_model

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
        console.line(f"note      keys of config.json that were not read: {', '.join(done.unread)}")
    tokenizer = done.folder / HUB / "tokenizer.json"
    more = f" data.tokenizer={tokenizer}" if tokenizer.is_file() else ""
    chosen = f"--config-dir {done.folder} model={done.name} checkpoint.load_weights={done.folder / WEIGHTS}"
    console.line(f"train     megastack train {chosen}{more}")
    return done
