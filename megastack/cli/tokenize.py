"""``megastack tokenize``: create a token file, with a progress bar, and report its size and the speed."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megastack.cli.options import add_json_argument, positive
from megastack.errors import ConfigError, DataError, counted

if TYPE_CHECKING:
    from megastack.corpus.tokenize import TokenizeResult

HELP = "make a token file from text, JSON lines or Parquet, with many processes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tokenize``."""
    parser.add_argument("paths", metavar="PATH", nargs="+", help=".jsonl, .txt and .parquet files, folders or patterns")
    parser.add_argument("--out", metavar="PREFIX", required=True, help="writes PREFIX.bin, PREFIX.idx and PREFIX.json")
    parser.add_argument("--tokenizer", metavar="T", default="byte", help="byte (default), or a tokenizer.json")
    parser.add_argument("--field", metavar="NAME", default="text", help="field or column of the text (default: text)")
    parser.add_argument("--workers", metavar="N", type=positive, help="processes (default: the CPUs of this process)")
    parser.add_argument(
        "--on-bad-line",
        choices=("refuse", "skip"),
        default="refuse",
        help="a line that is not UTF-8 or not JSON, a row without text, an empty file: stop, or skip and count it",
    )
    parser.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="text that spells a special token of the tokenizer becomes its id (default: it stays text)",
    )
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run ``tokenize`` and return the exit code.

    Raises:
        ConfigError: an input or the output cannot be used.
    """
    began = time.perf_counter()
    try:
        made = _with_progress_bar(options)
    except DataError as error:
        raise ConfigError(str(error)) from None
    _report(made, time.perf_counter() - began)
    if options.json:
        Path(options.json).write_text(json.dumps(asdict(made), indent=1) + "\n", encoding="utf-8")
    return 0


def _with_progress_bar(options: argparse.Namespace) -> TokenizeResult:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from megastack.corpus.tokenize import make_token_file

    columns = (TextColumn("tokenize"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    screen = RichConsole(stderr=True)
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as progress:
        task = progress.add_task("tokenize", total=None)
        return make_token_file(
            options.paths,
            options.out,
            tokenizer=options.tokenizer,
            field=options.field,
            skip_bad=options.on_bad_line == "skip",
            allow_special_tokens=options.allow_special_tokens,
            workers=options.workers,
            advance=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _report(made: TokenizeResult, seconds: float) -> None:
    from megastack.observe.console import Console

    console, counts = Console(), made.counts
    console.line(f"wrote     {made.prefix}.bin and {made.prefix}.idx: ids of {made.vocab:,} as {made.dtype}")
    console.line(
        f"holds     {counted(counts.documents, 'document')}, {counted(counts.tokens, 'token')}, "
        f"largest id {counts.largest_id:,}"
    )
    rates = f"{counts.tokens / seconds:,.0f} tokens/s, {counts.text_bytes / seconds / 1e6:,.1f} MB/s of text"
    note = f"; {made.resumed} of {counted(made.parts, 'part')} already there" if made.resumed else ""
    console.line(f"took      {seconds:.1f} s: {rates}{note}")
    if counts.skipped:
        console.line(f"skipped   {counted(counts.skipped, 'bad line')}, the first: {counts.first_bad}", style="yellow")
    if made.empty:
        console.line(f"skipped   {counted(made.empty, 'empty file')}, the first: {made.first_empty}", style="yellow")
