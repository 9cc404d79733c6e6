"""Train Transformers over a grid of data, tensor and pipeline parallel ranks.

The public names of the package, resolved when they are first used, so that the parts without torch stay without it:
``from megastack import MeshShape`` loads no torch, ``from megastack import Decoder`` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megastack.checkpoint.load import LoadReport as LoadReport
    from megastack.checkpoint.load import load as load
    from megastack.checkpoint.reader import CheckpointReader as CheckpointReader
    from megastack.checkpoint.save import SaveHandle as SaveHandle
    from megastack.checkpoint.save import save as save
    from megastack.checkpoint.state import State as State
    from megastack.checkpoint.state import StateItem as StateItem
    from megastack.comm.group import AxisGroup as AxisGroup
    from megastack.comm.traffic import Ledger as Ledger
    from megastack.comm.traffic import Traffic as Traffic
    from megastack.config.compose import compose as compose
    from megastack.config.rules import violations as violations
    from megastack.config.schema import TrainConfig as TrainConfig
    from megastack.errors import CheckpointError as CheckpointError
    from megastack.errors import ConfigError as ConfigError
    from megastack.errors import DataError as DataError
    from megastack.errors import MegastackError as MegastackError
    from megastack.errors import MeshError as MeshError
    from megastack.errors import PlacementError as PlacementError
    from megastack.errors import ScheduleError as ScheduleError
    from megastack.errors import Violation as Violation
    from megastack.gradients.buckets import GradientBuckets as GradientBuckets
    from megastack.gradients.norm import clip_gradients_ as clip_gradients_
    from megastack.gradients.norm import grad_norm as grad_norm
    from megastack.launch.command import train as train
    from megastack.layers.attention import ParallelAttention as ParallelAttention
    from megastack.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from megastack.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from megastack.layers.linear import RowParallelLinear as RowParallelLinear
    from megastack.layers.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from megastack.layers.mlp import ParallelMLP as ParallelMLP
    from megastack.layers.norm import LayerNorm as LayerNorm
    from megastack.layers.norm import RMSNorm as RMSNorm
    from megastack.mesh.mesh import Mesh as Mesh
    from megastack.mesh.shape import Axis as Axis
    from megastack.mesh.shape import MeshShape as MeshShape
    from megastack.models.decoder import Decoder as Decoder
    from megastack.pipeline.action import Action as Action
    from megastack.pipeline.check import CheckReport as CheckReport
    from megastack.pipeline.check import check as check
    from megastack.pipeline.render import render as render
    from megastack.pipeline.runtime import Pipeline as Pipeline
    from megastack.pipeline.schedule import Schedule as Schedule
    from megastack.pipeline.schedules.registry import build_schedule as build_schedule
    from megastack.pipeline.schedules.registry import register_schedule as register_schedule
    from megastack.pipeline.simulate import Costs as Costs
    from megastack.pipeline.simulate import Timeline as Timeline
    from megastack.pipeline.simulate import simulate as simulate
    from megastack.placement.boxes import Box as Box
    from megastack.placement.boxes import local_box as local_box
    from megastack.placement.boxes import range_boxes as range_boxes
    from megastack.placement.module import ParallelModule as ParallelModule
    from megastack.placement.placement import Normal as Normal
    from megastack.placement.placement import Ones as Ones
    from megastack.placement.placement import Placement as Placement
    from megastack.placement.placement import Shard as Shard
    from megastack.placement.placement import Zeros as Zeros
    from megastack.random import counter_normal as counter_normal
    from megastack.testing.parity import assert_parity as assert_parity
    from megastack.testing.ranks import run_ranks as run_ranks
    from megastack.training.state import Hooks as Hooks
    from megastack.training.state import RunResult as RunResult

_NAMES = {
    "checkpoint.state": "State StateItem",
    "checkpoint.load": "LoadReport load",
    "checkpoint.reader": "CheckpointReader",
    "checkpoint.save": "SaveHandle save",
    "comm.group": "AxisGroup",
    "comm.traffic": "Ledger Traffic",
    "config.compose": "compose",
    "config.rules": "violations",
    "config.schema": "TrainConfig",
    "errors": "CheckpointError ConfigError DataError MegastackError MeshError PlacementError ScheduleError Violation",
    "gradients.buckets": "GradientBuckets",
    "gradients.norm": "clip_gradients_ grad_norm",
    "launch.command": "train",
    "layers.attention": "ParallelAttention",
    "layers.embedding": "VocabParallelEmbedding",
    "layers.linear": "ColumnParallelLinear RowParallelLinear",
    "layers.loss": "vocab_parallel_cross_entropy",
    "layers.mlp": "ParallelMLP",
    "layers.norm": "LayerNorm RMSNorm",
    "mesh.mesh": "Mesh",
    "mesh.shape": "Axis MeshShape",
    "models.decoder": "Decoder",
    "pipeline.action": "Action",
    "pipeline.check": "CheckReport check",
    "pipeline.render": "render",
    "pipeline.runtime": "Pipeline",
    "pipeline.schedule": "Schedule",
    "pipeline.schedules.registry": "build_schedule register_schedule",
    "pipeline.simulate": "Costs Timeline simulate",
    "placement.boxes": "Box local_box range_boxes",
    "placement.module": "ParallelModule",
    "placement.placement": "Normal Ones Placement Shard Zeros",
    "random": "counter_normal",
    "testing.parity": "assert_parity",
    "testing.ranks": "run_ranks",
    "training.state": "Hooks RunResult",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megastack' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megastack.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
