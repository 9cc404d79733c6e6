"""Implementation of ``megastack generate``: read and check prompts, continue them on the ranks, print the texts.

The continuation of a single prompt is printed as it is generated; several continuations are printed at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.assemble.data import configured_tokenizer
from megastack.assemble.inference import build_generator, longest_text
from megastack.assemble.stages import load_stages
from megastack.cli.unused import unused_note
from megastack.cli.weights import find_weights
from megastack.config.schema import TrainConfig
from megastack.data.sources import read_documents
from megastack.data.tokenizers import Tokenizer, check_vocab
from megastack.errors import ConfigError, DataError, Violation
from megastack.inference.generate import Completion, check_prompts
from megastack.inference.sample import Sampling
from megastack.launch.run import on_ranks
from megastack.mesh.mesh import Mesh
from megastack.models.stages import configured_schedule
from megastack.observe.console import Console
from megastack.preflight.errors import ErrorCollector

UNFINISHED = "\ufffd"
"""The character that a decoder returns for an incomplete one."""


@dataclass(frozen=True)
class _Request:
    """The request that every rank processes."""

    checkpoint: Path
    prompts: tuple[tuple[int, ...], ...]
    new: int
    sampling: Sampling
    end: int | None
    cache: bool
    streams: bool


def generate(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Continue the prompts and return the record of the command.

    Raises:
        ConfigError: checkpoint, configuration or prompts are invalid; nothing was computed.
    """
    use = find_weights(options)
    config, errors = use.config, use.errors
    errors.check(lambda: _check_single_replica(config), "parallel.dp")
    sampling = errors.check(lambda: Sampling(options.temperature, options.top_k, options.top_p, options.seed))
    tokenizer = errors.check(lambda: configured_tokenizer(config), "data.tokenizer")
    texts = errors.check(lambda: [*options.prompt, *(_read_prompts(Path(options.prompts)) if options.prompts else ())])
    prompts = _ids(config, errors, tokenizer, texts, options.max_new_tokens)
    use.require_valid()
    assert sampling is not None and tokenizer is not None and texts is not None
    new, cache = options.max_new_tokens, not options.no_cache
    console.line(f"generate  {use}, {sampling}")
    if note := unused_note("generate", options.overrides):
        console.line(f"note      {note}")
    request = _Request(use.checkpoint, prompts, new, sampling, tokenizer.end, cache, streams=len(prompts) == 1)
    done, uncached_because = on_ranks("generate", config, _continue, request)
    if cache and uncached_because is not None:
        console.line(f"note      without a cache: {uncached_because}")
    if not request.streams:
        for text, completion in zip(texts, done, strict=True):
            console.line(f"\n{text}{continuation(tokenizer, completion)}")
    return {"checkpoint": str(use.checkpoint), "sampling": str(sampling), "texts": _records(texts, done, tokenizer)}


def _check_single_replica(config: TrainConfig) -> None:
    if config.parallel.dp not in (None, 1):
        rule = "copies of the model would all write the same"
        raise ConfigError.of([Violation("parallel.dp", config.parallel.dp, rule, (1,))])


def _ids(
    config: TrainConfig, errors: ErrorCollector, tokenizer: Tokenizer | None, texts: Sequence[str] | None, new: int
) -> tuple[tuple[int, ...], ...]:
    """Encode the prompts as ids, if they are valid."""
    if tokenizer is None or texts is None:
        return ()
    errors.check(lambda: check_vocab(config.model.vocab, tokenizer), "model.vocab")
    prompts = errors.check(lambda: _encoded(tokenizer, texts))
    if prompts is None:
        return ()
    needs = ("model.vocab", "model.positions", "model.max_positions", "batch.sequence_length")
    errors.check(
        lambda: check_prompts(prompts, new, vocab=config.model.vocab, max_positions=longest_text(config)), *needs
    )
    return prompts


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    raw = [text.encode("utf-8", "surrogateescape") for text in texts]  # the bytes passed by the shell, in any locale
    for prompt in raw:
        try:
            prompt.decode()
        except UnicodeDecodeError:
            raise DataError(f"--prompt {prompt!r}: is not UTF-8; use UTF-8 text") from None
    return tuple(tuple(ids.tolist()) for ids in tokenizer.encode(raw))


def _continue(config: TrainConfig, mesh: Mesh, request: _Request) -> tuple[list[Completion], str | None]:
    """Return the continuations, and the reason if layers could not use a cache; called on every rank."""
    schedule = configured_schedule(config, mesh.shape)
    generator = build_generator(config, mesh, load_stages(config, mesh, schedule, request.checkpoint), schedule)
    stream = None
    if request.streams and mesh.rank == 0:
        stream = _TextPrinter(configured_tokenizer(config), request.prompts[0], Console())
    done = generator(
        request.prompts,
        max_new_tokens=request.new,
        sampling=request.sampling,
        end=request.end,
        cache=request.cache,
        on_tokens=stream,
    )
    if stream is not None:
        stream.finish()
    return done, generator.uncached_because


class _TextPrinter:
    """Prints one text while it is generated, in complete characters only."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], console: Console) -> None:
        self._tokenizer, self._ids, self._console = tokenizer, list(prompt), console
        self._shown = tokenizer.decode(prompt)
        console.text(self._shown, style="bold")

    def __call__(self, ids: Sequence[int | None]) -> None:
        self._ids += [i for i in ids if i is not None]
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(UNFINISHED):
            self._show(text)

    def finish(self) -> None:
        """Print the characters held back, and end the line."""
        self._show(self._tokenizer.decode(self._ids) + "\n")

    def _show(self, text: str) -> None:
        self._console.text(text[len(self._shown) :])
        self._shown = text


def continuation(tokenizer: Tokenizer, completion: Completion) -> str:
    """Return the text generated for a prompt."""
    before = tokenizer.decode(completion.prompt)
    return tokenizer.decode([*completion.prompt, *completion.ids])[len(before) :]


def _records(texts: Sequence[str], done: Sequence[Completion], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [
        {
            "prompt": text,
            "text": continuation(tokenizer, completion),
            "ids": list(completion.ids),
            "ended": completion.ended,
        }
        for text, completion in zip(texts, done, strict=True)
    ]


def _read_prompts(path: Path) -> list[str]:
    """Read the prompts in a file, without empty lines.

    Raises:
        DataError: the file cannot be read, or a line is not UTF-8 or not JSON; the message names the file and the line.
    """
    if path.suffix == ".jsonl":
        return [document.decode() for document in read_documents("jsonl", [path])]
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise DataError(
            f"--prompts {path}: cannot be read ({error.strerror}); use a file with a prompt a line"
        ) from None
    return [_decoded(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise DataError(f"--prompts {where}: byte 0x{byte:02x} is not UTF-8 ({error.reason}); use UTF-8 text") from None
