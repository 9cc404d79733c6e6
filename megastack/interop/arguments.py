"""The arguments of ``megastack import`` and ``megastack export``; torch-free, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import re

DTYPES = ("keep", "fp64", "fp32", "bf16", "fp16")
AGAINST = ("auto", "transformers", "reference", "none")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``import``."""
    parser.add_argument("source", metavar="HF_FOLDER", help="a folder with config.json and safetensors")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument("--name", metavar="NAME", help="name of the model's YAML (default: from the folder's name)")
    parser.add_argument(
        "--sequence-length",
        metavar="S",
        type=_positive,
        help="the longest sequence it will be trained on (default: the longest the model allows)",
    )
    _add_shared(parser)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``export``, beside the configuration's."""
    parser.add_argument("source", metavar="CHECKPOINT", help="a checkpoint, a run folder or what import made")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument(
        "--architecture", metavar="NAME", help="llama, mistral, qwen2, qwen3, gpt2 (default: what fits)"
    )
    parser.add_argument(
        "--like", metavar="HF_FOLDER", help="where tokenizer files and token ids come from (default: the tokenizer's)"
    )
    parser.add_argument(
        "--shard-size", metavar="SIZE", type=_size, default="5GB", help="largest weight file (default: 5GB)"
    )
    _add_shared(parser)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="convert the weights (default: keep)")
    parser.add_argument(
        "--proof",
        choices=AGAINST,
        default="auto",
        help="whose logits to compare with (default: transformers if installed, else a plain reference)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result to FILE")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text}: must be a size such as 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]
