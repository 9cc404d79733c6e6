"""What can be found wrong before any rank starts: data, resume path, run folder.

Runs once, in the launcher or on the first rank. It touches nothing until everything else was found right; taking the
run folder comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megastack.build import read_dataset
from megastack.checkpoint.folder import Resume, resolve_resume
from megastack.config.compose import to_yaml
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, MegastackError
from megastack.launch.worker import Assignment
from megastack.observe.folder import RunFolder, claim
from megastack.observe.metrics import tensorboard_installed


@dataclass(frozen=True)
class Prepared:
    """A run that may start."""

    assignment: Assignment
    dataset: Dataset
    notes: tuple[str, ...]


def prepare(config: TrainConfig, overrides: Sequence[str] = ()) -> Prepared:
    """Check everything that the configuration alone cannot tell, then take the run folder.

    Raises:
        ConfigError: every fault found, one a line.
    """
    faults: list[str] = []
    dataset, resume = None, Resume()
    try:
        dataset = read_dataset(config)
    except (MegastackError, OSError) as error:
        faults.append(str(error))
    try:
        resume = resolve_resume(
            config.resume, config.run.dir, config.run.root, on_corrupt=config.checkpoint.on_corrupt.value
        )
    except (MegastackError, OSError) as error:
        faults.append(str(error))
    if config.observe.tensorboard and not tensorboard_installed():
        faults.append("observe.tensorboard=true: tensorboard is not installed; use null, false, or install it")
    if faults or dataset is None:
        raise ConfigError("\n".join(faults))
    folder = _folder(config, resume)
    _describe(folder, config, overrides)
    return Prepared(Assignment(config, folder.path, resume.checkpoint), dataset, _notes(config, resume, dataset))


def _folder(config: TrainConfig, resume: Resume) -> RunFolder:
    """``auto`` and ``last`` continue in the folder of the checkpoint; everything else takes a new one."""
    if resume.run_dir is not None and resume.run_dir.is_dir():
        return RunFolder(resume.run_dir)
    try:
        return claim(config.run.dir, config.run.root)
    except OSError as error:
        raise ConfigError(f"run.dir={config.run.dir or config.run.root}: cannot be created ({error})") from None


def _describe(folder: RunFolder, config: TrainConfig, overrides: Sequence[str]) -> None:
    hydra = folder.path / ".hydra"
    hydra.mkdir(exist_ok=True)
    named = replace(config, run=replace(config.run, dir=str(folder.path)))
    folder.config.write_text(to_yaml(named), encoding="utf-8")
    (hydra / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (hydra / "overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides) or "[]\n")
    for record in (folder.path / "failures").glob("rank_*.json"):
        record.unlink()


def _notes(config: TrainConfig, resume: Resume, dataset: Dataset) -> tuple[str, ...]:
    notes = [f"passed over: {fault}" for fault in resume.skipped]
    if resume.checkpoint is not None:
        notes.append(f"resumes from {resume.checkpoint}")
    if config.observe.tensorboard is None:
        notes.append(f"TensorBoard events: {'on' if tensorboard_installed() else 'off (tensorboard is not installed)'}")
    return (*dataset.describe().splitlines(), *notes)
