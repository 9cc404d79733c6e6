"""The ids of special tokens in what is exported: of the original model, of the tokenizer's files, or of its end.

A key that ``config.json`` leaves out has the default of its class (2 ends a text of Llama's), whatever the tokenizer.
So beginning and end are always written, as null where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megastack.data.tokenizer_file import END_NAMES
from megastack.data.tokenizers import ByteTokenizer
from megastack.errors import ConfigError, Violation
from megastack.interop.class_keys import KEYS, WORDS, is_of_kind
from megastack.interop.json_file import read_json

WRITTEN = ("bos_token_id", "eos_token_id")
KNOWN = (*WRITTEN, "pad_token_id", "unk_token_id")
TOKENIZER, SETTINGS, SPECIAL, WORD_LIST = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "vocab.json",
)


def byte_ids(vocab: int) -> dict[str, Any]:
    """Those of the byte tokenizer, if the model has them."""
    end = ByteTokenizer.end
    return {"bos_token_id": None, "eos_token_id": end if end is not None and end < vocab else None}


def token_ids(
    files: Mapping[str, Path], original: Mapping[str, Any] | None = None, *, vocab: int | None = None
) -> dict[str, Any]:
    """The ids by key of ``config.json``; beginning and end are always among them.

    Args:
        files: the tokenizer's files by the name that they have in a folder.
        original: the ``config.json`` that the model came from. It comes before the tokenizer; where neither says a
            beginning or an end, the default of its class stands.
        vocab: ids of the model, which a default has to be one of.

    Raises:
        ConfigError: an id of the original is none, or a token that is named has no id.
    """
    original = original or {}
    _require_ids(original)
    names, ids = _names(files), _ids(files)
    found = {key: original[key] for key in KNOWN if key in original}
    for key in WRITTEN:
        if key in found:
            continue
        name = names.get(key.removesuffix("_id"))
        if name is not None:
            found[key] = _id(name, key, ids)
        elif key == "eos_token_id" and any(each in ids for each in END_NAMES):
            found[key] = next(ids[each] for each in END_NAMES if each in ids)
        else:
            found[key] = None if ids else _default(original, key, vocab)
    return found


def _default(original: Mapping[str, Any], key: str, vocab: int | None) -> int | None:
    """What an absent key means in the original's class, if the model has such an id."""
    known = KEYS.get(str(original.get("model_type")))
    value = known[key].default if known else None
    return value if value is not None and vocab is not None and value < vocab else None


def generation_config(ids: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``generation_config.json``, which generation reads before ``config.json``; empty without ids."""
    given = {key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if ids.get(key) is not None}
    return given | {"_from_model_config": True} if given else {}


def _require_ids(original: Mapping[str, Any]) -> None:
    keys = {key: KEYS["llama"][key].kind if key in KEYS["llama"] else "id" for key in KNOWN}
    errors = [
        Violation(key, original[key], f"must be {WORDS[kind]} or null")
        for key, kind in keys.items()
        if original.get(key) is not None and not is_of_kind(original[key], kind)
    ]
    if errors:
        raise ConfigError.of(errors)


def _names(files: Mapping[str, Path]) -> dict[str, str]:
    """The text of each special token: ``eos_token`` and so on."""
    names: dict[str, str] = {}
    for file in (SPECIAL, SETTINGS):
        values = read_json(files[file]) if file in files else {}
        for key, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
    return names


def _ids(files: Mapping[str, Path]) -> dict[str, int]:
    """The id of each token."""
    ids: dict[str, Any] = {}
    if WORD_LIST in files:
        ids |= read_json(files[WORD_LIST])
    if TOKENIZER in files:
        values = read_json(files[TOKENIZER])
        model = values.get("model")
        words = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(words, dict):
            ids |= words
        elif isinstance(words, list):  # unigram models list (token, score)
            ids |= {word[0]: at for at, word in enumerate(words) if isinstance(word, list) and word}
        added = values.get("added_tokens")
        for each in added if isinstance(added, list) else []:
            if isinstance(each, dict) and isinstance(each.get("content"), str):
                ids[each["content"]] = each.get("id")
    return {name: each for name, each in ids.items() if is_of_kind(each, "id")}


def _id(name: str, key: str, ids: Mapping[str, int]) -> int | None:
    """The id of a token; None where the folder has no list of ids (a sentencepiece model alone)."""
    if ids and name not in ids:
        rule = f"the tokenizer's settings name it as {key.removesuffix('_id')}, and its vocabulary does not hold it"
        raise ConfigError.of([Violation("token", name, rule)])
    return ids.get(name)
