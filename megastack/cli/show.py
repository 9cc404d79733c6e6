"""``megastack show``: display a configuration on its mesh, or explain one key, without starting ranks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megastack.cli.options import add_config_arguments, add_json_argument
from megastack.observe.printable import printable

HELP = "explain a configuration, or one KEY of it, without starting anything"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``show``."""
    add_config_arguments(parser)
    parser.add_argument("--format", choices=("text", "svg", "chrome"), default="text")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run ``show`` and return the exit code; an argument without ``=`` is a key to explain.

    Raises:
        ConfigError: every error of the configuration, its model and its data.
    """
    keys = [text for text in options.overrides if "=" not in text]
    overrides = [text for text in options.overrides if "=" in text]
    return _explain(keys, overrides, options) if keys else _show(overrides, options)


def _explain(keys: list[str], overrides: list[str], options: argparse.Namespace) -> int:
    from megastack.config.explain import explain

    place = {"config_dir": options.config_dir, "config_name": options.config_name}
    sys.stdout.write(printable("\n\n".join(str(explain(key, overrides, **place)) for key in keys)) + "\n")
    return 0


def _show(overrides: list[str], options: argparse.Namespace) -> int:
    from megastack.config.compose import compose_partial
    from megastack.config.rules import violations
    from megastack.pipeline.render import render
    from megastack.plan.describe import as_record, full
    from megastack.plan.layout import Layout
    from megastack.preflight.inspect import preview, with_device

    given = compose_partial(overrides, config_dir=options.config_dir, config_name=options.config_name)
    config = given.config
    with given.located_errors():
        notes = preview(config, [*given.errors, *violations(config)])
    for note in "\n".join(notes).splitlines():
        sys.stderr.write(printable(f"note: {note}") + "\n")
    config = with_device(config)
    text = printable(full(config)) if options.format == "text" else render(Layout(config).timeline, options.format)
    sys.stdout.write(text + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(as_record(config), indent=1) + "\n", encoding="utf-8")
    return 0
