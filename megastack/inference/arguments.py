"""The arguments of ``megastack generate`` and ``megastack evaluate``; torch-free, so that ``--help`` is instant."""

from __future__ import annotations

import argparse


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``generate``, beside the configuration's."""
    _add_source(parser)
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


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``evaluate``, beside the configuration's."""
    _add_source(parser)
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="a text, .jsonl, .bin/.idx or .npy file (default: the validation split of its run)",
    )


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CHECKPOINT", help="a checkpoint, a run folder or what import made")
