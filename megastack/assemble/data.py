"""The data of a configuration and its later phases, and the data loader of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megastack.config.phases import PhaseConfig, phase_configs
from megastack.config.schema import TrainConfig
from megastack.data.dataset import DataPhase, Dataset, DatasetSpec, Streams, build_dataset
from megastack.data.loader import Loader
from megastack.data.phases import BlendHistories, PhasedLoader, phase_orders
from megastack.data.resume import data_state
from megastack.data.tokenizers import Tokenizer, load_tokenizer
from megastack.errors import DataError


def configured_tokenizer(config: TrainConfig) -> Tokenizer:
    """Load the tokenizer of a configuration, for its data and for prompts.

    Raises:
        DataError: the tokenizer does not exist or cannot be read.
    """
    return load_tokenizer(config.data.tokenizer, allow_special_tokens=config.data.allow_special_tokens)


def read_dataset(config: TrainConfig) -> Dataset:
    """Read the training and validation data of a configuration and its later phases; needs no process group.

    Raises:
        DataError: the data of a phase cannot be used; the message names the first such phase.
    """
    streams: Streams = {}
    first, *later = phase_configs(config)
    data = _read_phase(first.config, streams, require_validation=True)
    return replace(data, later_phases=tuple(_read_later(phase, index, streams) for index, phase in enumerate(later)))


def _read_later(phase: PhaseConfig, index: int, streams: Streams) -> DataPhase:
    try:
        return DataPhase(phase.from_step, _read_phase(phase.config, streams, require_validation=False))
    except DataError as error:
        raise DataError(f"data.phases[{index}], after step {phase.from_step}: {error}") from error


def _read_phase(config: TrainConfig, streams: Streams, *, require_validation: bool) -> Dataset:
    data = config.data
    return build_dataset(
        source=data.source,
        paths=data.paths,
        blend=[DatasetSpec(each.source, each.paths, each.weight) for each in data.blend],
        tokenizer=data.tokenizer,
        allow_special_tokens=data.allow_special_tokens,
        validation_fraction=data.validation_fraction,
        pack=data.pack,
        document_mask=data.document_mask,
        sequence_length=config.batch.sequence_length,
        vocab=config.model.vocab,
        streams=streams,
        require_validation=require_validation,
    )


def build_loader(
    config: TrainConfig, dataset: Dataset, histories: BlendHistories, batch: Mapping[str, int]
) -> Loader | PhasedLoader:
    """Build the loader of a data-parallel rank's microbatches.

    Args:
        config: the configuration of the run.
        dataset: the data.
        histories: the blend weights so far, by phase.
        batch: ``micro_size``, ``dp_rank``, ``dp_size`` and ``vocab``.
    """
    global_size = config.batch.global_size
    orders = phase_orders(dataset, config.seed, histories, global_size)
    parts = [
        Loader(phase.data.train.samples, global_size=global_size, order=order, **batch)
        for phase, order in zip(dataset.phases, orders, strict=True)
    ]
    return PhasedLoader([phase.from_step for phase in dataset.phases], parts) if dataset.later_phases else parts[0]


def identity(config: TrainConfig, dataset: Dataset, histories: BlendHistories = ()) -> dict[str, Any]:
    """Return the values that must not change when a run resumes, since sample order and dropout depend on them."""
    return data_state(dataset, seed=config.seed, global_size=config.batch.global_size, histories=histories)
