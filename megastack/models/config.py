"""The options that a decoder reads, independent of the run that trains it; torch-free.

Example: a model in your own script, without a :class:`~megastack.config.schema.TrainConfig`::

    options = ModelOptions(layers=2, heads=4, hidden=64, ffn=128, vocab=256)
    decoder = Decoder(ModelConfig(model=options), Mesh.single())
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megastack.config.rules import validate_sections
from megastack.config.schema import (
    BatchOptions,
    LossOptions,
    ModelOptions,
    ParallelOptions,
    PrecisionOptions,
    RecomputeOptions,
    RunOptions,
    TrainConfig,
)
from megastack.errors import ConfigError, Violation

READS = (
    *("seed", "model", "loss", "precision.compute", "recompute"),
    *("batch.sequence_length", "parallel.sequence_parallel"),
)
"""The keys of a run that a decoder reads."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model options, and the options of its computation.

    Args:
        model: sizes and layers.
        loss: label smoothing and z-loss.
        precision: ``compute`` is the dtype of activations.
        recompute: the activations that the backward recomputes.
        seed: the seed of dropout.
        sequence_parallel: split hidden states along the sequence over tp, if there are several ranks.
        sequence_length: tokens of the longest sequence; the rows of learned positions if ``model.max_positions`` is
            null, and unused otherwise.
    """

    model: ModelOptions
    loss: LossOptions = field(default_factory=LossOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    seed: int = 0
    sequence_parallel: bool = True
    sequence_length: int | None = None

    @staticmethod
    def of(config: ModelConfig | TrainConfig) -> ModelConfig:
        """The options of a run that a decoder reads; a ModelConfig is returned unchanged."""
        if isinstance(config, ModelConfig):
            return config
        return ModelConfig(
            model=config.model,
            loss=config.loss,
            precision=config.precision,
            recompute=config.recompute,
            seed=config.seed,
            sequence_parallel=config.parallel.sequence_parallel,
            sequence_length=config.batch.sequence_length,
        )

    @staticmethod
    def validated(config: ModelConfig | TrainConfig) -> ModelConfig:
        """The same options, with types and ranges validated.

        Raises:
            ConfigError: a value that a decoder reads is invalid, or learned positions have no number of rows.
        """
        run = config._as_run() if isinstance(config, ModelConfig) else config
        found = ModelConfig.of(validate_sections(run, *READS))
        learned = found.model.positions == "learned" and found.model.max_positions is None
        if learned and isinstance(config, ModelConfig) and config.sequence_length is None:
            rule = "must be set where positions are learned and no sequence_length is given"
            raise ConfigError.of([Violation("model.max_positions", None, rule, ("the longest sequence",))])
        return found

    @property
    def max_positions(self) -> int:
        """Rows of the learned position table."""
        rows = self.model.max_positions or self.sequence_length
        assert rows is not None, "validated"
        return rows

    def _as_run(self) -> TrainConfig:
        """A run configuration with these options, whose keys define types and ranges."""
        length = 1 if self.sequence_length is None else self.sequence_length
        return TrainConfig(
            seed=self.seed,
            run=RunOptions(steps=1),
            batch=BatchOptions(global_size=1, sequence_length=length),
            parallel=ParallelOptions(sequence_parallel=self.sequence_parallel),
            model=self.model,
            loss=self.loss,
            precision=self.precision,
            recompute=self.recompute,
        )
