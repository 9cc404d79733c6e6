"""``megastack generate``: continue prompts with the weights of a checkpoint."""

from __future__ import annotations

import argparse

from megastack.cli.options import add_checkpoint_argument, add_config_arguments, add_json_argument

HELP = "continue prompts with the weights of a checkpoint, on any layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``generate``."""
    add_checkpoint_argument(parser)
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="a text to continue; repeatable")
    parser.add_argument("--prompts", metavar="FILE", help="a file of prompts: one a line, or the texts of a .jsonl")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=64, help="tokens to add to each prompt (default: 64)"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="0 takes the most probable token (default: 0)"
    )
    parser.add_argument("--top-k", metavar="K", type=int, help="choose among the K most probable tokens")
    parser.add_argument("--top-p", metavar="P", type=float, help="choose among the most probable that make up P")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="another one gives another text (default: 0)")
    parser.add_argument("--no-cache", action="store_true", help="run whole texts for every token")
    add_config_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run ``generate`` and return the exit code.

    Raises:
        ConfigError: checkpoint, configuration or prompts are invalid; nothing was computed.
    """
    from megastack.cli.generation import generate
    from megastack.cli.weights import run_with_weights

    return run_with_weights(options, generate)
