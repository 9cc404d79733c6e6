"""What a rank logs about the kernels of its device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megastack.config.choices import ComputeDtype
from megastack.launch.worker import _log_kernels
from megastack.layers.attention_kernels import Kernel, KernelChoice
from tests.tiny_runs import train

FLASH, MATH = KernelChoice(Kernel.FLASH), KernelChoice(Kernel.MATH, because="fp32")


@dataclass
class FakeTraining:
    """The parts of a training that the log reads."""

    attention_kernel: KernelChoice
    device: str
    compute: ComputeDtype
    rank: int = 0
    mesh: Any = field(init=False)
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        self.mesh = SimpleNamespace(device=torch.device(self.device), rank=self.rank)
        self.config = SimpleNamespace(precision=SimpleNamespace(compute=self.compute))


@pytest.mark.parametrize(
    ("training", "warnings"),
    [
        (FakeTraining(FLASH, "cuda", ComputeDtype.bf16), 0),
        (FakeTraining(MATH, "cuda", ComputeDtype.bf16), 1),
        (FakeTraining(MATH, "cuda", ComputeDtype.fp32), 2),
        (FakeTraining(MATH, "cuda", ComputeDtype.fp32, rank=1), 0),
        (FakeTraining(MATH, "cpu", ComputeDtype.fp32), 0),
    ],
)
def test_slow_kernels_on_a_gpu_are_remarked_on_once(
    training: FakeTraining, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kernels"):
        _log_kernels(logging.getLogger("kernels"), training)  # type: ignore[arg-type]
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == warnings
    assert any("built-in attention: " in record.getMessage() for record in caplog.records)
    assert any("precision=bf16" in record.getMessage() for record in caplog.records) == (warnings == 2)


def test_a_run_logs_its_attention_kernel(tmp_path: Any) -> None:
    assert train(tmp_path, "run.steps=1", "run.validate_every=0") == 0
    assert "built-in attention: " in (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
