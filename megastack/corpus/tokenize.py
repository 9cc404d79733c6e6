"""Tokenize text files into one token file with many processes; an interrupted attempt can be resumed.

Every slice of the input becomes a part in `PREFIX.parts/`. When all parts exist, they are joined into `PREFIX.bin` and
`PREFIX.idx`, and the folder is removed. The index is renamed into place last, so a pair that can be opened is complete.
A plan next to the parts records the input and settings, so that only an attempt with the same input and settings reuses
them.
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

import numpy as np

from megastack.corpus.inputs import SLICE_BYTES, InputSlice, empty_file, plan_slices
from megastack.corpus.worker import Counts, Settings, SliceOutput, start_worker, tokenize_slice
from megastack.data.indexed import IndexedWriter, id_dtype, idx_path
from megastack.data.tokenizers import Tokenizer, load_tokenizer
from megastack.errors import DataError, counted

Advance = Callable[[int, int], None]
"""Called with the number of input bytes processed and the total."""

_CHUNK = 64 << 20


@dataclass(frozen=True)
class TokenizeResult:
    """The counts written, the number of parts that an earlier attempt had finished, and the empty input files."""

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
    slice_bytes: int = SLICE_BYTES,
    advance: Advance = lambda done, total: None,
) -> TokenizeResult:
    """Tokenize `paths` into `out.bin` and `out.idx`.

    Args:
        paths: `.jsonl`, `.txt` and `.parquet` files, folders or patterns.
        out: the prefix; `out.idx` must not exist.
        tokenizer: `byte` or a `tokenizer.json`.
        field: the field or column that holds the text.
        skip_bad: skip and count lines that are not UTF-8 or JSON, and files without a document; otherwise the first
            one is an error.
        allow_special_tokens: whether text that spells a special token becomes its id.
        workers: the number of processes; None for the number of CPUs available to this process.
        slice_bytes: the approximate amount that a process tokenizes at a time; like `paths`, an attempt that resumes
            must not change it.
        advance: called to report progress.

    Raises:
        DataError: an input, the tokenizer or the output is invalid. Finished parts remain for the next attempt; if the
            input has no tokens, nothing remains.
    """
    if idx_path(out).exists():
        raise DataError(f"--out={out}: {idx_path(out)} exists; use another prefix, or remove it")
    if allow_special_tokens and tokenizer == "byte":
        raise DataError("--allow-special-tokens: --tokenizer=byte has no special tokens; use a tokenizer.json")
    loaded = load_tokenizer(tokenizer, allow_special_tokens=allow_special_tokens)
    dtype = id_dtype(loaded.size - 1)
    settings = Settings(tokenizer, _digest(tokenizer), dtype.str, field, skip_bad, allow_special_tokens)
    slices = plan_slices(paths, slice_bytes, skip_empty=skip_bad)
    folder = Path(f"{out}.parts")
    created = _missing_folders(folder)
    _claim(folder, slices, settings, loaded)
    outputs = [SliceOutput(str(folder / f"{number:08}")) for number in range(len(slices))]
    try:
        resumed = _tokenize(slices, outputs, settings, workers, advance)
    except DataError:
        if not any(output.read_counts(settings) for output in outputs):  # nothing to reuse
            _remove(folder, created)
        raise
    found = [output.read_counts(settings) or Counts() for output in outputs]
    counts = reduce(add, found, Counts())
    empty = _empty_inputs(slices, found)
    if not counts.tokens:
        _remove(folder, created)
        raise _no_token(str(out), counts, empty)
    if empty and not skip_bad:
        raise empty_file(empty[0])
    skipped = (len(empty), next(iter(empty), None))
    result = TokenizeResult(str(out), counts, loaded.size, dtype.name, len(slices), resumed, *skipped)
    _join(outputs, settings.dtype, result, loaded)
    shutil.rmtree(folder)
    return result


def _tokenize(
    slices: Sequence[InputSlice],
    outputs: Sequence[SliceOutput],
    settings: Settings,
    workers: int | None,
    advance: Advance,
) -> int:
    """Write the missing parts and return how many existed."""
    pairs = list(zip(slices, outputs, strict=True))
    jobs = [(each, settings, output) for each, output in pairs if output.read_counts(settings) is None]
    total = sum(each.size for each in slices)
    finished = total - sum(each.size for each, _, _ in jobs)
    advance(finished, total)
    for input_slice in _run(jobs, min(workers or len(os.sched_getaffinity(0)), len(jobs))):
        finished += input_slice.size
        advance(finished, total)
    return len(slices) - len(jobs)


def _empty_inputs(slices: Sequence[InputSlice], found: Sequence[Counts]) -> list[str]:
    """Return the files without a document; a file that contains only bad lines does not count as empty."""
    held: dict[str, int] = {}
    for input_slice, counts in zip(slices, found, strict=True):
        held[input_slice.path] = held.get(input_slice.path, 0) + counts.documents + counts.skipped
    return [path for path, documents in held.items() if not documents]


def _no_token(out: str, counts: Counts, empty: Sequence[str]) -> DataError:
    reasons = [f"{counted(counts.skipped, 'bad line')}, the first: {counts.first_bad}"] if counts.skipped else []
    reasons += [f"{counted(len(empty), 'empty file')}, the first: {empty[0]}"] if empty else []
    return DataError(f"--out={out}: the input has no tokens ({'; '.join(reasons)}); use files with text")


def _missing_folders(folder: Path) -> list[Path]:
    """Return the folder and those of its parents that do not exist, innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def _remove(folder: Path, created: Sequence[Path]) -> None:
    """Remove the parts, and empty parent folders that were created for them."""
    shutil.rmtree(folder)
    for each in created:
        if each != folder and not any(each.iterdir()):
            each.rmdir()


def _claim(folder: Path, slices: Sequence[InputSlice], settings: Settings, tokenizer: Tokenizer) -> None:
    """Create the folder of the parts; an existing folder must have the same input and settings."""
    plan = _plan(slices, settings, tokenizer)
    path = folder / "plan.json"
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != plan:
            raise DataError(f"{folder}: has parts of other input or settings; use another --out, or remove it")
        return
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "plan.part"
    unfinished.write_text(json.dumps(plan), encoding="utf-8")
    os.replace(unfinished, path)


def _plan(slices: Sequence[InputSlice], settings: Settings, tokenizer: Tokenizer) -> dict[str, object]:
    state = hashlib.blake2b(digest_size=16)
    for path in dict.fromkeys(each.path for each in slices):
        found = os.stat(path)
        state.update(repr((path, found.st_size, found.st_mtime_ns)).encode())
    state.update(repr([(each.path, each.begin, each.end) for each in slices]).encode())
    state.update(repr((tokenizer.size, tokenizer.end)).encode())
    # Without `skip`: a part records whether it skipped lines. "units" is an older name, kept for existing plans.
    kept = {name: value for name, value in asdict(settings).items() if name != "skip"}
    return {"units": len(slices), "input": state.hexdigest()} | kept


def _digest(tokenizer: str) -> str:
    path = Path(tokenizer)
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else ""


def _run(jobs: Sequence[tuple[InputSlice, Settings, SliceOutput]], workers: int) -> Iterator[InputSlice]:
    """Run the jobs and yield each slice when it is done."""
    if workers <= 1:
        for job in jobs:
            tokenize_slice(*job)
            yield job[0]
        return
    # spawn: a forked process would inherit locks without the threads that hold them
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool:
        futures = {pool.submit(tokenize_slice, *job): job[0] for job in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool as error:
            rule = "a worker process died without an error (out of memory?)"
            raise DataError(f"{rule}; run again with fewer --workers to continue") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _join(outputs: Sequence[SliceOutput], dtype: str, result: TokenizeResult, tokenizer: Tokenizer) -> None:
    with IndexedWriter(result.prefix, dtype) as out:
        for output in outputs:
            out.add_many(b"", np.load(output.lengths))
            with open(output.ids, "rb") as file:
                while chunk := file.read(_CHUNK):
                    out.add_many(chunk, np.empty(0, np.int32))
        record = {"tokenizer": tokenizer.name, "vocab": tokenizer.size, "end_id": tokenizer.end} | asdict(result.counts)
        Path(f"{result.prefix}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
