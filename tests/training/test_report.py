"""What the recorder announces on the console."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastack.observe.console import Console
from megastack.training.report import Recorder


@pytest.mark.parametrize("compiles", [False, True])
def test_a_compilation_is_announced_before_the_first_step(compiles: bool, capsys: pytest.CaptureFixture[str]) -> None:
    cache = Path("cache") if compiles else None
    Recorder(3, 1, lambda step: 1.0, None, Console(), compile_cache=cache).start(0)
    announced = "note      compiling the blocks; the first step takes longer\n"
    assert capsys.readouterr().out == (announced if compiles else "")
