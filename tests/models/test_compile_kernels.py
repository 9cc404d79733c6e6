"""Inductor fuses what lies between the matrix products of a compiled block: at most one generated kernel.

Counted in the code that inductor generates on a CPU. Its kernels are not compiled and compute nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megastack.batch import Microbatch
from megastack.config.schema import ModelOptions
from megastack.mesh.mesh import Mesh
from megastack.models.compile import CompiledBlocks
from megastack.models.config import ModelConfig
from megastack.models.decoder import Decoder
from megastack.placement.module import initialise_

B, S = 2, 32
SIZES = {"layers": 2, "heads": 4, "hidden": 64, "ffn": 96, "vocab": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kv_groups": 2},
    "gpt2": {
        "norm": "layer",
        "activation": "gelu",
        "positions": "learned",
        "max_positions": S,
        "bias": True,
        "dropout": 0.1,
    },
}
CALL = re.compile(r"^ +(?:\w+ = )?((?:cpp_fused|extern_kernels|torch\.ops|aten)\w*(?:\.\w+)*)\(")


@dataclass(frozen=True)
class Calls:
    """The calls of a generated forward or backward, in order."""

    names: tuple[str, ...]

    @staticmethod
    def of(code: str) -> Calls:
        return Calls(tuple(match[1] for line in code.splitlines() if (match := CALL.match(line))))

    @property
    def others(self) -> list[str]:
        return [name for name in self.names if not name.startswith("cpp_fused")]

    def between(self) -> Iterator[list[str]]:
        """The generated kernels before, between and after the others."""
        kernels: list[str] = []
        for name in self.names:
            if name.startswith("cpp_fused"):
                kernels.append(name)
            else:
                yield kernels
                kernels = []
        yield kernels


@contextmanager
def generated_code() -> Iterator[list[str]]:
    """Collects the code of each graph; its kernels return at once."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    with (
        patch.object(GraphLowering, "save_output_code", codes.append),
        patch.object(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None),
        config.patch(force_disable_caches=True),
    ):
        yield codes


def codes_of(options: dict[str, Any]) -> list[str]:
    """The forward and the backward of a block, which all blocks and steps share."""
    stage = Decoder(ModelConfig(model=ModelOptions(**SIZES | options)), Mesh.single())
    initialise_(stage, stage.mesh, 0, device=torch.device("cpu"))
    stage.compiled_blocks = CompiledBlocks(stage.mesh)
    tokens_BS = torch.arange(S).repeat(B, 1)
    with generated_code() as codes:
        for step in range(2):
            microbatch = Microbatch(tokens_BS, tokens_BS, tokens_BS, None, torch.arange(B), step)
            stage({}, microbatch).objective.sum().backward()
    return codes


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_one_kernel_stands_between_matrix_products_and_attention(name: str) -> None:
    forward, backward = map(Calls.of, codes_of(MODELS[name]))
    for calls in (forward, backward):
        assert sum("mm" in each or "product" in each for each in calls.others) >= 4
        assert sum("attention" in each for each in calls.others) == 1
        assert max(map(len, calls.between())) == 1, calls.names
