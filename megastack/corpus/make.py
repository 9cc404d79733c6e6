"""From text files to one token file, with many processes, going on where an earlier try was stopped.

Every unit becomes a part in `PREFIX.parts/`; when all are there they are joined into `PREFIX.bin` and `PREFIX.idx`, and
the parts go. Whoever sees the index sees a whole file. A plan beside the parts says what they were made from, so that a
second try goes on only with the same input and settings.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from megastack.corpus.units import UNIT_BYTES, Unit, empty_file, plan_units
from megastack.corpus.work import Counts, Part, Settings, start_worker, tokenize_unit
from megastack.data.indexed import IndexedWriter, id_dtype, idx_path
from megastack.data.tokenizers import Tokenizer, load_tokenizer
from megastack.errors import DataError, counted

Advance = Callable[[int, int], None]
"""Called with bytes of input that are done and the number of all."""

_CHUNK = 64 << 20


@dataclass(frozen=True)
class Made:
    """What was written, how many of its parts an earlier try had left, and which input files were empty."""

    prefix: str
    counts: Counts
    vocab: int
    dtype: str
    parts: int
    resumed: int
    empty: int = 0
    first_empty: str | None = None


def make_token_file(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "byte",
    field: str = "text",
    skip_bad: bool = False,
    allow_special_tokens: bool = False,
    workers: int | None = None,
    unit_bytes: int = UNIT_BYTES,
    advance: Advance = lambda done, total: None,
) -> Made:
    """Tokenize `paths` into `out.bin` and `out.idx`.

    Args:
        paths: `.jsonl`, `.txt` and `.parquet` files, folders or patterns.
        out: the prefix; what it names must not exist.
        tokenizer: `byte` or a `tokenizer.json`.
        field: the field or column that holds the text.
        skip_bad: leave out lines that are not UTF-8 or JSON and files without a document, and count them; else the
            first one is refused.
        allow_special_tokens: whether text that spells a special token becomes its id.
        workers: processes; null for the CPUs of this one.
        unit_bytes: about how much a process does at a time; decides, as paths do, whether a try can go on.

    Raises:
        DataError: an input, the tokenizer or the output is refused; parts that were finished stay for the next try.
            Input without any token leaves nothing behind.
    """
    if idx_path(out).exists():
        raise DataError(f"--out={out}: {idx_path(out)} exists; use another prefix, or remove it")
    if allow_special_tokens and tokenizer == "byte":
        raise DataError("--allow-special-tokens: --tokenizer=byte has no special tokens; use a tokenizer.json")
    loaded = load_tokenizer(tokenizer, allow_special_tokens=allow_special_tokens)
    dtype = id_dtype(loaded.size - 1)
    settings = Settings(tokenizer, _digest(tokenizer), dtype.str, field, skip_bad, allow_special_tokens)
    units = plan_units(paths, unit_bytes, skip_empty=skip_bad)
    folder = Path(f"{out}.parts")
    made_by_us = _missing_folders(folder)
    _claim(folder, units, settings, loaded)
    parts = [Part(str(folder / f"{number:08}")) for number in range(len(units))]
    try:
        resumed = _tokenize(units, parts, settings, workers, advance)
    except DataError:
        if not any(part.usable(settings) for part in parts):  # nothing to go on with
            _remove(folder, made_by_us)
        raise
    found = [part.usable(settings) or Counts() for part in parts]
    counts = reduce(add, found, Counts())
    empty = _empty_inputs(units, found)
    if not counts.tokens:
        _remove(folder, made_by_us)
        raise _no_token(str(out), counts, empty)
    if empty and not skip_bad:
        raise empty_file(empty[0])
    made = Made(str(out), counts, loaded.size, dtype.name, len(units), resumed, len(empty), next(iter(empty), None))
    _join(parts, settings.dtype, made, loaded)
    shutil.rmtree(folder)
    return made


def _tokenize(
    units: Sequence[Unit], parts: Sequence[Part], settings: Settings, workers: int | None, advance: Advance
) -> int:
    """Write the parts that are not there yet; how many were."""
    had = [part.usable(settings) is not None for part in parts]
    jobs = [(unit, settings, part) for unit, part, there in zip(units, parts, had, strict=True) if not there]
    total = sum(unit.size for unit in units)
    finished = total - sum(unit.size for unit, _, _ in jobs)
    advance(finished, total)
    for unit in _run(jobs, min(workers or len(os.sched_getaffinity(0)), len(jobs))):
        finished += unit.size
        advance(finished, total)
    return sum(had)


def _empty_inputs(units: Sequence[Unit], found: Sequence[Counts]) -> list[str]:
    """The files without a document, those of bad lines aside."""
    held: dict[str, int] = {}
    for unit, counts in zip(units, found, strict=True):
        held[unit.path] = held.get(unit.path, 0) + counts.documents + counts.skipped
    return [path for path, documents in held.items() if not documents]


def _no_token(out: str, counts: Counts, empty: Sequence[str]) -> DataError:
    reasons = [f"{counted(counts.skipped, 'bad line')}, the first: {counts.first_bad}"] if counts.skipped else []
    reasons += [f"{counted(len(empty), 'empty file')}, the first: {empty[0]}"] if empty else []
    return DataError(f"--out={out}: the input holds no token ({'; '.join(reasons)}); use files with text")


def _missing_folders(folder: Path) -> list[Path]:
    """The folder and those above it that do not exist, innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def _remove(folder: Path, made_by_us: Sequence[Path]) -> None:
    """Remove the parts, and the folders above that were made for them and hold nothing else."""
    shutil.rmtree(folder)
    for each in made_by_us:
        if each != folder and not any(each.iterdir()):
            each.rmdir()


def _claim(folder: Path, units: Sequence[Unit], settings: Settings, tokenizer: Tokenizer) -> None:
    """Make the folder of the parts, or find it made for the same work."""
    plan = _plan(units, settings, tokenizer)
    path = folder / "plan.json"
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != plan:
            raise DataError(f"{folder}: holds parts of other input or settings; use another --out, or remove it")
        return
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "plan.part"
    unfinished.write_text(json.dumps(plan), encoding="utf-8")
    os.replace(unfinished, path)


def _plan(units: Sequence[Unit], settings: Settings, tokenizer: Tokenizer) -> dict[str, Any]:
    state = hashlib.blake2b(digest_size=16)
    for path in dict.fromkeys(unit.path for unit in units):
        found = os.stat(path)
        state.update(repr((path, found.st_size, found.st_mtime_ns)).encode())
    state.update(repr([(unit.path, unit.begin, unit.end) for unit in units]).encode())
    state.update(repr((tokenizer.size, tokenizer.end)).encode())
    kept = {
        name: value for name, value in asdict(settings).items() if name != "skip"
    }  # a part says whether it was used
    return {"units": len(units), "input": state.hexdigest()} | kept


def _digest(tokenizer: str) -> str:
    path = Path(tokenizer)
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else ""


def _run(jobs: Sequence[tuple[Unit, Settings, Part]], workers: int) -> Iterator[Unit]:
    """Do the jobs, giving each unit when it is done."""
    if workers <= 1:
        for job in jobs:
            tokenize_unit(*job)
            yield job[0]
        return
    # spawn: a fork would take over locks of threads that it does not take over
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool:
        futures = {pool.submit(tokenize_unit, *job): job[0] for job in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool as error:
            raise DataError(
                "a process ended without a word (out of memory?); run again to go on, with fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _join(parts: Sequence[Part], dtype: str, made: Made, tokenizer: Tokenizer) -> None:
    with IndexedWriter(made.prefix, dtype) as out:
        for part in parts:
            out.add_many(b"", np.load(part.lengths))
            with open(part.ids, "rb") as file:
                while chunk := file.read(_CHUNK):
                    out.add_many(chunk, np.empty(0, np.int32))
        note = {"tokenizer": tokenizer.name, "vocab": tokenizer.size, "end_id": tokenizer.end} | asdict(made.counts)
        Path(f"{made.prefix}.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
