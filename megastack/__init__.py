"""Train Transformers over a grid of data, tensor and pipeline parallel ranks.

Public names are imported lazily, so the parts that do not need torch do not load it: ``from megastack import
MeshShape`` does not import torch, ``from megastack import Decoder`` does. ``__all__`` lists the main public names
(``docs/api.md``); the types in their signatures are imported in the same way.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megastack.batch import Microbatch as Microbatch
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
    from megastack.config.schema import ModelOptions as ModelOptions
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
    from megastack.launch.run import train as train
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
    from megastack.models.config import ModelConfig as ModelConfig
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

_PUBLIC = {
    "checkpoint.load": "load",
    "checkpoint.reader": "CheckpointReader",
    "checkpoint.save": "save",
    "checkpoint.state": "State StateItem",
    "config.compose": "compose",
    "errors": "MegastackError",
    "gradients.buckets": "GradientBuckets",
    "gradients.norm": "clip_gradients_ grad_norm",
    "launch.run": "train",
    "layers.attention": "ParallelAttention",
    "layers.embedding": "VocabParallelEmbedding",
    "layers.linear": "ColumnParallelLinear RowParallelLinear",
    "layers.loss": "vocab_parallel_cross_entropy",
    "layers.mlp": "ParallelMLP",
    "layers.norm": "LayerNorm RMSNorm",
    "mesh.mesh": "Mesh",
    "mesh.shape": "Axis MeshShape",
    "models.config": "ModelConfig",
    "models.decoder": "Decoder",
    "pipeline.check": "check",
    "pipeline.render": "render",
    "pipeline.runtime": "Pipeline",
    "pipeline.schedules.registry": "build_schedule register_schedule",
    "pipeline.simulate": "Costs simulate",
    "placement.module": "ParallelModule",
    "placement.placement": "Normal Ones Placement Shard Zeros",
    "testing.parity": "assert_parity",
    "testing.ranks": "run_ranks",
    "training.state": "Hooks",
}
_TYPES = {
    "batch": "Microbatch",
    "checkpoint.load": "LoadReport",
    "checkpoint.save": "SaveHandle",
    "comm.group": "AxisGroup",
    "comm.traffic": "Ledger Traffic",
    "config.rules": "violations",
    "config.schema": "ModelOptions TrainConfig",
    "errors": "CheckpointError ConfigError DataError MeshError PlacementError ScheduleError Violation",
    "pipeline.action": "Action",
    "pipeline.check": "CheckReport",
    "pipeline.schedule": "Schedule",
    "pipeline.simulate": "Timeline",
    "placement.boxes": "Box local_box range_boxes",
    "random": "counter_normal",
    "training.state": "RunResult",
}


def _names(table: dict[str, str]) -> dict[str, str]:
    return {name: module for module, names in table.items() for name in names.split()}


_HOMES = _names(_PUBLIC) | _names(_TYPES)

__all__ = sorted(_names(_PUBLIC))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megastack' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megastack.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
