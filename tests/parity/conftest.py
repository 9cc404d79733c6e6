"""A small text of many documents, and reference traces that are computed once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a JSON-lines file, the same words in each session."""
    draw = random.Random(7)
    words = ["rank", "stage", "tensor", "the", "of", "pipeline", "sum", "a", "gradient", "layout", "and", "is"]
    documents = [" ".join(draw.choice(words) for _ in range(draw.randint(4, 40))) for _ in range(120)]
    path: Path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return str(path)
