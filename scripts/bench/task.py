"""The training task of both sides: a small GPT-2-like model on the built-in text, on several layouts.

8 layers, hidden 256, 4 heads, vocabulary 4096, sequence 128, 16 sequences a step in microbatches of 2, AdamW without
clipping, fp32. Only the layout differs, so all comparisons have the same loss curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from megastack.config.compose import compose
from megastack.config.schema import TrainConfig

RATE, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1
_TASK = [
    *("model=gpt2_tiny", "model.layers=8", "model.hidden=256", "model.heads=4", "model.ffn=1024", "model.vocab=4096"),
    *("model.tied=false", "batch.global_size=16", "batch.micro_size=2", "batch.sequence_length=128"),
    *("optim=adamw", f"optim.lr={RATE}", f"optim.weight_decay={DECAY}", f"optim.betas=[{BETAS[0]},{BETAS[1]}]"),
    *("optim.clip_norm=null", "lr=constant", "lr.warmup_steps=0", "data=builtin", "data.document_mask=false"),
    *("precision=fp32", "device=cpu", "run.steps=100000"),
]


_OVER_DP = {
    "ddp": "DDP",
    "zero_redundancy": "DDP + ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
}


@dataclass(frozen=True)
class Layout:
    """One comparison.

    Attributes:
        name: the name in tables and on the command line.
        dp, tp, pp: the parallel degrees.
        kind: the peer's data parallelism: ``ddp``, ``zero_redundancy``, ``fsdp2`` or ``deepspeed``.
        zero: the ZeRO level of both sides.
        gather, reduce: how often both sides gather parameters and reduce gradients at levels 2 and 3: once per
            ``step``, or for each ``microbatch``. DeepSpeed always reduces for each microbatch.
        changes: overrides of the task (in tests).
    """

    name: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    kind: str = "ddp"
    zero: int = 0
    gather: str = "step"
    reduce: str = "step"
    schedule: str = "1f1b"
    changes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def alone(self) -> Layout:
        """The same task on one rank."""
        return Layout("single", changes=self.changes)

    @property
    def blocks(self) -> str:
        """The components of the peer."""
        parts = {_OVER_DP[self.kind]: self.dp, "DTensor sp+loss": self.tp, "1F1B": self.pp}
        return " + ".join(part for part, degree in parts.items() if degree > 1) or "plain loop"

    @property
    def is_available(self) -> bool:
        """Whether the components of the peer are installed."""
        return self.kind != "deepspeed" or find_spec("deepspeed") is not None


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("single"),
        Layout("dp2", dp=2),
        Layout("dp2.zero1", dp=2, kind="zero_redundancy", zero=1),
        Layout("dp2.zero1.deepspeed", dp=2, kind="deepspeed", zero=1),
        Layout("dp2.zero2", dp=2, kind="fsdp2", zero=2),
        Layout("dp2.zero2.deepspeed", dp=2, kind="deepspeed", zero=2, reduce="microbatch"),
        Layout("dp2.zero3", dp=2, kind="fsdp2", zero=3, gather="microbatch"),
        Layout("dp2.zero3.deepspeed", dp=2, kind="deepspeed", zero=3, gather="microbatch", reduce="microbatch"),
        Layout("tp2", tp=2),
        Layout("pp2", pp=2, schedule="zb_h1"),
        Layout("pp2.1f1b", pp=2),
        Layout("tp2.pp2", tp=2, pp=2),
        Layout("dp2.tp2.pp2", dp=2, tp=2, pp=2, kind="fsdp2", zero=1),
    )
}


def configuration(layout: Layout) -> TrainConfig:
    """The configuration of megastack on a layout."""
    degrees = [f"parallel.{axis}={getattr(layout, axis)}" for axis in ("dp", "tp", "pp")]
    degrees.append(f"schedule={layout.schedule}")
    zero = {"stage": layout.zero, "gather": layout.gather, "reduce": layout.reduce}
    return compose(
        [*_TASK, *degrees, *(f"parallel.zero.{key}={value}" for key, value in zero.items()), *layout.changes]
    )
