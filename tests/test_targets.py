"""Classes and functions named by dotted path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megastack.errors import ConfigError
from megastack.targets import import_path

SOURCE = "from fractions import Fraction\n\nclass _Hidden: ...\n\nclass Gain: ...\n\ndef scale(): ...\n"


@pytest.mark.parametrize(("name", "advice"), [("Gaim", "use Gain"), ("Fractoin", "use Gain or scale")])
def test_suggestions_are_what_the_module_defines(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_targets.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_targets", raising=False)
    with pytest.raises(ConfigError) as error:
        import_path("model.mlp._target_", f"own_targets.{name}")
    assert str(error.value).endswith(f"own_targets has no class or function {name}; {advice}")
