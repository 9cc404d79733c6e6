"""Arguments that several verbs share."""

from __future__ import annotations

import argparse

DTYPES = ("keep", "fp64", "fp32", "bf16", "fp16")
REFERENCES = ("auto", "transformers", "reference", "none")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides and the YAML file from which a configuration is composed."""
    parser.add_argument("overrides", nargs="*", default=[], help="group=option and key=value choices over the YAML")
    parser.add_argument("--config-dir", metavar="D", help="a folder with YAML of yours, searched first")
    parser.add_argument(
        "--config-name", metavar="N", default="train", help="the YAML file to start from (default: train)"
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``."""
    parser.add_argument("--json", metavar="FILE", help="also write the result to FILE")


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint whose weights a verb uses."""
    parser.add_argument("source", metavar="CHECKPOINT", help="a checkpoint, a run folder or an imported folder")


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``import`` and ``export`` share."""
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="convert the weights (default: keep)")
    parser.add_argument(
        "--proof",
        choices=REFERENCES,
        default="auto",
        help="whose logits to compare with (default: transformers if installed, else a plain reference)",
    )
    add_json_argument(parser)


def positive(text: str) -> int:
    """Parse a positive integer of the command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)
