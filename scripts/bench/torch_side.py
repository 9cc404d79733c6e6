"""Torch's side: the combination that its documentation recommends for a layout, from megastack's initial values.

A plain loop; DDP or FSDP2 over ``dp``; DDP with ``ZeroRedundancyOptimizer`` for ZeRO level 1; DTensor plans with
sequence and loss parallelism over ``tp``; ``torch.distributed.pipelining`` over ``pp``. Depending on the layout, FSDP2
keeps parameters unsharded from the first forward of a step to its last backward, or reshards them after each forward
and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from bench.task import BETAS, DECAY, RATE, Layout, configuration
from bench.torch_model import Model, cross_entropy, load
from megastack.assemble.stages import build_stages
from megastack.batch import Microbatch
from megastack.config.layout_rules import mesh_shape
from megastack.mesh.mesh import Mesh
from megastack.models.stages import configured_schedule, stage_slices

ADAMW: dict[str, Any] = {"lr": RATE, "betas": BETAS, "fused": True}


class Torch:
    """Torch's parallelism on the same layout; ``microbatches`` returns the data of a step.

    With ``compiles`` each block is compiled by ``torch.compile``.
    """

    def __init__(
        self, layout: Layout, microbatches: Callable[[int], list[Microbatch]], *, compiles: bool = False
    ) -> None:
        self._microbatches = microbatches
        self._mesh = _mesh(layout)
        model = self._stage_model(layout)
        for block in model.blocks.values() if compiles else ():
            block.compile()
        if layout.tp > 1:
            parallelize_module(model, self._mesh["tp"], _plan(model))
        self._keep = layout.zero >= 2 and layout.gather == "step"
        self._model = self._data_parallel(model, layout)
        self._optimizer = self._make_optimizer(layout)
        self._loss_context = loss_parallel if layout.tp > 1 else contextlib.nullcontext
        self._schedule = self._pipeline(layout) if layout.pp > 1 else None

    def step(self, number: int) -> Tensor | None:
        """Train on the batch of a step; this rank's part of the mean loss, None if it has none."""
        batch = self._microbatches(number)
        loss = self._accumulate(batch) if self._schedule is None else self._run_pipeline(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _accumulate(self, batch: list[Microbatch]) -> Tensor:
        total = torch.zeros(())
        for number, micro in enumerate(batch):
            with self._sync_when(number == len(batch) - 1), self._loss_context():
                loss = cross_entropy(self._model(micro.tokens_BS), micro.labels_BS)
                (loss / len(batch)).backward()
            total += _whole(loss.detach())
        return total / len(batch)

    def _run_pipeline(self, batch: list[Microbatch]) -> Tensor | None:
        assert self._schedule is not None
        losses: list[Tensor] = []
        tokens = (torch.cat([micro.tokens_BS for micro in batch]),) if self._first else ()
        labels = {"target": torch.cat([micro.labels_BS for micro in batch]), "losses": losses} if self._last else {}
        with self._loss_context():
            self._schedule.step(*tokens, **labels, return_outputs=False)
        return sum(_whole(loss.detach()) for loss in losses) / len(batch) if losses else None

    def _sync_when(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Reduce gradients after the last microbatch only."""
        if isinstance(self._model, DistributedDataParallel) and not last:
            return self._model.no_sync()
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last)
            self._model.set_reshard_after_backward(last or not self._keep)
        return contextlib.nullcontext()

    def _stage_model(self, layout: Layout) -> Model:
        config = configuration(layout)
        shape = mesh_shape(config)
        rank = dist.get_rank() if layout.world_size > 1 else 0
        self._stage = shape.coordinates(rank)["pp"]
        self._first, self._last = self._stage == 0, self._stage == layout.pp - 1
        layers = stage_slices(config, layout.pp)[self._stage].layers
        model = Model(config.model, config.batch.sequence_length, layers)
        load(model, initial_values(layout.alone))
        return model

    def _data_parallel(self, model: Model, layout: Layout) -> nn.Module:
        if layout.dp == 1:
            return model
        if layout.kind in ("ddp", "zero_redundancy"):
            return DistributedDataParallel(
                model, process_group=self._mesh["dp"].get_group(), gradient_as_bucket_view=True
            )
        for block in model.blocks.values():
            fully_shard(block, mesh=self._mesh["dp"], reshard_after_forward=not self._keep)
        return fully_shard(model, mesh=self._mesh["dp"])

    def _make_optimizer(self, layout: Layout) -> torch.optim.Optimizer:
        groups = decay_groups(self._model)
        if layout.kind != "zero_redundancy":
            return torch.optim.AdamW(groups, **ADAMW)
        group = self._mesh["dp"].get_group()
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, process_group=group, **ADAMW)

    def _pipeline(self, layout: Layout) -> Schedule1F1B:
        group = self._mesh["pp"].get_group()
        stage = PipelineStage(self._model, self._stage, layout.pp, torch.device("cpu"), group=group)
        batch = configuration(layout).batch
        return Schedule1F1B(stage, batch.global_size // batch.micro_size // layout.dp, loss_fn=cross_entropy)


def _mesh(layout: Layout) -> DeviceMesh | None:
    if layout.world_size == 1:
        return None
    return init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))


def initial_values(alone: Layout) -> dict[str, Tensor]:
    """Megastack's initial values of every parameter, unsharded."""
    config = configuration(alone)
    mesh = Mesh.single()
    (model,) = build_stages(config, mesh, configured_schedule(config, mesh.shape))
    return dict(model.named_parameters())


def _plan(model: Model) -> dict[str, ParallelStyle]:
    """Tensor and sequence parallelism, with sharded logits."""
    whole, split = Replicate(), Shard(1)
    gather = PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,))
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": gather,
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "blocks.*.attention.out": RowwiseParallel(output_layouts=split),
        "blocks.*.mlp_norm": SequenceParallel(),
        "blocks.*.mlp": gather,
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=split),
    }
    if model.embedding is not None:
        for name in ("tokens", "positions"):
            plan[f"embedding.{name}"] = RowwiseParallel(input_layouts=whole, output_layouts=split)
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False)
    return plan


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters with weight decay, and norms and biases without."""
    named = list(model.named_parameters())
    plain = [parameter for name, parameter in named if "norm" in name or "bias" in name]
    decayed = [parameter for name, parameter in named if not ("norm" in name or "bias" in name)]
    return [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
