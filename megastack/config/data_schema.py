"""The keys of ``data``: documents, tokens, sequences, blends and phases.

A part of the schema in ``schema.py``, with the same rules. Does not import torch.
"""

# ruff: noqa: RUF009  (option and required return dataclasses.field)
from __future__ import annotations

from dataclasses import dataclass

from megastack.config.choices import DataSource
from megastack.config.fields import option, required


@dataclass(frozen=True, kw_only=True)
class BlendSource:
    """One source of a blend."""

    paths: list[str] = option([], "Files, folders or globs of the source; prefixes of `.bin/.idx` pairs.")
    weight: float = required("Relative share of the samples; 0 draws none.", least=0, limit=1e15)
    source: DataSource = option(DataSource.bin, "Format of the paths, as in `data.source`.")


@dataclass(frozen=True, kw_only=True)
class DataPhaseOptions:
    """A data phase: from a step on, its settings replace those of the previous phase."""

    from_step: int = required("Completed optimizer steps at which the phase begins.", least=1)
    sequence_length: int | None = option(
        None, "Tokens per sequence, as in `batch.sequence_length`; null keeps it.", least=1, most=2**31
    )
    source: DataSource | None = option(None, "Format of the paths, as in `data.source`; null keeps it.")
    paths: list[str] | None = option(None, "Files, folders or globs of the source; null keeps the data.")
    blend: list[BlendSource] | None = option(
        None, "Several sources, drawn by weight, instead of `source` and `paths`; null keeps the data."
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Documents, tokens and sequences."""

    source: DataSource = option(
        DataSource.builtin, "The corpus in the standard library, text files, JSON lines, or token files."
    )
    paths: list[str] = option([], "Files, folders or globs of the source; prefixes of `.bin/.idx` pairs.")
    blend: list[BlendSource] = option(
        [],
        "Several sources, drawn by weight, instead of `data.source` and `data.paths`: `[{paths: […], weight: …}]`. "
        "Weights may change on resume.",
    )
    phases: list[DataPhaseOptions] = option(
        [],
        "Other data or another sequence length from a step on: `[{from_step: …, sequence_length: …, paths: […]}]`. "
        "The other keys define the first phase. The old name `data.stages` is still accepted.",
    )
    tokenizer: str = option("byte", "`byte`, or the path of a `tokenizer.json`.")
    allow_special_tokens: bool = option(
        False,
        "Encode text and prompts that contain a special token of the tokenizer, such as `</s>`, as its id; false "
        "encodes them as ordinary text.",
    )
    validation_fraction: float = option(
        0.05, "Share of held-out documents, selected by hash; of token files, in blocks.", least=0, below=1
    )
    pack: bool = option(True, "Fill each sequence with several documents instead of one.")
    document_mask: bool = option(True, "Tokens attend only to tokens of the same document.")
