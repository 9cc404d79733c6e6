"""The command line: ``megastack VERB [group=option] [key=value]… [flags]``.

Verbs are looked up in a table and imported when they run, so ``--help`` is instant and imports no torch. Exit codes: 0
completed or equal, 1 failed, 2 a wrong verb or flag, 75 preempted and resumable, 78 a refused configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from megastack.errors import ConfigError

REFUSED = 78
VERBS = {
    "train": "train a model over the grid of ranks that the degrees describe",
    "show": "explain a configuration, or one KEY of it, without starting anything",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Classes of the current folder can be named in ``_target_``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options = _parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    run: Callable[[argparse.Namespace], int] = {"train": _train, "show": _show}[options.verb]
    try:
        return run(options)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megastack", description="Train Transformers over DP × TP × PP from YAML.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, meaning in VERBS.items():
        command = verbs.add_parser(verb, help=meaning, description=meaning)
        command.add_argument("overrides", nargs="*", help="group=option and key=value choices over the YAML")
        command.add_argument("--config-dir", help="a folder with YAML of yours, searched before the packaged one")
        command.add_argument("--config-name", default="train", help="the YAML file to start from (default: train)")
        if verb == "train":
            command.add_argument("-m", "--multirun", action="store_true", help="run the product of a=1,2 b=3,4")
        if verb == "show":
            command.add_argument("--format", choices=("text", "svg", "chrome"), default="text")
        command.add_argument("--json", metavar="FILE", help="also write the result to FILE")
    return parser


def _train(options: argparse.Namespace) -> int:
    if options.multirun:
        from megastack.launch.sweep import sweep_command

        return sweep_command(options)
    from megastack.launch.command import train_command

    return train_command(options)


def _show(options: argparse.Namespace) -> int:
    from megastack.plan.command import show_command

    return show_command(options)


if __name__ == "__main__":
    sys.exit(main())
