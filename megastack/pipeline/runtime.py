"""Executes pipeline schedules.

The pipeline runs this rank's action list once per step. A forward reads its inputs from the previous stage (received,
or passed directly if both stages are on this rank), and a backward reads its gradients from the next one. If the
schedule splits backwards, I computes the gradient of the input and W, later, the weight gradients of linear layers. One
rank runs a schedule of one stage, not a separate code path. Nothing here reads a tensor on the host.

The tensors between two stages depend only on the shapes of the microbatch. Before the first output for given shapes, a
stage sends a header with their specs, and the receiver waits for it at first use. From then on receives are posted at
their positions in the schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from megastack.batch import Microbatch, StageLoss
from megastack.comm.backend import backend_of
from megastack.comm.collectives import Pending, all_reduce
from megastack.comm.p2p import P2PChannels
from megastack.errors import ScheduleError, counted
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.pipeline.action import EXECUTED, Action, Op
from megastack.pipeline.check import check
from megastack.pipeline.communication import with_communication
from megastack.pipeline.messages import MAX_POSTED_SENDS, has_communication
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.interleaved import forward_only
from megastack.pipeline.stage import Stage, StageTensors, TensorSpec, leaf
from megastack.weight_gradients import WORTH_ADDING_IN_PLACE, weight_gradient_scope

MicrobatchShape = tuple[tuple[int, ...], bool, bool]
"""The shape of the tokens, whether there are documents, and whether grad is enabled."""
_OutputKey = tuple[int, MicrobatchShape]
"""A stage and the shape of a microbatch, which determine the specs of its outputs."""


@dataclass
class _Receive:
    """A receive of the schedule, for the outputs of a stage or their gradients, and its messages once posted."""

    peer: int
    outputs: _OutputKey
    gradients: bool
    messages: list[tuple[TensorSpec, Pending | None]] | None = None


class Pipeline:
    """This rank's stages and the schedule that drives them.

    Args:
        stages: the modules of this rank's chunks, in the order of their stage numbers.
        schedule: the actions of every rank, as :func:`megastack.pipeline.schedules.registry.build_schedule` returns
            them; sends and receives are added if it lists none.
        mesh: messages travel along ``pp``, the loss is summed over ``pp``, ``dp`` and ``cp``.
        on_last_backward: called right before the last B or W of a chunk in a step, with the index of the chunk in
            ``stages``. The second argument before a W is the set of parameters whose gradients are still pending, all
            others being complete; before a B it is ``None``.

    Attributes:
        current: the action being executed, for failure reports.
        reports: the reported loss sum of each microbatch of the last step, on the last stage's rank.

    Raises:
        ScheduleError: the schedule is for another number of ranks or chunks, or has unsupported actions, or lists
            messages in an order that can deadlock on this device.
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
        self._stages = {index: Stage(module, index) for index, module in zip(own, stages, strict=True)}
        self._chunk_of = {index: chunk for chunk, index in enumerate(own)}
        self._on_last_backward = on_last_backward or (lambda chunk, pending: None)
        backend = backend_of(mesh.device)
        if not backend.wait_blocks_host and has_communication(schedule):
            check(schedule)
        self._receive_lead = backend.receive_lead
        self._program = _Program(schedule, self._axis.rank, self._receive_lead)
        self._forwards: dict[int, _Program] = {}
        self._channels = P2PChannels(self._axis, mesh.backward_channels, mesh.device, max_posted=MAX_POSTED_SENDS)
        self._specs: dict[_OutputKey, list[TensorSpec]] = {}
        self._announced: set[_OutputKey] = set()
        self._peak = 0
        self._reset()

    @property
    def peak(self) -> float:
        """The most activations that this rank has held at once, in microbatches of all its chunks.

        :func:`megastack.pipeline.check.check` predicts it.
        """
        return self._peak / self.schedule.chunks

    def connect(self) -> int:
        """Create the communicators of the channels to other ranks; called on all ranks of the pipeline.

        Returns:
            The number of ranks with which this rank exchanges messages.
        """
        own = self._axis.rank
        pairs = pairwise(self._rank_of(stage) for stage in range(self.schedule.stages))
        peers = {rank for pair in pairs if own in pair for rank in pair} - {own}
        self._channels.connect(peers)
        return len(peers)

    def run(
        self, microbatches: Sequence[Microbatch], denominator: Tensor | float, *, loss_scale: Tensor | None = None
    ) -> Tensor:
        """Run forward and backward of one step.

        Gradients of ``sum of objectives / denominator`` are accumulated in the parameters;
        :class:`megastack.gradients.buckets.GradientBuckets` reduces them.

        Args:
            microbatches: the microbatches of this ``dp`` coordinate, as many as the schedule has.
            denominator: the number of valid tokens in the whole step, over ``dp``, ``cp`` and microbatches.
            loss_scale: multiplies the gradients, not the returned loss.

        Returns:
            The reported loss divided by ``denominator``, a scalar identical on every rank.
        """
        if len(microbatches) != self.schedule.microbatches:
            expected = counted(self.schedule.microbatches, "microbatch", "microbatches")
            raise ScheduleError(f"expected {expected} (from the schedule), got {len(microbatches)}")
        scale = 1.0 / torch.clamp(self._scalar(denominator), min=1.0)
        self._execute(self._program, microbatches, scale if loss_scale is None else scale * loss_scale)
        return self._total() * scale

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run only forwards, for any number of microbatches.

        Returns:
            The sum of their reported losses over all ``dp`` coordinates, on every rank.
        """
        self._forward_only(microbatches)
        return self._total()

    @torch.no_grad()
    def infer(self, microbatches: Sequence[Microbatch]) -> list[Any]:
        """Run only forwards, with a last stage that returns something other than a loss.

        Returns:
            The output of the last stage for each microbatch, on its ranks; empty on the others.
        """
        self._forward_only(microbatches)
        return [self._results[number] for number in sorted(self._results)]

    def _forward_only(self, microbatches: Sequence[Microbatch]) -> None:
        plan, count = self.schedule, len(microbatches)
        if count not in self._forwards:
            forwards = forward_only(plan.pp, plan.chunks, count, stage_ranks=plan.stage_ranks)
            self._forwards[count] = _Program(forwards, self._axis.rank, self._receive_lead)
        self._execute(self._forwards[count], microbatches, self._scalar(1.0))

    def _scalar(self, value: Tensor | float) -> Tensor:
        """An fp64 scalar on the device; a number is written there by a kernel, without a copy that blocks the host."""
        device = self.mesh.device
        if isinstance(value, Tensor):
            return value.to(device, torch.float64)
        return torch.full((), float(value), dtype=torch.float64, device=device)

    def _rank_of(self, stage: int) -> int:
        return self.schedule.stage_rank(stage) if 0 <= stage < self.schedule.stages else -1

    def _reset(self) -> None:
        """Reset the state of a step, including one that raised."""
        self._inputs: dict[tuple[int, int], _Receive | StageTensors] = {}
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
        self._reset()
        self._microbatches = microbatches
        self._shapes = [_shape_of(microbatch) for microbatch in microbatches]
        self._scale = scale
        with weight_gradient_scope(min_elements=0 if program.splits else WORTH_ADDING_IN_PLACE):
            for self.current in program.actions:
                self.mesh.observer.on_action(self.current)
                self._dispatch(self.current, program)
        self._channels.finish()
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
                    self._on_last_backward(self._chunk_of[stage], self._stages[stage].pending_parameters(number))
                self._stages[stage].backward_weights(number)
            case Op.SEND_F:
                self._send(stage, number)
            case Op.SEND_B:
                self._send_gradients(stage, number)
            case Op.RECV_F:
                self._inputs[stage, number] = self._receive(stage - 1, stage - 1, number)
            case Op.RECV_B:
                self._gradients[stage, number] = self._receive(stage + 1, stage, number, gradients=True)

    # Forward: the output goes to the next stage or into the loss.

    def _forward(self, index: int, number: int) -> None:
        inputs = self._received(self._inputs.pop((index, number), {}))
        output = self._stages[index].forward(inputs, self._microbatches[number], number)
        self._peak = max(self._peak, sum(stage.live for stage in self._stages.values()))
        if isinstance(output, StageLoss):
            self.reports[number] = output.report.detach()
            self._sum += self.reports[number]
            self._gradients[index, number] = {"objective": self._scale.to(output.objective.dtype)}
            return
        if index == self.schedule.stages - 1:
            self._results[number] = output
            return
        self._check_specs((index, self._shapes[number]), output)
        if self._rank_of(index + 1) == self._axis.rank:
            output = {name: leaf(x, x is not None and x.requires_grad) for name, x in output.items()}
        self._inputs[index + 1, number] = output

    def _check_specs(self, key: _OutputKey, output: StageTensors) -> None:
        """Store the specs of an output, which must be the same for every microbatch of the same shape."""
        specs = [TensorSpec.of(name, x) for name, x in output.items()]
        known = self._specs.setdefault(key, specs)
        if specs != known:
            before, now = ("; ".join(map(str, side)) for side in (known, specs))
            raise ScheduleError(
                f"stage {key[0]} returned ({before}) for one microbatch and ({now}) for another of the same shape; "
                "the tensors that blocks name in boundary() may only depend on the shape of a microbatch"
            )

    def _send(self, index: int, number: int) -> None:
        """``SEND_F`` of a stage: its output, after a header with the specs if the receiver does not know them."""
        peer, key = self._rank_of(index + 1), (index, self._shapes[number])
        header = None if key in self._announced else [asdict(spec) for spec in self._specs[key]]
        self._announced.add(key)
        output = _tensors(self._inputs.pop((index + 1, number)))
        self._channels.send([x.detach() for x in output], peer, header=header)

    # Backward: the gradients of the inputs go to the previous stage.

    def _backward(
        self, index: int, number: int, run: Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        gradients = self._received(self._gradients.pop((index, number), {}))
        produced = run(number, {name: g for name, g in gradients.items() if g is not None})
        if index > 0:
            self._gradients[index - 1, number] = produced

    def _send_gradients(self, index: int, number: int) -> None:
        self._channels.send(_tensors(self._gradients.pop((index - 1, number))), self._rank_of(index - 1))

    # Receives from a peer are posted in the order of the schedule, once their specs are known.

    def _receive(self, neighbour: int, before: int, number: int, *, gradients: bool = False) -> _Receive:
        """A receive from a neighbouring stage; ``before`` is the earlier of the two stages."""
        receive = _Receive(self._rank_of(neighbour), (before, self._shapes[number]), gradients)
        queue = self._unposted[receive.peer]
        queue.append(receive)
        while queue and queue[0].outputs in self._specs:
            self._post(queue.popleft())
        return receive

    def _received(self, value: _Receive | StageTensors) -> StageTensors:
        """Wait for the tensors of a receive; tensors from a stage on this rank are returned as they are."""
        if not isinstance(value, _Receive):
            return value
        while value.messages is None:
            self._post(self._unposted[value.peer].popleft())
        return {spec.name: leaf(None if x is None else x.wait(), spec.needs_grad) for spec, x in value.messages}

    def _post(self, receive: _Receive) -> None:
        if receive.outputs not in self._specs:
            assert not receive.gradients, "gradients of an output that does not exist"
            header = self._channels.receive_header(receive.peer, receive.outputs)
            self._specs[receive.outputs] = [TensorSpec.from_record(record) for record in header]
        specs = [spec for spec in self._specs[receive.outputs] if spec.needs_grad or not receive.gradients]
        receive.messages = [(spec, self._post_tensor(spec, receive.peer)) for spec in specs]

    def _post_tensor(self, spec: TensorSpec, peer: int) -> Pending | None:
        return None if spec.shape is None else self._channels.receive(spec.shape, spec.torch_dtype, peer)


class _Program:
    """The actions of a rank, communication included."""

    def __init__(self, schedule: Schedule, rank: int, receive_lead: int) -> None:
        complete = schedule if has_communication(schedule) else with_communication(schedule, receive_lead=receive_lead)
        self.actions = complete.ranks[rank]
        unknown = {str(action.op) for action in self.actions if action.op not in EXECUTED}
        if unknown:
            raise ScheduleError(f"schedule={schedule.name}: the runtime does not execute {', '.join(sorted(unknown))}")
        self.splits = any(action.op is Op.W for action in self.actions)
        self._last = {action.stage: action for action in self.actions if action.op in (Op.B, Op.W)}

    def is_last_backward(self, action: Action) -> bool:
        return self._last[action.stage] == action


def _own_stages(schedule: Schedule, rank: int, ranks: int, given: int) -> list[int]:
    """The global numbers of this rank's stages."""
    if schedule.pp != ranks:
        raise ScheduleError(
            f"schedule={schedule.name}: is for pp={schedule.pp}, the mesh has pp={ranks}; use a schedule for pp={ranks}"
        )
    own = schedule.rank_stages(rank)
    if len(own) != given:
        raise ScheduleError(
            f"schedule={schedule.name}: rank {rank} of the pipeline has stages {own}, got {counted(given, 'module')}; "
            "pass one module for each stage"
        )
    return own


def _shape_of(microbatch: Microbatch) -> MicrobatchShape:
    return tuple(microbatch.tokens_BS.shape), microbatch.documents_BS is not None, torch.is_grad_enabled()


def _tensors(named: _Receive | StageTensors) -> list[Tensor]:
    assert not isinstance(named, _Receive)
    return [x for x in named.values() if x is not None]
