"""Checks of the data: the tokenizer, every path, and the samples that are cut from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from megastack.assemble.data import configured_tokenizer, read_dataset
from megastack.config.convert import value_of
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset, DatasetSpec
from megastack.data.sources import read_documents
from megastack.data.token_files import TokenFile, id_violations, open_token_files
from megastack.data.tokenizers import check_vocab
from megastack.errors import ConfigError
from megastack.preflight.errors import ErrorCollector


def check_data(config: TrainConfig, errors: ErrorCollector) -> Dataset | None:
    """Read the data of a configuration.

    Args:
        config: the configuration, as far as it could be read.
        errors: collects the errors. If the data as a whole cannot be used, every part is checked separately.

    Returns:
        The data; None if it cannot be used.
    """
    of_all, of_parts = errors.branch(), errors.branch()
    dataset = of_all.check(lambda: read_dataset(config), "data", "batch.sequence_length", "model.vocab")
    if dataset is not None:
        errors.check(lambda: _check_ids(dataset.files, config))
        return dataset
    check_data_parts(config, of_parts)
    errors.found += of_parts.found or of_all.found
    return None


def _check_ids(files: Sequence[TokenFile], config: TrainConfig) -> None:
    if found := id_violations(files, config.model.vocab):
        raise ConfigError.of(found)


def check_data_parts(config: TrainConfig, errors: ErrorCollector, skip: Collection[str] = ()) -> None:
    """Check the tokenizer and each path separately, except values in `skip`; errors in a later phase name the phase."""
    sources = errors.check(lambda: _first_sources(config), "data.source", "data.blend") or []
    if any(each.source != "bin" for each in sources):
        _check_tokenizer(config, errors, skip)
    files: dict[str, TokenFile] = {}
    if not errors.any_invalid("data.paths"):
        _check_paths(sources, errors, files, skip)
    for at, later in enumerate(errors.check(lambda: _later_sources(config)) or ()):
        of_phase = errors.branch()
        _check_paths(later, of_phase, files, skip)
        errors.found += [f"data.phases[{at}]: {error}" for error in of_phase.found]
    errors.check(lambda: _check_ids([*files.values()], config), "model.vocab")


def _check_tokenizer(config: TrainConfig, errors: ErrorCollector, skip: Collection[str]) -> None:
    if value_of(config, "data.tokenizer") in skip:
        return
    tokenizer = errors.check(lambda: configured_tokenizer(config), "data.tokenizer")
    if tokenizer is not None:
        errors.check(lambda: check_vocab(config.model.vocab, tokenizer), "model.vocab")


def _check_paths(
    sources: Iterable[DatasetSpec], errors: ErrorCollector, files: dict[str, TokenFile], skip: Collection[str] = ()
) -> None:
    """Read each path; token files that can be opened are added to `files` by name."""
    for each in sources:
        for path in each.paths:
            if str(path) in skip:
                continue
            if each.source == "bin":
                files |= {file.name: file for file in errors.check(partial(open_token_files, [path])) or ()}
            else:
                errors.check(partial(_read_through, each.source, path))


def all_sources(config: TrainConfig) -> list[DatasetSpec]:
    """Return the sources of all data phases, even if a phase is otherwise invalid."""
    return [*_first_sources(config), *(each for later in _later_sources(config) for each in later)]


def _first_sources(config: TrainConfig) -> list[DatasetSpec]:
    data = config.data
    return [DatasetSpec(each.source, each.paths) for each in data.blend] or [DatasetSpec(data.source, data.paths)]


def _later_sources(config: TrainConfig) -> list[list[DatasetSpec]]:
    """Return the sources that each later data phase names, even if the phase is otherwise invalid."""
    found, kind = [], config.data.source
    for phase in config.data.phases:
        kind = kind if phase.source is None else phase.source
        blend = [DatasetSpec(each.source, each.paths) for each in phase.blend or ()]
        found.append(blend or ([DatasetSpec(kind, phase.paths)] if phase.paths else []))
    return found


def _read_through(source: str, path: str | Path) -> None:
    for _ in read_documents(source, [path]):
        pass
