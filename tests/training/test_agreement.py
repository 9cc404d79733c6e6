"""Ranks that do not bring the same to a step: an error that names the odd one, before anything is exchanged."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import megastack
from megastack.assemble.loop import build_loop
from megastack.assemble.training import build_training
from megastack.config.layout_rules import mesh_shape
from megastack.errors import DataError
from megastack.mesh.mesh import Mesh
from megastack.observe.folder import RunFolder
from megastack.testing.ranks import run_ranks
from megastack.training.signals import StopRequest
from tests.tiny_runs import overrides


def train(folder: str, difference: str) -> tuple[str, tuple[int, ...], int]:
    """Three stages, the middle one of which is different from the second step on; the error on every rank."""
    config = megastack.compose([*overrides(Path(folder)), "parallel.pp=3", "model.layers=3", "batch.micro_size=2"])
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh)
    load = training.step.loader.step

    def changed(step: int) -> list:
        found = load(step)
        if mesh.rank != 1 or step == 0:
            return found
        if difference == "count":
            return found[:1]
        return [replace(m, tokens_BS=m.tokens_BS[:, :-1]) for m in found]

    training.step.loader.step = changed  # type: ignore[method-assign]
    place = RunFolder(Path(folder) / "run")
    if mesh.rank == 0:
        place.path.mkdir()
    loop = build_loop(training, place, StopRequest())
    with pytest.raises(DataError) as raised:
        loop.run()
    return str(raised.value), raised.value.ranks, len(mesh.ledger.trail.actions)


@pytest.mark.parametrize(("difference", "brought"), [("count", "1 × [2, 16]"), ("shape", "2 × [2, 15]")])
def test_the_odd_rank_is_named_on_all_before_the_step(difference: str, brought: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(train, 3, folder, difference)
    assert len({message for message, *_ in results}) == 1
    message, ranks, _ = results[0]
    assert ranks == (1,)
    assert message.startswith(f"rank 1 (pp1 dp0 tp0): step 2: microbatches {brought}, ")
    assert "the other ranks: step 2: microbatches 2 × [2, 16]" in message
