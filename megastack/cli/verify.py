"""``megastack verify``: compare a parallel layout with one rank."""

from __future__ import annotations

import argparse

from megastack.cli.options import add_config_arguments, add_json_argument, positive
from megastack.launch.environment import require_no_launcher

HELP = "prove that a layout, your own layers included, computes what one rank does, or name what differs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    add_config_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every legal layout of N ranks, as a table")
    parser.add_argument("--ranks", metavar="N", type=positive, help="N of --all (default: the configuration's world)")
    parser.add_argument("--steps", metavar="K", type=positive, default=3, help="optimizer steps (default: 3)")
    add_json_argument(parser)
    parser.set_defaults(usage_error=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run ``verify`` and return the exit code.

    Raises:
        ConfigError: configuration, data or layers are invalid; nothing was compared.
    """
    from megastack.cli.verification import verify

    if options.ranks and not options.all:
        options.usage_error("--ranks needs --all; without it, the degrees determine the number of ranks")
    require_no_launcher("verify")
    return verify(options)
