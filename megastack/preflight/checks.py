"""Everything that stands against a training before it starts, found together and said once.

A configuration that breaks a rule may have other errors that only its model or its data can tell.
:class:`ErrorCollector` collects them: each check names the keys that it depends on and is skipped where one of them is
invalid, for its answer would only follow from that. Nothing here starts or writes anything.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from megastack.assemble.data import configured_tokenizer, read_dataset
from megastack.assemble.optimizer import moment_kinds
from megastack.checkpoint.manifest import read_manifest
from megastack.config.convert import InvalidValueError, replace_values, value_of
from megastack.config.fields import keys
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import RecomputeOptions, TrainConfig
from megastack.data.dataset import Dataset, DatasetSpec
from megastack.data.sources import read_documents
from megastack.data.token_files import TokenFile, id_violations, open_token_files
from megastack.data.tokenizers import check_vocab
from megastack.errors import ConfigError, ErrorLine, MegastackError, Violation
from megastack.gradients.parameter_groups import check_patterns
from megastack.mesh.mesh import Mesh
from megastack.models.decoder import Decoder
from megastack.models.recompute import recompute_blocks_
from megastack.models.targets import import_target
from megastack.placement.module import buffer_placements_of, check_buffers, placements_of

T = TypeVar("T")

NAMED = 3
"""Parameters that do not fit are named, up to so many."""
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Every kind of moment that a checkpoint can have."""
LAYERS = ("model.attention", "model.mlp", "model.block")
STAND_INS = {"model.vocab": 256, "batch.sequence_length": 1, "model.max_positions": None}
"""Values that the names and placements of a model do not depend on, taken where its own are broken."""
BUILT_FROM = tuple(key.name for key in keys(TrainConfig) if key.name.startswith("model.") and key.name not in STAND_INS)
"""Keys without which there is no model to look at."""


class ErrorCollector:
    """Faults as they are found.

    Args:
        broken: those that are known from the start.

    Attributes:
        found: all so far.
    """

    def __init__(self, broken: Iterable[ErrorLine] = ()) -> None:
        self.found = list(broken)
        self._broken = {error.key.partition("[")[0] for error in self.found if isinstance(error, Violation)}

    def broken(self, *names: str) -> bool:
        """Whether one of these keys, a part of it or what it is part of was broken from the start."""
        return any(
            name == key or name.startswith(key + ".") or key.startswith(name + ".")
            for name in names
            for key in self._broken
        )

    def ask(self, question: Callable[[], T], *names: str) -> T | None:
        """The answer; None, and a fault more, where it is a refusal; None where one of the keys is broken."""
        if self.broken(*names):
            return None
        try:
            return question()
        except InvalidValueError:
            return None
        except ConfigError as error:
            self._add(error.errors)
        except (MegastackError, OSError) as error:
            self._add([str(error)])
        return None

    def _add(self, errors: Iterable[ErrorLine]) -> None:
        """Add faults, each once: several questions may meet the same one."""
        known = {str(error) for error in self.found}
        self.found += [error for error in errors if str(error) not in known]

    def separately(self) -> ErrorCollector:
        """A collection of its own that knows the same keys to be broken."""
        other = ErrorCollector()
        other._broken = self._broken
        return other

    def require_none(self) -> None:
        """Nothing where there are none.

        Raises:
            ConfigError: all of them.
        """
        if self.found:
            raise ConfigError.of(self.found)


def ask_data(config: TrainConfig, errors: ErrorCollector) -> Dataset | None:
    """The data of a configuration; where they cannot be used, what each part has against it."""
    whole, parts = errors.separately(), errors.separately()
    dataset = whole.ask(lambda: read_dataset(config), "data", "batch.sequence_length", "model.vocab")
    if dataset is not None:
        errors.ask(lambda: _check_ids(dataset.files, config))
        return dataset
    ask_parts_of_data(config, parts)
    errors.found += parts.found or whole.found
    return None


def _check_ids(files: Sequence[TokenFile], config: TrainConfig) -> None:
    if found := id_violations(files, config.model.vocab):
        raise ConfigError.of(found)


def ask_parts_of_data(config: TrainConfig, errors: ErrorCollector, skip: Collection[str] = ()) -> None:
    """The tokenizer and every path by itself, those of later stages with the stage; what `skip` names is left out."""
    wanted = errors.ask(lambda: _first_sources(config), "data.source", "data.blend")
    if wanted and any(each.source != "bin" for each in wanted):
        _ask_tokenizer(config, errors, skip)
    files: dict[str, TokenFile] = {}
    if not errors.broken("data.paths"):
        _ask_paths(wanted or (), errors, files, skip)
    for at, sources in enumerate(errors.ask(lambda: _later_sources(config)) or ()):
        own = errors.separately()
        _ask_paths(sources, own, files, skip)
        errors.found += [f"data.phases[{at}]: {error}" for error in own.found]
    errors.ask(lambda: _check_ids([*files.values()], config), "model.vocab")


def _ask_tokenizer(config: TrainConfig, errors: ErrorCollector, skip: Collection[str]) -> None:
    if value_of(config, "data.tokenizer") in skip:
        return
    tokenizer = errors.ask(lambda: configured_tokenizer(config), "data.tokenizer")
    if tokenizer is not None:
        errors.ask(lambda: check_vocab(config.model.vocab, tokenizer), "model.vocab")


def _ask_paths(
    sources: Iterable[DatasetSpec], errors: ErrorCollector, files: dict[str, TokenFile], skip: Collection[str] = ()
) -> None:
    """Read each path by itself; token files that can be opened are added to `files`, by name."""
    for each in sources:
        for path in each.paths:
            if str(path) in skip:
                continue
            if each.source == "bin":
                files |= {file.name: file for file in errors.ask(partial(open_token_files, [path])) or ()}
            else:
                errors.ask(partial(_read_through, each.source, path))


def all_sources(config: TrainConfig) -> list[DatasetSpec]:
    """The sources of all stages as they are named, whatever else is wrong with a stage."""
    return [*_first_sources(config), *(each for later in _later_sources(config) for each in later)]


def _first_sources(config: TrainConfig) -> list[DatasetSpec]:
    data = config.data
    return [DatasetSpec(each.source, each.paths) for each in data.blend] or [DatasetSpec(data.source, data.paths)]


def _later_sources(config: TrainConfig) -> list[list[DatasetSpec]]:
    """What each later stage names itself, which is there or not whatever else is wrong with the stage."""
    found, kind = [], config.data.source
    for stage in config.data.phases:
        kind = kind if stage.source is None else stage.source
        blend = [DatasetSpec(each.source, each.paths) for each in stage.blend or ()]
        found.append(blend or ([DatasetSpec(kind, stage.paths)] if stage.paths else []))
    return found


def _read_through(source: str, path: str | Path) -> None:
    for _ in read_documents(source, [path]):
        pass


@dataclass(frozen=True)
class ModelShapes:
    """The global shapes of a model's parameters and persistent buffers, by name."""

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]

    @property
    def all(self) -> dict[str, tuple[int, ...]]:
        """Both."""
        return {**self.parameters, **self.buffers}


def ask_model(config: TrainConfig, errors: ErrorCollector) -> ModelShapes | None:
    """Build the whole model once, as one rank and without values, for what only its modules and their names can tell.

    Returns:
        Its shapes; None where there is no such model, or a size in it is not known.
    """
    before = len(errors.found)
    for key in LAYERS:
        errors.ask(partial(_find_layer, config, key), key)
    if len(errors.found) > before:
        return None
    model = errors.ask(lambda: _model(config, errors), *BUILT_FROM)
    if model is None:
        return None
    placements = errors.ask(lambda: placements_of(model))
    names = {name for name, _ in model.named_parameters()}
    errors.ask(lambda: _check_freeze(config.optim.freeze, names), "optim.freeze")
    errors.ask(lambda: check_patterns("optim.groups", [g.pattern for g in config.optim.groups], names), "optim.groups")
    errors.ask(lambda: _check_recompute(config.recompute, model), "recompute")
    errors.ask(lambda: _check_scalars(config, model), "parallel")
    if placements is None:
        return None
    errors.ask(lambda: check_buffers(model))
    if errors.broken(*STAND_INS):
        return None
    buffers = {name: placement.shape for name, placement in buffer_placements_of(model).items()}
    return ModelShapes({name: placement.shape for name, placement in placements.items()}, buffers)


def _find_layer(config: TrainConfig, key: str) -> None:
    if (spec := value_of(config, key)) is not None:
        import_target(key, spec)


def _model(config: TrainConfig, errors: ErrorCollector) -> Decoder | None:
    """None where megastack's own code breaks without refusing anything: that is for the ranks and their traceback."""
    values = {key: value for key, value in STAND_INS.items() if errors.broken(key)}
    config = replace_values(config, values | {"recompute": RecomputeOptions()})
    try:
        with torch.device("meta"):
            return Decoder(config, Mesh.single())
    except (MegastackError, InvalidValueError):
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("left to the ranks: %s", error)
        return None


def _check_freeze(patterns: Sequence[str], names: set[str]) -> None:
    check_patterns("optim.freeze", patterns, names)
    if all(any(re.search(pattern, name) for pattern in patterns) for name in names):
        advice = ("patterns that leave some to train",)
        raise ConfigError.of([Violation("optim.freeze", patterns, "freezes every parameter", advice)])


def _check_recompute(options: RecomputeOptions, model: Decoder) -> None:
    blocks = dict(model.blocks.items())
    recompute_blocks_(blocks, options.mode, options.pattern, layers=len(blocks))


def _check_scalars(config: TrainConfig, model: Decoder) -> None:
    """Nothing where ZeRO leaves parameters whole, or none of them is a scalar."""
    zero, shape = config.parallel.zero, mesh_shape(config)
    if zero.stage < 2 or (zero.shard_size or shape.dp * shape.cp) == 1:
        return
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
        rule = f"{', '.join(scalars)}: a scalar cannot be cut over data ranks"
        raise ConfigError.of([Violation("parallel.zero.stage", zero.stage, rule, (0, 1, "declare it with shape (1,)"))])


def check_fit(key: str, path: Path, model: ModelShapes | None, strict: bool) -> None:
    """Nothing where the parameters and buffers of a checkpoint are those of the model; dtypes are left to the ranks.

    Args:
        key: what named the checkpoint.
        path: its folder.
        model: from :func:`ask_model`; None is not compared.
        strict: whether both must have the same names.

    Raises:
        ConfigError: they are not.
        CheckpointError: the checkpoint cannot be read.
    """
    if model is None:
        return
    shapes, stored = model.all, _stored("model", path)
    unlike = [
        f"{name} is {list(shape)} here and {list(stored[name])} there"
        for name, shape in shapes.items()
        if name in stored and tuple(shape) != tuple(stored[name])
    ]
    if strict:
        unlike += [f"{name} is not there" for name in shapes if name not in stored]
        unlike += [f"{name} is only there" for name in stored if name not in shapes]
    if unlike:
        rule = f"does not fit the model: {_first(unlike)}"
        raise ConfigError.of([Violation(key, path, rule, ("the model.* of its run",))])


def check_moments(path: Path, model: ModelShapes | None, config: TrainConfig) -> None:
    """Nothing where a checkpoint has the moments of exactly the parameters that are trained, for a strict resume.

    Args:
        path: its folder.
        model: from :func:`ask_model`; None is not compared.
        config: names the optimizer, and what is frozen.

    Raises:
        ConfigError: it has not.
        CheckpointError: the checkpoint cannot be read.
    """
    if model is None or not all(map(_is_pattern, config.optim.freeze)):
        return
    trained = {
        name for name in model.parameters if not any(re.search(pattern, name) for pattern in config.optim.freeze)
    }
    kinds, unlike = moment_kinds(config), []
    for kind in MOMENTS:
        stored, wanted = _stored(f"optim/{kind}", path), trained if kind in kinds else set()
        unlike += [f"{name} has no {kind} there" for name in model.parameters if name in wanted - stored.keys()]
        unlike += [
            f"{name} has {kind} only there" for name in stored if name not in wanted and name in model.parameters
        ]
    if unlike:
        advice = ("the optim.* of its run", "checkpoint.strict=false, which starts what is missing afresh")
        broken = f"does not fit what is trained: {_first(unlike)}"
        raise ConfigError.of([Violation("resume", path, broken, advice)])


def _is_pattern(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _stored(prefix: str, path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of what a checkpoint has under a prefix, by the rest of the name."""
    tensors = read_manifest(path).tensors
    return {n.removeprefix(f"{prefix}/"): x.shape for n, x in tensors.items() if n.startswith(f"{prefix}/")}


def _first(errors: Sequence[str]) -> str:
    """The first few of many."""
    return ", ".join(errors[:NAMED]) + (f", and {len(errors) - NAMED} more" if len(errors) > NAMED else "")
