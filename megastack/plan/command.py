"""``megastack show``: a configuration on its grid, or one key explained; starts nothing and imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megastack.config.compose import compose, origins
from megastack.config.explain import explain
from megastack.config.rules import require_legal
from megastack.pipeline.render import render
from megastack.plan.describe import as_record, full
from megastack.plan.layout import Layout


def show_command(options: argparse.Namespace) -> int:
    """The verb ``show``; an argument without ``=`` is a key to explain."""
    asked = [text for text in options.overrides if "=" not in text]
    overrides = [text for text in options.overrides if "=" in text]
    place = {"config_dir": options.config_dir, "config_name": options.config_name}
    if asked:
        sys.stdout.write("\n\n".join(str(explain(key, overrides, **place)) for key in asked) + "\n")
        return 0
    config = compose(overrides, **place)
    with origins(overrides, **place):
        require_legal(config)
    text = full(config) if options.format == "text" else render(Layout(config).timeline, options.format)
    sys.stdout.write(text + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(as_record(config), indent=1) + "\n", encoding="utf-8")
    return 0
