"""Both kinds of folder written a tensor at a time: a checkpoint of weights only, and a Hugging Face folder.

Tensors are asked for when their turn comes and let go when they are on disk, so what is held at any time is one of
them. Both appear by one rename, whole or not at all, and never in place of something else.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megastack.checkpoint.cover import whole
from megastack.checkpoint.manifest import (
    MANIFEST,
    TRAINER,
    BoxRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    box_key,
    dump_manifest,
    rank_file,
)
from megastack.checkpoint.publish import write_text
from megastack.checkpoint.tensorfile import Block, write_tensors
from megastack.checkpoint.write import trainer_text
from megastack.errors import ConfigError
from megastack.interop.folder import CONFIG, INDEX, SINGLE

FILE_BYTES = 4 << 30
"""Bytes of one file of a checkpoint, so that the ranks that load it share the checking."""


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that becomes ``path`` at the end, or vanishes where the body fails.

    Raises:
        ConfigError: ``path`` is taken, or cannot be made.
    """
    target = path.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--out {path}: is taken; give a folder that does not exist or is empty")
    hidden = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        hidden.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error})") from error
    try:
        yield hidden
        if target.exists():
            target.rmdir()
        os.rename(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def write_checkpoint(folder: Path, blocks: Sequence[Block], trainer: Mapping[str, Any]) -> None:
    """Write a checkpoint that any layout loads; each block is a whole tensor, keyed by its name in the checkpoint."""
    folder.mkdir()
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for number, group in enumerate(_groups(blocks, FILE_BYTES)):
        keyed = [Block(box_key(b.key, (0,) * len(b.shape)), b.dtype, b.shape, b.tensor) for b in group]
        file, begins = write_tensors(folder / rank_file(number), keyed)
        files[file.name] = file
        for block, stored in zip(group, keyed, strict=True):
            record = BoxRecord(whole(block.shape), file.name, begins[stored.key])
            tensors[block.key] = TensorRecord(block.dtype, block.shape, (record,))
    text = trainer_text(dict(trainer))
    files[TRAINER] = FileRecord(TRAINER, write_text(folder / TRAINER, text), zlib.crc32(text.encode()))
    write_text(folder / MANIFEST, dump_manifest(Manifest(files, tensors, len(files) - 1, time.time())))


def write_hub_folder(folder: Path, blocks: Sequence[Block], config: Mapping[str, Any], shard_bytes: int) -> list[str]:
    """Write ``config.json`` and the weights, in several files with an index where one would exceed ``shard_bytes``.

    Returns:
        The names of the weight files.
    """
    groups = list(_groups(blocks, shard_bytes))
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    names = [SINGLE] if len(groups) == 1 else names
    for name, group in zip(names, groups, strict=True):
        write_tensors(folder / name, group)
    if len(groups) > 1:
        files = {block.key: name for name, group in zip(names, groups, strict=True) for block in group}
        index = {"metadata": {"total_size": sum(b.nbytes for b in blocks)}, "weight_map": dict(sorted(files.items()))}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    write_text(folder / CONFIG, json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    return names


def _groups(blocks: Sequence[Block], limit: int) -> Iterator[list[Block]]:
    """The blocks in order, in groups of at most ``limit`` bytes; a larger block is alone."""
    group: list[Block] = []
    size = 0
    for block in blocks:
        if group and size + block.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(block)
        size += block.nbytes
    if group:
        yield group
