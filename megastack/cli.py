"""The command line: ``megastack VERB [group=option] [key=value]… [flags]``.

Verbs are looked up in a table and imported when they run, so ``--help`` is instant and imports no torch. Exit codes: 0
completed or equal, 1 failed or different, 2 a wrong verb or flag, 75 preempted and resumable, 78 a refused
configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megastack.checkpoint.command import add_checkpoint_arguments, checkpoint_command
from megastack.corpus.arguments import add_tokenize_arguments
from megastack.errors import ConfigError, MeshError, ScheduleError
from megastack.inference.arguments import add_evaluate_arguments, add_generate_arguments
from megastack.interop.arguments import add_export_arguments, add_import_arguments
from megastack.launch.environment import let_threads_sleep, report_of, require_no_launcher
from megastack.observe.printable import printable
from megastack.observe.streams import best_effort_output, release_output

if TYPE_CHECKING:
    from megastack.plan.command import Look

FAILED, INTERRUPTED, REFUSED = 1, 130, 78
PRINTING = ("show", "generate", "evaluate")
"""Verbs that exist for what they print: they fail where standard output cannot hold it, as on a full disk."""
VERBS = {
    "train": "train a model over the grid of ranks that the degrees describe",
    "verify": "prove that a layout, your own layers included, computes what one rank does, or name what differs",
    "show": "explain a configuration, or one KEY of it, without starting anything",
    "checkpoint": "list checkpoints, show one, or check every byte: ls, show or verify PATH",
    "tokenize": "make a token file from text, JSON lines or Parquet, with many processes",
    "import": "make a checkpoint and a model YAML from a Hugging Face folder",
    "export": "make a Hugging Face folder from a checkpoint of any layout",
    "generate": "continue prompts with the weights of a checkpoint, on any layout",
    "evaluate": "the perplexity of a text under the weights of a checkpoint, on any layout",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Classes of the current folder can be named in ``_target_``."""
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
    run: Callable[[argparse.Namespace], int] = {
        "train": _train,
        "verify": _verify,
        "show": _show,
        "checkpoint": _checkpoint,
        "tokenize": _tokenize,
        "import": _import,
        "export": _export,
        "generate": _generate,
        "evaluate": _evaluate,
    }[options.verb]
    try:
        return run(options)
    except (ConfigError, MeshError, ScheduleError) as error:  # raised here, before any rank was started
        if (report := report_of(error)) is not None:  # every rank of a world refuses, one says why
            print(printable(report), file=sys.stderr)  # noqa: T201
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The verb and its options; overrides and flags may be mixed in any order."""
    if not arguments or arguments[0] not in VERBS:
        _verbs_parser().parse_args(arguments)
    options = _parser(arguments[0]).parse_intermixed_args(arguments[1:])
    options.verb = arguments[0]
    if options.verb == "verify" and options.ranks and not options.all:
        _parser("verify").error("--ranks goes with --all; without it the degrees say how many ranks there are")
    return options


def _count(text: str) -> int:
    """A positive whole number of the command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def _verbs_parser() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {verb:<10} {meaning}" for verb, meaning in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="megastack",
        usage="megastack VERB [group=option] [key=value]… [flags]",
        description="Train Transformers over DP × TP × PP from YAML.",
        epilog=f"verbs:\n{verbs}\n\nmegastack VERB --help tells the flags of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", metavar="VERB", choices=VERBS, help=argparse.SUPPRESS)
    return parser


def _parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"megastack {verb}", description=VERBS[verb], allow_abbrev=False)
    if verb == "checkpoint":
        add_checkpoint_arguments(parser)
        return parser
    if verb == "tokenize":
        add_tokenize_arguments(parser)
        return parser
    if verb == "import":
        add_import_arguments(parser)
        return parser
    if verb == "export":
        add_export_arguments(parser)
    if verb == "generate":
        add_generate_arguments(parser)
    if verb == "evaluate":
        add_evaluate_arguments(parser)
    parser.add_argument("overrides", nargs="*", help="group=option and key=value choices over the YAML")
    parser.add_argument("--config-dir", metavar="D", help="a folder with YAML of yours, searched first")
    parser.add_argument(
        "--config-name", metavar="N", default="train", help="the YAML file to start from (default: train)"
    )
    if verb == "train":
        parser.add_argument("-m", "--multirun", action="store_true", help="run the product of a=1,2 b=3,4")
    if verb == "verify":
        parser.add_argument("--all", action="store_true", help="every legal layout of N ranks, as a table")
        parser.add_argument("--ranks", metavar="N", type=_count, help="N of --all (default: the configuration's world)")
        parser.add_argument("--steps", metavar="K", type=_count, default=3, help="optimizer steps (default: 3)")
    if verb == "show":
        parser.add_argument("--format", choices=("text", "svg", "chrome"), default="text")
    if verb != "export":
        parser.add_argument("--json", metavar="FILE", help="also write the result to FILE")
    return parser


def _train(options: argparse.Namespace) -> int:
    from megastack.launch.command import train_command

    return train_command(options)


def _verify(options: argparse.Namespace) -> int:
    from megastack.testing.verify_command import verify_command

    require_no_launcher("verify")
    return verify_command(options)


def _show(options: argparse.Namespace) -> int:
    from megastack.plan.command import show_command

    return show_command(options, _look)


def _look() -> Look:
    from megastack.launch.look import look  # needs torch, which the explanation of a key does without

    return look


def _checkpoint(options: argparse.Namespace) -> int:
    return checkpoint_command(options)


def _tokenize(options: argparse.Namespace) -> int:
    from megastack.corpus.command import tokenize_command

    return tokenize_command(options)


def _import(options: argparse.Namespace) -> int:
    from megastack.interop.command import import_command

    return import_command(options)


def _export(options: argparse.Namespace) -> int:
    from megastack.interop.command import export_command

    return export_command(options)


def _generate(options: argparse.Namespace) -> int:
    from megastack.launch.generate import generate_command

    return generate_command(options)


def _evaluate(options: argparse.Namespace) -> int:
    from megastack.launch.evaluate import evaluate_command

    return evaluate_command(options)


if __name__ == "__main__":
    sys.exit(main())
