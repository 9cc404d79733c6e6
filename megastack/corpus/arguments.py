"""The arguments of ``megastack tokenize``; imports nothing heavy, so that ``--help`` is instant."""

from __future__ import annotations

import argparse


def add_tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``tokenize``."""
    parser.add_argument("paths", metavar="PATH", nargs="+", help=".jsonl, .txt and .parquet files, folders or patterns")
    parser.add_argument("--out", metavar="PREFIX", required=True, help="writes PREFIX.bin, PREFIX.idx and PREFIX.json")
    parser.add_argument("--tokenizer", metavar="T", default="byte", help="byte (default), or a tokenizer.json")
    parser.add_argument("--field", metavar="NAME", default="text", help="field or column of the text (default: text)")
    parser.add_argument("--workers", metavar="N", type=_count, help="processes (default: the CPUs of this process)")
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
    parser.add_argument("--json", metavar="FILE", help="also write the result to FILE")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)
