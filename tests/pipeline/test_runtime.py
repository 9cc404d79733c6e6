"""The runtime against plain autograd: every schedule and size, memory, changing shapes, files of actions, refusals."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.batch import Microbatch, StageLoss
from megastack.comm.traffic import Traffic
from megastack.errors import ScheduleError
from megastack.layers.linear import RowParallelLinear
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.pipeline.action import Action
from megastack.pipeline.check import check
from megastack.pipeline.communication import with_communication
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.registry import build_schedule
from megastack.testing.ranks import run_ranks
from megastack.weight_gradients import AccumulationHook
from tests.pipeline.chain import WIDTH, Link, batch, distance, gradients, plain, rows_of, squared_error

MICROBATCHES = (1, 2, 3, 4, 8)
KINDS = (("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("gpipe", 2), ("interleaved", 2))


def links(schedule: Schedule, mesh: Mesh) -> list[Link]:
    return [Link(index, schedule.stages) for index in schedule.rank_stages(mesh[Axis.PP].rank)]


def differs(mesh: Mesh, schedule: Schedule, batches: list[Any], pipeline: Pipeline, stages: list[Link]) -> float:
    """How far loss and gradients of a step are from plain autograd's; gradients are cleared before."""
    for stage in stages:
        stage.zero_grad()
    loss, reference = plain(schedule.stages, batches)
    found = float(pipeline.run(batches, rows_of(batches)))
    own = [reference[index] for index in schedule.rank_stages(mesh[Axis.PP].rank)]
    worst = max(distance(gradients(stage), expected) for stage, expected in zip(stages, own, strict=True))
    return max(worst, abs(found / loss - 1))


def note_chunk(into: list[int], chunk: int, pending: object) -> None:
    into.append(chunk)


def every_schedule(pp: int) -> dict[str, tuple[float, float, float]]:
    """The difference, the peak and the foretold peak, for each kind of schedule and number of microbatches."""
    mesh, found = Mesh.from_environment(MeshShape(pp=pp)), {}
    for name, chunks in KINDS:
        for count in MICROBATCHES:
            schedule = build_schedule(name, pp, chunks, count)
            stages, calls = links(schedule, mesh), []
            pipeline = Pipeline(
                stages, schedule, mesh, on_last_backward=lambda chunk, _, calls=calls: calls.append(chunk)
            )
            batches = [batch(2, seed=number) for number in range(count)]
            worst = max(differs(mesh, schedule, batches, pipeline, stages) for _ in range(2))
            assert sorted(calls) == sorted(list(range(chunks)) * 2), "once for each chunk and step"
            found[f"{name} v{chunks} M{count}"] = (worst, pipeline.peak, check(schedule).peaks[mesh.rank])
    return found


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_loss_gradients_and_peaks_of_every_schedule(pp: int) -> None:
    for rank, found in enumerate(run_ranks(every_schedule, pp, pp)):
        assert len(found) == len(KINDS) * len(MICROBATCHES)
        for name, (worst, peak, foretold) in found.items():
            assert worst < 1e-12, f"rank {rank} {name}: {worst}"
            assert peak == foretold, f"rank {rank} {name}"


def last_backwards() -> list[list[str]]:
    """Actions at which each chunk was said to be at its last backward."""
    mesh = Mesh.from_environment(MeshShape(pp=2))
    schedule = build_schedule("interleaved", 2, 2, 3)
    seen: list[str] = []
    pipeline = Pipeline(links(schedule, mesh), schedule, mesh, on_last_backward=lambda *_: seen.append(now()))

    def now() -> str:
        return str(pipeline.current)

    pipeline.run([batch(1, seed=m) for m in range(3)], 10)
    backwards = [str(action) for action in schedule.ranks[mesh.rank] if action.op == "B"]
    stages = {name.split("B")[0] for name in backwards}
    return [sorted(seen), sorted([name for name in backwards if name.startswith(f"{s}B")][-1] for s in stages)]


def test_the_last_backward_of_a_chunk_is_announced_right_before_it() -> None:
    for seen, expected in run_ranks(last_backwards, 2):
        assert seen == expected


class Linear(nn.Module):
    """One stage whose only parameters are those of a linear layer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.linear = RowParallelLinear(WIDTH, WIDTH, mesh, bias=True)
        self.linear.double()
        self.mesh = mesh

    def forward(self, carry: Mapping[str, Any], microbatch: Microbatch) -> StageLoss:
        one_hot = F.one_hot(microbatch.tokens_BS % WIDTH, WIDTH).double()
        return squared_error(torch.tanh(self.linear(one_hot)), microbatch)


def test_split_backwards_put_weights_off_until_their_turn_and_b_does_not() -> None:
    """Which gradients change at each action, and what is said to be still to come before the last."""
    mesh, texts = Mesh.single(), ("0F0", "0F1", "0B0", "0I1", "0F2", "0I2", "0W1", "0W2")
    schedule = Schedule.from_actions([[Action.parse(text) for text in texts]])
    stage, changed, told = Linear(mesh), defaultdict(set), []
    weight, bias = stage.linear.weight, stage.linear.bias
    pipeline = Pipeline([stage], schedule, mesh, on_last_backward=lambda chunk, pending: told.append((now(), pending)))

    def now() -> str:
        return str(pipeline.current)

    class Note(AccumulationHook):
        def __init__(self, name: str) -> None:
            self.name, self.before = name, None

        def __call__(self, parameter: Tensor) -> None:
            if parameter.grad is not None and (self.before is None or not torch.equal(parameter.grad, self.before)):
                changed[now()].add(self.name)
                self.before = parameter.grad.clone()

    hooks = [p.register_post_accumulate_grad_hook(Note(name)) for name, p in stage.linear.named_parameters()]
    batches = [batch(2, seed=number) for number in range(3)]
    pipeline.run(batches, rows_of(batches))
    for hook in hooks:
        hook.remove()
    both = {"weight", "bias"}
    assert changed == {"0B0": both, "0I1": {"bias"}, "0I2": {"bias"}, "0W1": {"weight"}, "0W2": {"weight"}}
    assert told == [("0W2", {weight})]
    assert pipeline.peak == check(schedule).peaks[0] == 2
    split = [weight.grad.clone(), bias.grad.clone()]
    stage.zero_grad()
    Pipeline([stage], build_schedule("gpipe", 1, 1, 3), mesh).run(batches, rows_of(batches))
    for found, expected in zip(split, (weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def changing_shapes() -> float:
    """Shapes change between steps and within one; the schedule stays."""
    mesh = Mesh.from_environment(MeshShape(pp=3))
    schedule = build_schedule("1f1b", 3, 1, 3)
    stages = links(schedule, mesh)
    pipeline = Pipeline(stages, schedule, mesh)
    steps = [
        [batch(3, seed=1), batch(3, seed=2), batch(2, seed=3)],  # 8 rows in 3 microbatches
        [batch(1, 6, seed=4)] * 3,
        [batch(2, 5, seed=5), batch(3, seed=6), batch(4, 2, seed=7)],
        [batch(3, seed=8), batch(2, seed=9), batch(3, seed=10)],  # all known
    ]
    return max(differs(mesh, schedule, batches, pipeline, stages) for batches in steps)


def test_microbatch_shapes_may_change_between_steps_and_within_one() -> None:
    assert max(run_ranks(changing_shapes, 3)) < 1e-12


def evaluations() -> tuple[float, float, bool, float]:
    mesh = Mesh.from_environment(MeshShape(pp=2))
    schedule = build_schedule("interleaved", 2, 2, 4)
    stages = links(schedule, mesh)
    pipeline = Pipeline(stages, schedule, mesh)
    training = [batch(2, seed=number) for number in range(4)]
    before = differs(mesh, schedule, training, pipeline, stages)
    held = [[gradient.clone() for gradient in gradients(stage)] for stage in stages]
    worst = 0.0
    for count in (1, 3, 7, 3):
        batches = [batch(2, seed=50 + number) for number in range(count)]
        expected = plain(schedule.stages, batches)[0] * rows_of(batches)
        worst = max(worst, abs(float(pipeline.evaluate(batches)) / expected - 1))
    untouched = all(distance(gradients(stage), old) == 0 for stage, old in zip(stages, held, strict=True))
    return before, worst, untouched, differs(mesh, schedule, training, pipeline, stages)


def test_evaluation_takes_any_number_of_microbatches_and_leaves_training_alone() -> None:
    for before, worst, untouched, after in run_ranks(evaluations, 2):
        assert max(before, worst, after) < 1e-12
        assert untouched


def from_files(paths: list[str]) -> list[float]:
    mesh, found = Mesh.from_environment(MeshShape(pp=2)), []
    for path in paths:
        schedule = Schedule.load(path)
        check(schedule, batched=False)
        stages = links(schedule, mesh)
        pipeline = Pipeline(stages, schedule, mesh)
        batches = [batch(2, seed=number) for number in range(3)]
        found += [differs(mesh, schedule, batches, pipeline, stages) for _ in range(2)]
        assert mesh.ledger.total("pp", "send").calls == 6, "three forwards or backwards a step"
        mesh.ledger.reset()
    return found


def test_lists_of_actions_come_from_a_file_with_or_without_their_messages(tmp_path: Path) -> None:
    rows = ["0F2,0F0,0B2,0F1,0B0,0B1", "1F2,1B2,1F0,1B0,1F1,1B1"]  # microbatch 2 goes first
    bare, complete, early = (tmp_path / f"{name}.csv" for name in ("bare", "complete", "early"))
    bare.write_text("\n".join(rows) + "\n")
    with_communication(Schedule.load(bare)).dump(complete)
    early.write_text(
        "0F2,0SEND_F2,0F0,0SEND_F0,0RECV_B2,0RECV_B0,0B2,0F1,0SEND_F1,0B0,0RECV_B1,0B1\n"
        "1RECV_F2,1RECV_F0,1RECV_F1,1F2,1B2,1SEND_B2,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    for found in run_ranks(from_files, 2, [str(path) for path in (bare, complete, early)]):
        assert len(found) == 6
        assert max(found) < 1e-12


def memory() -> list[bool]:
    """Whether outputs that were sent, and carries whose backward is done, are gone while the step still runs."""
    mesh = Mesh.from_environment(MeshShape(pp=2))
    schedule = build_schedule("1f1b", 2, 1, 6)
    stages: list[nn.Module] = [Watched(link) for link in links(schedule, mesh)]
    Pipeline(stages, schedule, mesh).run([batch(2, seed=number) for number in range(6)], 10)
    return [watched.gone() for watched in stages if isinstance(watched, Watched)]


class Watched(nn.Module):
    """A stage that keeps weak references to what it gave, and looks at its last forward which of them live."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link, self.given, self.alive = link, [], []

    def forward(self, carry: Any, microbatch: Any) -> Any:
        output = self.link(carry, microbatch)
        if isinstance(output, dict):
            self.given.append(weakref.ref(output["hidden"]))
        else:
            self.given.append(weakref.ref(carry["hidden"]))
        self.alive = [ref() is not None for ref in self.given]
        return output

    def gone(self) -> bool:
        return not any(self.alive[:3])


def test_what_was_sent_or_used_up_is_freed_during_the_step() -> None:
    assert run_ranks(memory, 2) == [[True], [True]]


def messages() -> list[Traffic]:
    """What a rank sends in a step of 1F1B on two ranks, and of two chunks on one."""
    pair, alone = Mesh.from_environment(MeshShape(pp=2)), Mesh.single()
    batches = [batch(2, seed=number) for number in range(3)]
    for mesh, pp, chunks in ((pair, 2, 1), (alone, 1, 2)):
        schedule = build_schedule("gpipe", pp, chunks, 3)
        Pipeline(links(schedule, mesh), schedule, mesh).run(batches, 10)
    return [pair.ledger.total("pp", "send"), pair.ledger.total("pp", "all_reduce"), alone.ledger.total()]


def test_only_what_leaves_a_rank_is_counted() -> None:
    hidden = 2 * 4 * 3 * 8
    for found in run_ranks(messages, 2):
        assert found == [Traffic(3, 3 * hidden, 3 * hidden), Traffic(1, 8, 8), Traffic()]


def test_wrong_sizes_are_refused_with_their_numbers() -> None:
    mesh, schedule = Mesh.single(), build_schedule("1f1b", 1, 1, 2)
    pipeline = Pipeline([Link(0, 1)], schedule, mesh)
    with pytest.raises(ScheduleError, match=r"expected 2 microbatches \(from the schedule\), got 3"):
        pipeline.run([batch(1)] * 3, 1)
    with pytest.raises(ScheduleError, match="is for pp=2, the mesh has pp=1"):
        Pipeline([Link(0, 2)], build_schedule("1f1b", 2, 1, 2), mesh)
    with pytest.raises(ScheduleError, match=r"rank 0 of the pipeline has stages \[0, 1\], got 1 module"):
        Pipeline([Link(0, 2)], build_schedule("gpipe", 1, 2, 2), mesh)


def test_actions_that_the_runtime_cannot_do_are_refused_by_name() -> None:
    split = Schedule.from_actions([[Action.parse(text) for text in ("0UNSHARD", "0F0", "0B0", "0RESHARD")]])
    with pytest.raises(ScheduleError, match="does not execute RESHARD, UNSHARD"):
        Pipeline([Link(0, 1)], split, Mesh.single())


def test_a_step_that_raised_leaves_nothing_behind() -> None:
    mesh, schedule = Mesh.single(), build_schedule("gpipe", 1, 2, 2)
    stages = links(schedule, mesh)
    pipeline = Pipeline(stages, schedule, mesh)
    batches = [batch(2, seed=0), batch(2, seed=1)]
    bad = batch(2, seed=2)
    bad.tokens_BS[0, 0] = 99
    with pytest.raises(IndexError):
        pipeline.run([batches[0], bad], 1)
    assert str(pipeline.current) == "0F1", "a report can say where it failed"
    assert differs(mesh, schedule, batches, pipeline, stages) < 1e-12
    assert pipeline.current is None
    assert torch.is_grad_enabled()
