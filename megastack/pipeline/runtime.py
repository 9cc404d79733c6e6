"""The one executor of pipeline schedules.

It walks this rank's action list, once a step. A forward takes its carry from the previous stage (received, or handed
over when that stage sits on the same rank), a backward its gradients from the next one. One rank is a schedule of one
stage, not a branch. Nothing here reads a tensor on the host.

What crosses a boundary is a function of the microbatch's shapes. The first time that a stage sees a shape, the sender
says in a header what follows; from then on receives are posted one computation ahead of their use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from megastack.batch import Microbatch, StageLoss
from megastack.comm.collectives import Pending, all_reduce
from megastack.comm.p2p import Lines
from megastack.errors import ScheduleError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.pipeline.action import Action
from megastack.pipeline.communication import with_communication
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.forward_only import forward_only
from megastack.pipeline.stage import Carry, Slot, Stage, leaf

_SUPPORTED = {"F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}
Signature = tuple[tuple[int, ...], bool, bool]
Wire = list[tuple[Slot, Pending | None]]


class Pipeline:
    """This rank's stages and the schedule that drives them.

    Args:
        stages: the modules of this rank's chunks, in the order of their stage numbers.
        schedule: computations by rank, as :func:`megastack.pipeline.schedules.build_schedule` gives them.
        mesh: messages travel along ``pp``, the loss is summed over ``pp``, ``dp`` and ``cp``.
        on_last_backward: called with the number of a chunk (its place in ``stages``) right before its last backward of
            a step, when its gradients are about to be complete.

    Attributes:
        current: the action being executed, for reports about a failure.

    Raises:
        ScheduleError: the schedule is for another number of ranks or chunks, or has actions that are not supported.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: Schedule,
        mesh: Mesh,
        *,
        on_last_backward: Callable[[int], None] | None = None,
    ) -> None:
        self.mesh = mesh
        self.schedule = schedule
        self.current: Action | None = None
        self._axis = mesh[Axis.PP]
        self._on_last_backward = on_last_backward or (lambda chunk: None)
        self._program = _Program(schedule, self._axis.rank)
        self._stages = {index: Stage(module, index) for index, module in zip(self._own(), stages, strict=True)}
        self._chunk_of = {index: chunk for chunk, index in enumerate(self._stages)}
        peers = {self._rank_of(stage + step) for stage in self._stages for step in (-1, 1)}
        self._lines = Lines(self._axis, mesh.device, sorted(peers - {self._axis.rank, -1}))
        self._posts_early = mesh.device.type == "cpu"  # elsewhere it could queue in front of a send the peer needs
        self._slots: dict[tuple[int, Signature], list[Slot]] = {}
        self._announced: set[tuple[int, Signature]] = set()
        self._forget()

    @property
    def peaks(self) -> dict[int, int]:
        """The most microbatches whose activations were held at once, by stage, since the pipeline was built."""
        return {index: stage.peak for index, stage in self._stages.items()}

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor | float) -> Tensor:
        """Forward and backward of one step.

        Gradients of ``sum of objectives / denominator`` are added to the parameters'; reducing them is the business of
        :class:`megastack.gradients.buckets.GradientBuckets`.

        Args:
            microbatches: this ``dp`` coordinate's, as many as the schedule has.
            denominator: the valid tokens of the whole step, over ``dp``, ``cp`` and microbatches.

        Returns:
            The reported loss, divided by ``denominator``, a scalar alike on every rank.
        """
        if len(microbatches) != self.schedule.microbatches:
            raise ScheduleError(f"microbatches={len(microbatches)}: the schedule has {self.schedule.microbatches}")
        scale = 1.0 / torch.clamp(torch.as_tensor(denominator, dtype=torch.float64), min=1.0)
        self._execute(self._program, microbatches, scale)
        return self._total() * scale.to(self.mesh.device)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Forward only: the sum of reported losses over all microbatches of all ``dp`` coordinates, on every rank."""
        plan = self.schedule
        schedule = forward_only(plan.pp, plan.chunks, len(microbatches), stage_ranks=plan.stage_ranks)
        self._execute(_Program(schedule, self._axis.rank), microbatches, torch.ones((), dtype=torch.float64))
        return self._total()

    def _own(self) -> list[int]:
        return [stage for stage in range(self.schedule.stages) if self._rank_of(stage) == self._axis.rank]

    def _rank_of(self, stage: int) -> int:
        return self.schedule.stage_rank(stage) if 0 <= stage < self.schedule.stages else -1

    def _forget(self) -> None:
        self._carries: dict[tuple[int, int], Wire | Carry] = {}
        self._gradients: dict[tuple[int, int], Wire | dict[str, Tensor]] = {}
        self._sum: Tensor | None = None
        for stage in self._stages.values():
            stage.drop()

    def _total(self) -> Tensor:
        """The sum of reported losses over pipeline, data and context ranks, in fp64."""
        own = torch.zeros((), dtype=torch.float64, device=self.mesh.device) if self._sum is None else self._sum
        return all_reduce(own, self.mesh[Axis.PP, Axis.DP, Axis.CP])

    def _execute(self, program: _Program, microbatches: Sequence[Microbatch], scale: Tensor) -> None:
        """Walk the program; a step that raised before left nothing behind."""
        self._forget()
        self._microbatches = microbatches
        self._signatures = [_signature(microbatch) for microbatch in microbatches]
        self._scale = scale.to(self.mesh.device)
        early = self._posts_early and all(map(self._is_known, program.receives))
        for self.current in program.early if early else program.plain:
            self._dispatch(self.current, program)
        self._lines.finish()
        self.current = None

    def _dispatch(self, action: Action, program: _Program) -> None:
        stage, number = action.stage, action.microbatch
        assert number is not None
        match str(action.op):
            case "F":
                self._forward(stage, number)
            case "B":
                if program.is_last_backward(action):
                    self._on_last_backward(self._chunk_of[stage])
                self._backward(stage, number)
            case "SEND_F":
                self._send(stage, number)
            case "RECV_F":
                self._carries[stage, number] = self._receive(stage, number)
            case "SEND_B":
                self._send_gradients(stage, number)
            case "RECV_B":
                self._gradients[stage, number] = self._receive_gradients(stage, number)

    # Forward: the carry comes in, the output goes to the next stage or into the loss.

    def _forward(self, index: int, number: int) -> None:
        carry = _arrived(self._carries.pop((index, number), {}))
        output = self._stages[index].forward(carry, self._microbatches[number], number)
        if isinstance(output, StageLoss):
            report = output.report.detach().double()
            self._sum = report if self._sum is None else self._sum + report
            self._gradients[index, number] = {"objective": self._scale.to(output.objective.dtype)}
            return
        self._slots[index, self._signatures[number]] = [Slot.of(name, x) for name, x in output.items()]
        if self._rank_of(index + 1) == self._axis.rank:
            output = {name: leaf(x, x is not None and x.requires_grad) for name, x in output.items()}
        self._carries[index + 1, number] = output

    def _send(self, index: int, number: int) -> None:
        """``SEND_F`` of a stage: its output, after a header if the receiver cannot know what comes."""
        peer, signature = self._rank_of(index + 1), self._signatures[number]
        if (index, signature) not in self._announced:
            self._lines.send_header([asdict(slot) for slot in self._slots[index, signature]], peer)
            self._announced.add((index, signature))
        for x in _tensors(self._carries.pop((index + 1, number))):
            self._lines.send(x.detach(), peer)

    def _receive(self, index: int, number: int) -> Wire:
        """``RECV_F`` of a stage: post a receive for each tensor of the previous stage's output."""
        peer, key = self._rank_of(index - 1), (index - 1, self._signatures[number])
        if key not in self._slots:
            slots = self._lines.receive_header(peer)
            self._slots[key] = [Slot(**slot | {"shape": slot["shape"] and tuple(slot["shape"])}) for slot in slots]
        return [(slot, self._post(slot, peer)) for slot in self._slots[key]]

    def _post(self, slot: Slot, peer: int) -> Pending | None:
        return None if slot.shape is None else self._lines.receive(slot.shape, slot.torch_dtype, peer)

    # Backward: gradients of the output come in, gradients of the carry go to the previous stage.

    def _backward(self, index: int, number: int) -> None:
        gradients = _arrived(self._gradients.pop((index, number), {}))
        produced = self._stages[index].backward(number, {name: g for name, g in gradients.items() if g is not None})
        if index > 0:
            self._gradients[index - 1, number] = produced

    def _send_gradients(self, index: int, number: int) -> None:
        peer = self._rank_of(index - 1)
        for gradient in _tensors(self._gradients.pop((index - 1, number))):
            self._lines.send(gradient, peer)

    def _receive_gradients(self, index: int, number: int) -> Wire:
        slots = self._slots[index, self._signatures[number]]
        return [(slot, self._post(slot, self._rank_of(index + 1))) for slot in slots if slot.needs_grad]

    def _is_known(self, action: Action) -> bool:
        stage = action.stage - 1 if action.op == "RECV_F" else action.stage
        assert action.microbatch is not None
        return (stage, self._signatures[action.microbatch]) in self._slots


class _Program:
    """A rank's actions with their communication, receives right before their use and one computation earlier."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.plain = with_communication(schedule, ahead=0).ranks[rank]
        self.early = with_communication(schedule, ahead=1).ranks[rank]
        unknown = {str(action.op) for action in self.plain} - _SUPPORTED
        if unknown:
            raise ScheduleError(f"schedule={schedule.name}: the runtime does not execute {', '.join(sorted(unknown))}")
        self.receives = [action for action in self.plain if action.op.startswith("RECV")]
        self._last = {action.stage: action for action in self.plain if action.op == "B"}

    def is_last_backward(self, action: Action) -> bool:
        return self._last[action.stage] == action


def _signature(microbatch: Microbatch) -> Signature:
    return tuple(microbatch.tokens_BS.shape), microbatch.documents_BS is not None, torch.is_grad_enabled()


def _arrived(wire: Wire | Carry) -> Carry:
    """Wait for what was received; what was handed over on this rank is there already."""
    if not isinstance(wire, list):
        return wire
    return {slot.name: leaf(None if pending is None else pending.wait(), slot.needs_grad) for slot, pending in wire}


def _tensors(carry: Wire | Carry) -> list[Tensor]:
    assert not isinstance(carry, list)
    return [x for x in carry.values() if x is not None]
