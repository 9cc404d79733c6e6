"""A `tokenizer.json`, read with the optional `tokenizers` package: the ids of a text and nothing else.

Such a file may contain state that changes the ids of a text. Truncation, padding, the random merges of BPE dropout and
the special tokens that a post-processor adds (BOS or EOS) are switched off.

Text that spells a special token remains text. The package matches special tokens before it runs the model; this is
switched off too. Some models still have the token in their own vocabulary (WordLevel, Unigram). Text that would become
such a guarded token is cut after the token's first character, and the two parts are encoded separately. The id of
unknown text is not guarded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megastack.errors import DataError

if TYPE_CHECKING:
    import tokenizers as hf

Ids = npt.NDArray[np.integer]

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_EXCERPT = 40


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`, without the state described above.

    The end id is the id of `eos_token` in a `tokenizer_config.json` next to the file; null means no end id. Without
    that entry it is the first well-known name in the vocabulary (`<|endoftext|>`, `</s>`, …), or none.

    Args:
        path: the file.
        allow_special_tokens: whether text that spells a special token becomes its id.

    Raises:
        DataError: the file is missing or not a tokenizer, or its `eos_token` is not in the vocabulary.
    """

    def __init__(self, path: str | Path, *, allow_special_tokens: bool = False) -> None:
        self.name = str(path)
        self._tokenizer = _load(Path(path))
        _switch_off_state(self._tokenizer)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(ids.values(), default=-1) + 1
        self.end = _end(Path(path), ids)
        self._allows = allow_special_tokens
        self._guarded = np.zeros(self.size, dtype=bool)
        if not allow_special_tokens:
            self._guarded[_guarded(self._tokenizer, self.end)] = True
            self._tokenizer.encode_special_tokens = True

    def __reduce__(self) -> tuple[Callable[[str, bool], FileTokenizer], tuple[str, bool]]:
        return _load_file, (self.name, self._allows)

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, without the end id.

        Raises:
            DataError: text that can only be encoded as a special token, which is not allowed.
        """
        texts = [document.decode() for document in documents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
        return [
            np.array(self._as_text(text), dtype=np.int64) if self._guarded[ids].any() else ids
            for text, ids in zip(texts, found, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self._tokenizer.decode(list(ids))

    def _as_text(self, text: str) -> list[int]:
        """The ids of text that contains guarded tokens, cut within each of them."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        guarded = [offsets for i, offsets in zip(encoding.ids, encoding.offsets, strict=True) if self._guarded[i]]
        if not guarded:
            return list(encoding.ids)
        if single := [begin for begin, end in guarded if end - begin < 2]:
            excerpt = text[single[0] : single[0] + _EXCERPT]
            raise DataError(
                f"data.tokenizer={self.name}: its model encodes the text {excerpt!r} as a special token; "
                "use text without it, or data.allow_special_tokens=true"
            )
        cuts = [0, *sorted({begin + 1 for begin, _ in guarded}), len(text)]
        return [i for begin, end in pairwise(cuts) for i in self._as_text(text[begin:end])]


def _load_file(path: str, allow_special_tokens: bool) -> FileTokenizer:
    return FileTokenizer(path, allow_special_tokens=allow_special_tokens)


def _load(path: Path) -> hf.Tokenizer:
    if not path.is_file():
        rule = "is a folder" if path.is_dir() else "no such file"
        raise DataError(f"data.tokenizer={path}: {rule}; use byte or the path of a tokenizer.json")
    try:
        import tokenizers as hf
    except ImportError as error:
        raise DataError(
            f"data.tokenizer={path}: needs the tokenizers package; use pip install 'megastack[tokenizers]' or byte"
        ) from error
    try:
        return hf.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a file that it cannot parse
        raise DataError(f"data.tokenizer={path}: not a tokenizer.json ({error}); use byte or another file") from error


def _switch_off_state(tokenizer: hf.Tokenizer) -> None:
    """Switch off the state of a `tokenizer.json` that would change the ids of a text."""
    import tokenizers as hf

    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, hf.models.BPE):
        tokenizer.model.dropout = None


def _guarded(tokenizer: hf.Tokenizer, end: int | None) -> list[int]:
    """The ids that text must not become: special tokens and the end id, but not the unknown token."""
    added = tokenizer.get_added_tokens_decoder()
    if end in added and not added[end].special:
        tokenizer.add_special_tokens([added[end].content])  # otherwise it would be matched like any added token
    special = {i for i, token in added.items() if token.special} | ({end} if end is not None else set())
    return sorted(special - {_unknown(tokenizer)})


def _unknown(tokenizer: hf.Tokenizer) -> int | None:
    """The id of unknown text."""
    import tokenizers as hf

    if isinstance(tokenizer.model, hf.models.Unigram):  # has an id, but no attribute for it
        unknown: int | None = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return unknown
    return None if tokenizer.model.unk_token is None else tokenizer.token_to_id(tokenizer.model.unk_token)


def _end(path: Path, ids: Mapping[str, int]) -> int | None:
    """The end id: the configured one, none if that is null, or else the first well-known one."""
    config = _config_beside(path)
    if "eos_token" not in config:
        return next((ids[name] for name in END_NAMES if name in ids), None)
    end = config["eos_token"]
    if isinstance(end, dict):
        end = end.get("content", end)
    if end is None:
        return None
    if not isinstance(end, str) or end not in ids:
        raise DataError(
            f"data.tokenizer={path}: the eos_token {end!r} of tokenizer_config.json beside it is not in its "
            "vocabulary; use a token of the vocabulary, or null for none"
        )
    return ids[end]


def _config_beside(path: Path) -> Mapping[str, object]:
    """The content of `tokenizer_config.json` next to a tokenizer; empty if there is none."""
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file():
        return {}
    try:
        config = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"data.tokenizer={path}: {beside} is not JSON ({error}); correct or remove it") from error
    if not isinstance(config, dict):
        raise DataError(f"data.tokenizer={path}: {beside} is not a JSON object; correct or remove it")
    return config
