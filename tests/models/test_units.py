"""The FSDP units of a stage and their reshard policies."""

from __future__ import annotations

import pytest
import torch

from megastack.mesh.mesh import Mesh
from megastack.models.decoder import Decoder
from megastack.placement.module import ReshardPolicy
from tests.models.model_cases import GPT2, LLAMA, tiny

AFTER_FORWARD, FORWARD_ONLY = ReshardPolicy.AFTER_FORWARD, ReshardPolicy.FORWARD_ONLY
AFTER_BACKWARD, WITH_STAGE = ReshardPolicy.AFTER_BACKWARD, ReshardPolicy.WITH_STAGE


def policies(model: dict, layers: range, **ends: bool) -> dict[str, ReshardPolicy]:
    with torch.device("meta"):
        stage = Decoder(tiny(model), Mesh.single(), layers=layers, **ends)
    names = {module: name for name, module in stage.named_modules()}
    return {names[unit]: policy for unit, policy in stage.units().items()}


def test_a_first_stage_frees_lookups_and_blocks_after_their_forward() -> None:
    found = policies(GPT2, range(2), embedding=True, head=False)
    assert found == {
        "embedding": FORWARD_ONLY,
        "positions": FORWARD_ONLY,
        "blocks.0": AFTER_FORWARD,
        "blocks.1": AFTER_FORWARD,
    }


@pytest.mark.parametrize("tied", [False, True])
def test_a_last_stage_keeps_its_end_until_the_backward(tied: bool) -> None:
    found = policies(LLAMA | {"tied": tied}, range(2), embedding=False, head=True)
    assert list(found.items()) == [
        ("blocks.0", AFTER_FORWARD),
        ("blocks.1", AFTER_BACKWARD),
        ("norm", WITH_STAGE),
        *([] if tied else [("head", WITH_STAGE)]),
    ]


@pytest.mark.parametrize(("tied", "embedding"), [(False, FORWARD_ONLY), (True, WITH_STAGE)])
def test_a_tied_embedding_on_one_stage_stays_with_the_stage(tied: bool, embedding: ReshardPolicy) -> None:
    assert policies(LLAMA | {"tied": tied}, range(2), embedding=True, head=True)["embedding"] is embedding
