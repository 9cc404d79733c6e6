"""The one executor of pipeline schedules.

It walks this rank's action list, once a step. A forward takes its carry from the previous stage (received, or handed
over when that stage sits on the same rank), a backward its gradients from the next one. Where the schedule splits
backwards, I gives the gradient of the input and W, later, those of the linear layers' weights. One rank is a schedule
of one stage, not a branch. Nothing here reads a tensor on the host.

What crosses a boundary is a function of the microbatch's shapes. The first time that a stage gives something for a
shape, it says in a header what follows, and the receiver waits for that at first use; from then on receives are posted
where the schedule lists them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megastack.batch import Microbatch, StageLoss
from megastack.comm.collectives import Pending, all_reduce
from megastack.comm.p2p import P2PChannels
from megastack.errors import ScheduleError, counted
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.pipeline.action import EXECUTED, Action, Op
from megastack.pipeline.boundary import has_communication
from megastack.pipeline.communication import with_communication
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.forward_only import forward_only
from megastack.pipeline.stage import Stage, StageTensors, TensorSpec, leaf
from megastack.weight_gradients import WORTH_ADDING_IN_PLACE

MicrobatchSpec = tuple[tuple[int, ...], bool, bool]
Boundary = tuple[int, MicrobatchSpec]
"""The stage before a boundary, and the kind of microbatch that crosses it."""


@dataclass
class _Receive:
    """A receive of the schedule: what crosses which boundary, and its messages once they are posted."""

    peer: int
    boundary: Boundary
    gradients: bool
    messages: list[tuple[TensorSpec, Pending | None]] | None = None


class Pipeline:
    """This rank's stages and the schedule that drives them.

    Args:
        stages: the modules of this rank's chunks, in the order of their stage numbers.
        schedule: the actions of every rank, as :func:`megastack.pipeline.schedules.registry.build_schedule` gives them;
            sends and receives are added where it names none.
        mesh: messages travel along ``pp``, the loss is summed over ``pp``, ``dp`` and ``cp``.
        on_last_backward: called with the number of a chunk (its place in ``stages``) right before the last B or W of it
            in a step, when its gradients are about to be complete; and, before a W, with the parameters whose
            gradients it will make, where those of all others are complete.

    Attributes:
        current: the action being executed, for reports about a failure.
        reports: the reported loss sum of each microbatch of the last step, on the last stage's rank.

    Raises:
        ScheduleError: the schedule is for another number of ranks or chunks, or has actions that are not supported.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: Schedule,
        mesh: Mesh,
        *,
        on_last_backward: Callable[[int, Collection[Tensor] | None], None] | None = None,
    ) -> None:
        self.mesh = mesh
        self.schedule = schedule
        self.current: Action | None = None
        self._axis = mesh[Axis.PP]
        own = _own_stages(schedule, self._axis.rank, self._axis.size, len(stages))
        self._stages = {
            index: Stage(module, index, mesh.weight_gradients) for index, module in zip(own, stages, strict=True)
        }
        self._chunk_of = {index: chunk for chunk, index in enumerate(own)}
        self._on_last_backward = on_last_backward or (lambda chunk, awaited: None)
        # Elsewhere than on gloo an early receive could queue in front of a send that the peer needs.
        self._ahead = 1 if mesh.device.type == "cpu" else 0
        self._program = _Program(schedule, self._axis.rank, self._ahead)
        self._forwards: dict[int, _Program] = {}
        self._lines = P2PChannels(self._axis, mesh.backward_lines, mesh.device)
        self._slots: dict[Boundary, list[TensorSpec]] = {}
        self._announced: set[Boundary] = set()
        self._peak = 0
        self._forget()

    @property
    def peak(self) -> float:
        """The most activations that this rank held at once so far, in microbatches of all its chunks, as
        :func:`megastack.pipeline.check.check` foretells them."""
        return self._peak / self.schedule.chunks

    def run(
        self, microbatches: Sequence[Microbatch], denominator: Tensor | float, *, loss_scale: Tensor | None = None
    ) -> Tensor:
        """Forward and backward of one step.

        Gradients of ``sum of objectives / denominator`` are added to the parameters'; reducing them is the business of
        :class:`megastack.gradients.buckets.GradientBuckets`.

        Args:
            microbatches: this ``dp`` coordinate's, as many as the schedule has.
            denominator: the valid tokens of the whole step, over ``dp``, ``cp`` and microbatches.
            loss_scale: multiplies the gradients, not the loss that is returned.

        Returns:
            The reported loss, divided by ``denominator``, a scalar alike on every rank.
        """
        if len(microbatches) != self.schedule.microbatches:
            raise ScheduleError(
                f"microbatches={len(microbatches)}: the schedule has {self.schedule.microbatches}; use one for as many"
            )
        scale = 1.0 / torch.clamp(torch.as_tensor(denominator, dtype=torch.float64), min=1.0)
        scale = scale.to(self.mesh.device)
        self._execute(self._program, microbatches, scale if loss_scale is None else scale * loss_scale)
        return self._total() * scale

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Forward only, of any number of microbatches: the sum of reported losses over all of them and all ``dp``
        coordinates, on every rank."""
        self._forward_only(microbatches)
        return self._total()

    @torch.no_grad()
    def infer(self, microbatches: Sequence[Microbatch]) -> list[Any]:
        """Forward only, with stages that end in something other than a loss: what the last one gave for each of the
        microbatches, on its ranks; empty elsewhere."""
        self._forward_only(microbatches)
        return [self._results[number] for number in sorted(self._results)]

    def _forward_only(self, microbatches: Sequence[Microbatch]) -> None:
        plan, count = self.schedule, len(microbatches)
        if count not in self._forwards:
            forwards = forward_only(plan.pp, plan.chunks, count, stage_ranks=plan.stage_ranks)
            self._forwards[count] = _Program(forwards, self._axis.rank, self._ahead)
        self._execute(self._forwards[count], microbatches, torch.ones((), dtype=torch.float64))

    def _rank_of(self, stage: int) -> int:
        return self.schedule.stage_rank(stage) if 0 <= stage < self.schedule.stages else -1

    def _forget(self) -> None:
        """Begin a step; one that raised leaves nothing behind."""
        self._carries: dict[tuple[int, int], _Receive | StageTensors] = {}
        self._gradients: dict[tuple[int, int], _Receive | Mapping[str, Tensor]] = {}
        self._unposted: dict[int, deque[_Receive]] = defaultdict(deque)
        self.reports: dict[int, Tensor] = {}
        self._results: dict[int, Any] = {}
        self._sum = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for stage in self._stages.values():
            stage.drop()

    def _total(self) -> Tensor:
        """The sum of reported losses over pipeline, data and context ranks, in fp64."""
        return all_reduce(self._sum, self.mesh[Axis.PP, Axis.DP, Axis.CP])

    def _execute(self, program: _Program, microbatches: Sequence[Microbatch], scale: Tensor) -> None:
        self._forget()
        self._microbatches = microbatches
        self._signatures = [_signature(microbatch) for microbatch in microbatches]
        self._scale = scale.to(self.mesh.device)
        with self.mesh.weight_gradients.on(least=0 if program.splits else WORTH_ADDING_IN_PLACE):
            for self.current in program.actions:
                self.mesh.ledger.flight_recorder.act(self.current)
                self._dispatch(self.current, program)
        self._lines.finish()
        self.current = None

    def _dispatch(self, action: Action, program: _Program) -> None:
        stage, number = action.stage, action.microbatch
        assert number is not None
        match action.op:
            case Op.F:
                self._forward(stage, number)
            case Op.B:
                if program.is_last_backward(action):
                    self._on_last_backward(self._chunk_of[stage], None)
                self._backward(stage, number, self._stages[stage].backward)
            case Op.I:
                self._backward(stage, number, self._stages[stage].backward_input)
            case Op.W:
                if program.is_last_backward(action):
                    self._on_last_backward(self._chunk_of[stage], self._stages[stage].awaited(number))
                self._stages[stage].backward_weights(number)
            case Op.SEND_F:
                self._send(stage, number)
            case Op.SEND_B:
                self._send_gradients(stage, number)
            case Op.RECV_F:
                self._carries[stage, number] = self._receive(stage - 1, stage - 1, number)
            case Op.RECV_B:
                self._gradients[stage, number] = self._receive(stage + 1, stage, number, gradients=True)

    # Forward: the carry comes in, the output goes to the next stage or into the loss.

    def _forward(self, index: int, number: int) -> None:
        carry = self._arrived(self._carries.pop((index, number), {}))
        output = self._stages[index].forward(carry, self._microbatches[number], number)
        self._peak = max(self._peak, sum(stage.live for stage in self._stages.values()))
        if isinstance(output, StageLoss):
            self.reports[number] = output.report.detach()
            self._sum += self.reports[number]
            self._gradients[index, number] = {"objective": self._scale.to(output.objective.dtype)}
            return
        if index == self.schedule.stages - 1:
            self._results[number] = output
            return
        self._describe((index, self._signatures[number]), output)
        if self._rank_of(index + 1) == self._axis.rank:
            output = {name: leaf(x, x is not None and x.requires_grad) for name, x in output.items()}
        self._carries[index + 1, number] = output

    def _describe(self, boundary: Boundary, output: StageTensors) -> None:
        """Note what crosses a boundary; it must be the same for every microbatch of a kind."""
        slots = [TensorSpec.of(name, x) for name, x in output.items()]
        known = self._slots.setdefault(boundary, slots)
        if slots != known:
            before, now = ("; ".join(map(str, side)) for side in (known, slots))
            raise ScheduleError(
                f"stage {boundary[0]} gave ({before}) for one microbatch and ({now}) for another of the same shape; "
                "what blocks name in boundary() may depend on the shape of a microbatch alone"
            )

    def _send(self, index: int, number: int) -> None:
        """``SEND_F`` of a stage: its output, after a header if the receiver cannot know what comes."""
        peer, boundary = self._rank_of(index + 1), (index, self._signatures[number])
        if boundary not in self._announced:
            self._lines.send_header([asdict(slot) for slot in self._slots[boundary]], peer)
            self._announced.add(boundary)
        for x in _tensors(self._carries.pop((index + 1, number))):
            self._lines.send(x.detach(), peer)

    # Backward: gradients of the output come in, gradients of the carry go to the previous stage.

    def _backward(
        self, index: int, number: int, run: Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        gradients = self._arrived(self._gradients.pop((index, number), {}))
        produced = run(number, {name: g for name, g in gradients.items() if g is not None})
        if index > 0:
            self._gradients[index - 1, number] = produced

    def _send_gradients(self, index: int, number: int) -> None:
        for gradient in _tensors(self._gradients.pop((index - 1, number))):
            self._lines.send(gradient, self._rank_of(index - 1))

    # Receives of a peer are posted in the order of the schedule, as far as it is known what they bring.

    def _receive(self, neighbour: int, before: int, number: int, *, gradients: bool = False) -> _Receive:
        """A receive from a neighbouring stage; ``before`` is the stage in front of the boundary between the two."""
        receive = _Receive(self._rank_of(neighbour), (before, self._signatures[number]), gradients)
        queue = self._unposted[receive.peer]
        queue.append(receive)
        while queue and queue[0].boundary in self._slots:
            self._post(queue.popleft())
        return receive

    def _arrived(self, value: _Receive | StageTensors) -> StageTensors:
        """Wait for what was received; what was handed over on this rank is there already."""
        if not isinstance(value, _Receive):
            return value
        while value.messages is None:
            self._post(self._unposted[value.peer].popleft())
        return {slot.name: leaf(None if x is None else x.wait(), slot.needs_grad) for slot, x in value.messages}

    def _post(self, receive: _Receive) -> None:
        if receive.boundary not in self._slots:
            assert not receive.gradients, "gradients of an output that was never made"
            header = self._lines.receive_header(receive.peer)
            self._slots[receive.boundary] = [TensorSpec.from_record(record) for record in header]
        slots = [slot for slot in self._slots[receive.boundary] if slot.needs_grad or not receive.gradients]
        receive.messages = [(slot, self._post_slot(slot, receive.peer)) for slot in slots]

    def _post_slot(self, slot: TensorSpec, peer: int) -> Pending | None:
        return None if slot.shape is None else self._lines.receive(slot.shape, slot.torch_dtype, peer)


class _Program:
    """A rank's actions with their communication."""

    def __init__(self, schedule: Schedule, rank: int, ahead: int) -> None:
        complete = schedule if has_communication(schedule) else with_communication(schedule, ahead=ahead)
        self.actions = complete.ranks[rank]
        unknown = {str(action.op) for action in self.actions if action.op not in EXECUTED}
        if unknown:
            raise ScheduleError(f"schedule={schedule.name}: the runtime does not execute {', '.join(sorted(unknown))}")
        self.splits = any(action.op is Op.W for action in self.actions)
        self._last = {action.stage: action for action in self.actions if action.op in (Op.B, Op.W)}

    def is_last_backward(self, action: Action) -> bool:
        return self._last[action.stage] == action


def _own_stages(schedule: Schedule, rank: int, ranks: int, given: int) -> list[int]:
    """The numbers of this rank's stages."""
    if schedule.pp != ranks:
        raise ScheduleError(
            f"schedule={schedule.name}: is for pp={schedule.pp}, the mesh has pp={ranks}; use that many"
        )
    own = schedule.rank_stages(rank)
    if len(own) != given:
        raise ScheduleError(
            f"schedule={schedule.name}: rank {rank} of the pipeline has stages {own}, but "
            f"{counted(given, 'module')} came; give one module for each stage"
        )
    return own


def _signature(microbatch: Microbatch) -> MicrobatchSpec:
    return tuple(microbatch.tokens_BS.shape), microbatch.documents_BS is not None, torch.is_grad_enabled()


def _tensors(carry: _Receive | StageTensors) -> list[Tensor]:
    assert not isinstance(carry, _Receive)
    return [x for x in carry.values() if x is not None]
