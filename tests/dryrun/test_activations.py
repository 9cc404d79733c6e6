"""A rank holds the predicted activations, with either choice of kernels."""

from __future__ import annotations

import pytest

from megastack.config.choices import Device
from megastack.config.convert import replace_values
from megastack.config.schema import TrainConfig
from megastack.dryrun.run import rank_alone
from megastack.layers.kernels import KernelChoice
from megastack.models.activations import activation_bytes
from tests.dryrun.cases import precision, small
from tests.parity.cases import FAMILIES, Changes

DEVICES: dict[KernelChoice, Device] = {"cpu": Device.cpu, "device": Device.cuda}
WHOLE_ROWS = {"data.document_mask": False}
RANDOM_STATE = 24
"""Bytes that are not predicted: FlashAttention returns the state of its random numbers."""
CASES: dict[str, list[Changes]] = {
    "llama": [precision("bf16"), {"model.dropout": 0.1}],
    "gpt2": [precision("bf16"), FAMILIES["gpt2"], {"model.dropout": 0.1, "model.attention_dropout": 0.1}],
    "selective": [precision("bf16"), {"model.attention_dropout": 0.1, "recompute.mode": "selective"}],
}


def held(config: TrainConfig, kernels: KernelChoice) -> int:
    """Bytes that a whole model holds after the forward of a microbatch, without its results."""
    with rank_alone(config, 0, kernels=kernels) as alone:
        (stage,), memory = alone.training.stages, alone.device.memory
        microbatch = alone.training.step.loader.step(0)[0].to(alone.training.mesh.device)
        before = memory.live
        out = stage({}, microbatch)
        results = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in (out.objective, out.report)}
        return memory.live - before - sum(results.values())


@pytest.mark.parametrize("kernels", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_the_predicted_bytes(case: str, kernels: KernelChoice) -> None:
    config = replace_values(small(*CASES[case], WHOLE_ROWS), {"device": DEVICES[kernels]})
    predicted = activation_bytes(config, range(config.model.layers), embedding=True, head=True).saved
    assert held(config, kernels) - predicted in (0, RANDOM_STATE)
