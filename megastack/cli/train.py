"""``megastack train``: compose a configuration and train it, or train every job of a sweep."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megastack.cli.options import add_config_arguments, add_json_argument
from megastack.errors import ConfigError
from megastack.launch.environment import is_worker

HELP = "train a model over the grid of ranks that the degrees describe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``train``."""
    add_config_arguments(parser)
    parser.add_argument("-m", "--multirun", action="store_true", help="run the product of a=1,2 b=3,4")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run ``train`` and return the exit code."""
    from megastack.cli.sweep import run_sweep
    from megastack.config.compose import compose_partial
    from megastack.launch.rendezvous import reject_early
    from megastack.launch.run import train_partial

    if options.multirun:
        return run_sweep(options)
    try:
        given = compose_partial(options.overrides, config_dir=options.config_dir, config_name=options.config_name)
    except ConfigError as error:
        if not is_worker():
            raise
        reject_early(error.errors)
    with given.located_errors():
        result = train_partial(given.config, options.overrides, unread=given.errors)
    if options.json:
        record = {
            "status": result.status,
            "step": result.step,
            "loss": result.loss,
            "folder": str(result.folder),
            "reason": result.reason,
            "exit_code": result.exit_code,
        }
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return result.exit_code
