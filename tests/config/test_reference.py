"""The reference page agrees with the schema."""

from __future__ import annotations

from pathlib import Path

from megastack.config.explain import reference
from megastack.config.fields import keys
from megastack.config.schema import TrainConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run scripts/make_config_reference.py"


def test_every_key_has_a_row() -> None:
    text = reference()
    assert [key.name for key in keys(TrainConfig) if not key.is_section and f"| `{key.name}` |" not in text] == []


def test_a_row_has_type_range_default_and_meaning() -> None:
    assert "| `model.dropout` | float, at least 0 and below 1 | `0.0` | Drop probability of" in reference()
    assert "| `run.steps` | int, at least 1 | `???` |" in reference()
