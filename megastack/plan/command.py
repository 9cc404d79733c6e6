"""``megastack show``: a configuration on its grid, or one key explained; starts nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megastack.config.compose import compose_partial
from megastack.config.explain import explain
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.errors import ErrorLine
from megastack.observe.printable import printable
from megastack.pipeline.render import render
from megastack.plan.describe import as_record, full
from megastack.plan.layout import Layout

Look = Callable[[TrainConfig, Sequence[ErrorLine]], Sequence[str]]
"""Asks model and data of a configuration with known faults: gives notes, or raises everything that is wrong."""


def show_command(options: argparse.Namespace, load_look: Callable[[], Look]) -> int:
    """The verb ``show``; an argument without ``=`` is a key to explain.

    Args:
        options: of the command line.
        load_look: gives what asks model and data; called where there is a configuration to ask about.

    Raises:
        ConfigError: every fault of the configuration, its model and its data.
    """
    asked = [text for text in options.overrides if "=" not in text]
    overrides = [text for text in options.overrides if "=" in text]
    place = {"config_dir": options.config_dir, "config_name": options.config_name}
    if asked:
        sys.stdout.write(printable("\n\n".join(str(explain(key, overrides, **place)) for key in asked)) + "\n")
        return 0
    given = compose_partial(overrides, **place)
    config = given.config
    with given.located_errors():
        notes = load_look()(config, [*given.errors, *violations(config)])
    for note in "\n".join(notes).splitlines():
        sys.stderr.write(printable(f"note: {note}") + "\n")
    text = printable(full(config)) if options.format == "text" else render(Layout(config).timeline, options.format)
    sys.stdout.write(text + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(as_record(config), indent=1) + "\n", encoding="utf-8")
    return 0
