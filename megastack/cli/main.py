"""The command line: ``megastack VERB [group=option] [key=value]… [flags]``.

Each verb is a module of this package with ``HELP``, ``add_arguments(parser)`` and ``run(options) -> int``;
:data:`VERBS` lists them. These modules import torch, Hydra and rich only in ``run``, so ``--help`` is instant. Exit
codes: 0 completed or equal, 1 failed or different, 2 unknown verb or flag, 75 preempted and resumable, 78 invalid
configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Protocol, cast

from megastack.errors import ConfigError, MeshError, ScheduleError
from megastack.launch.environment import let_threads_sleep, report_of
from megastack.observe.printable import printable
from megastack.observe.streams import best_effort_output, release_output

FAILED, INTERRUPTED, REJECTED = 1, 130, 78
PRINTING = ("show", "generate", "evaluate")
"""Verbs whose result is their output: they fail if standard output cannot be written, for example on a full disk."""
VERBS = {
    "train": "train",
    "verify": "verify",
    "show": "show",
    "checkpoint": "checkpoint",
    "tokenize": "tokenize",
    "import": "import_model",
    "export": "export_model",
    "generate": "generate",
    "evaluate": "evaluate",
}
"""The module of each verb, in the order of the help text."""


class Verb(Protocol):
    """A module of this package that implements a verb."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the verb."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the verb and return the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``_target_`` can name classes in the current folder."""
    let_threads_sleep()
    with best_effort_output():
        try:
            options = _parse(sys.argv[1:] if arguments is None else list(arguments))
            code = _run(options)
        finally:
            lost = release_output()
        if lost and code == 0 and options.verb in PRINTING:
            print(f"standard output: {lost}", file=sys.stderr)  # noqa: T201
            return FAILED
        return code


def _run(options: argparse.Namespace) -> int:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _verb(options.verb).run(options)
    except (ConfigError, MeshError, ScheduleError) as error:  # raised in this process, before any rank was started
        if (report := report_of(error)) is not None:  # every rank rejects the configuration, one prints the report
            print(printable(report), file=sys.stderr)  # noqa: T201
        return REJECTED
    except KeyboardInterrupt:
        return INTERRUPTED


def _verb(name: str) -> Verb:
    return cast(Verb, import_module(f"megastack.cli.{VERBS[name]}"))


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the verb and its options; overrides and flags may be mixed in any order."""
    if not arguments or arguments[0] not in VERBS:
        _main_parser().parse_args(arguments)
    name, verb = arguments[0], _verb(arguments[0])
    parser = argparse.ArgumentParser(prog=f"megastack {name}", description=verb.HELP, allow_abbrev=False)
    verb.add_arguments(parser)
    options = parser.parse_intermixed_args(arguments[1:])
    options.verb = name
    return options


def _main_parser() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {name:<10} {_verb(name).HELP}" for name in VERBS)
    parser = argparse.ArgumentParser(
        prog="megastack",
        usage="megastack VERB [group=option] [key=value]… [flags]",
        description="Train Transformers over DP × TP × PP from YAML.",
        epilog=f"verbs:\n{verbs}\n\nmegastack VERB --help lists the flags of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megastack {_version()}")
    parser.add_argument("verb", metavar="VERB", choices=VERBS, help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    try:
        return metadata.version("megastack")
    except metadata.PackageNotFoundError:  # a source checkout on sys.path
        return "(not installed)"
