"""The data of a configuration and of its later stages, and the loader that serves it to one data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megastack.config.phases import PhaseConfig, phase_configs
from megastack.config.schema import TrainConfig
from megastack.data.continuity import identity as data_identity
from megastack.data.dataset import DataPhase, Dataset, DatasetSpec, Streams, build_dataset
from megastack.data.loader import Loader
from megastack.data.phases import BlendHistories, PhasedLoader, phase_orders
from megastack.data.tokenizers import Tokenizer, load_tokenizer
from megastack.errors import DataError


def configured_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of a configuration, for its data and for prompts.

    Raises:
        DataError: there is no such tokenizer.
    """
    return load_tokenizer(config.data.tokenizer, allow_special_tokens=config.data.allow_special_tokens)


def read_dataset(config: TrainConfig) -> Dataset:
    """The training and validation data of a configuration and of its later stages; needs no process group.

    Raises:
        DataError: about the first stage that cannot be used.
    """
    streams: Streams = {}
    first, *later = phase_configs(config)
    data = _read_stage(first.config, streams, scored=True)
    return replace(data, later=tuple(_read_later(stage, at, streams) for at, stage in enumerate(later)))


def _read_later(stage: PhaseConfig, at: int, streams: Streams) -> DataPhase:
    try:
        return DataPhase(stage.from_step, _read_stage(stage.config, streams, scored=False))
    except DataError as error:
        raise DataError(f"data.phases[{at}], after step {stage.from_step}: {error}") from error


def _read_stage(config: TrainConfig, streams: Streams, *, scored: bool) -> Dataset:
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
        read=streams,
        scored=scored,
    )


def build_loader(
    config: TrainConfig, dataset: Dataset, histories: BlendHistories, batch: Mapping[str, int]
) -> Loader | PhasedLoader:
    """What serves a data-parallel rank its microbatches.

    Args:
        config: the run's.
        dataset: its data.
        histories: the weights of blends so far, by stage.
        batch: ``micro_size``, ``dp_rank``, ``dp_size`` and ``vocab``.
    """
    global_size = config.batch.global_size
    orders = phase_orders(dataset, config.seed, histories, global_size)
    parts = [
        Loader(stage.data.train.samples, global_size=global_size, order=order, **batch)
        for stage, order in zip(dataset.stages, orders, strict=True)
    ]
    return PhasedLoader([stage.from_step for stage in dataset.stages], parts) if dataset.later else parts[0]


def identity(config: TrainConfig, dataset: Dataset, histories: BlendHistories = ()) -> dict[str, Any]:
    """What has to stay as it is from a run to its resume, since sample order and dropout follow from it."""
    return data_identity(dataset, seed=config.seed, global_size=config.batch.global_size, histories=histories)
