"""DeepSpeed's side: its engine with torch's model, ZeRO levels 1 to 3, fp32, without clipping.

Needs the package ``deepspeed``. The engine uses the existing process group; settings that are not listed below are its
defaults. Its shared-memory reduction, which is used only for inference, is not compiled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.task import Layout, configuration
from bench.torch_model import Model, cross_entropy, load
from bench.torch_side import ADAMW, decay_groups, initial_values
from megastack.batch import Microbatch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")

import deepspeed
from deepspeed.utils import logger


class DeepSpeed:
    """The engine on data-parallel ranks; ``microbatches`` returns the data of a step."""

    def __init__(self, layout: Layout, microbatches: Callable[[int], list[Microbatch]]) -> None:
        assert layout.dp == layout.world_size > 1, "ZeRO levels are compared on data-parallel ranks only"
        self._microbatches = microbatches
        logger.setLevel(logging.ERROR)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        config = configuration(layout)
        model = Model(config.model, config.batch.sequence_length, range(config.model.layers))
        load(model, initial_values(layout.alone))
        optimizer = torch.optim.AdamW(decay_groups(model), **ADAMW)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_settings(layout))

    def step(self, number: int) -> Tensor:
        """Train on the batch of a step; this rank's part of the mean loss before the update."""
        batch = self._microbatches(number)
        total = torch.zeros(())
        for micro in batch:
            loss = cross_entropy(self._engine(micro.tokens_BS), micro.labels_BS)
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach()
        return total / len(batch)


def _settings(layout: Layout) -> dict[str, Any]:
    batch = configuration(layout).batch
    return {
        "train_batch_size": batch.global_size,
        "train_micro_batch_size_per_gpu": batch.micro_size,
        "gradient_accumulation_steps": batch.global_size // batch.micro_size // layout.dp,
        "gradient_clipping": 0.0,  # the default is 1.0
        "zero_optimization": {"stage": layout.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
