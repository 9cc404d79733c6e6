"""``megastack evaluate``: the perplexity of a file, or of the validation split of the checkpoint's run."""

from __future__ import annotations

import argparse

from megastack.cli.options import add_checkpoint_argument, add_config_arguments, add_json_argument

HELP = "the perplexity of a text under the weights of a checkpoint, on any layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``evaluate``."""
    add_checkpoint_argument(parser)
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="a text, .jsonl, .bin/.idx or .npy file (default: the validation split of its run)",
    )
    add_config_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run ``evaluate`` and return the exit code.

    Raises:
        ConfigError: checkpoint, configuration or data are invalid; nothing was computed.
    """
    from megastack.cli.evaluation import evaluate_checkpoint
    from megastack.cli.weights import run_with_weights

    return run_with_weights(options, evaluate_checkpoint)
