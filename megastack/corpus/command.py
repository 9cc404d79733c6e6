"""``megastack tokenize``: does it with a progress bar, and says what was made and how fast."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megastack.corpus.tokenize import TokenizeResult, make_token_file
from megastack.errors import ConfigError, DataError, counted
from megastack.observe.console import Console


def tokenize_command(options: argparse.Namespace) -> int:
    """The verb ``tokenize``; returns the exit code.

    Raises:
        ConfigError: an input or the output is refused.
    """
    began = time.perf_counter()
    try:
        made = _with_bar(options)
    except DataError as error:
        raise ConfigError(str(error)) from None
    _report(made, time.perf_counter() - began)
    if options.json:
        Path(options.json).write_text(json.dumps(asdict(made), indent=1) + "\n", encoding="utf-8")
    return 0


def _with_bar(options: argparse.Namespace) -> TokenizeResult:
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
