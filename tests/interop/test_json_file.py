"""Values that JSON does not have are errors that name their key, and never end with a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastack.cli import main
from megastack.errors import ConfigError
from megastack.interop.json_file import DEEPEST, read_json
from tests.interop.hub_folders import LLAMA, write

DEEP = 100_000
INVALID: list[tuple[str, str]] = [
    ('{"a": NaN}', "a=NaN: is not a JSON number"),
    ('{"a": {"b": [1, -Infinity]}}', "a.b.1=-Infinity: is not a JSON number"),
    ('{"a": 1e400}', "a=1e400: too large for a float"),
    ('{"a": {"b": -1e400}}', "a.b=-1e400: too large for a float"),
    ('{"a": %s}' % ("9" * 400), "a=999999999999999999999999999999…: too large"),
    ('{"a": %s}' % ("9" * 5000), "a=999999999999999999999999999999…: too large"),
    ('{"a": 1, "b": {"c": 2, "c": 3}}', "b.c=2 and 3: the key occurs twice in its object"),
    ('{"a": 1, "a": 1}', "a=1 and 1: the key occurs twice in its object"),
    ('{"a": "\\ud800"}', "a: holds half of a character"),
    ('{"a": {"\\ud800": 1}}', "a: a key holds half of a character"),
    (
        '{"x": "[[", "a": ' + "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1) + "}",
        "objects and lists are nested",
    ),
    ('{"x": "[[", "a": %s}' % ("[" * DEEP + "]" * DEEP), "a: objects and lists are nested"),
    ('{"x": 1, "a": %s}' % ('{"b":' * DEEP + "1" + "}" * DEEP), "a: objects and lists are nested"),
    ("[1]", "must hold a JSON object"),
    ("", "not readable as JSON"),
    ('{"a": 1', "not readable as JSON"),
]


@pytest.mark.parametrize(("text", "reason"), INVALID, ids=[reason[:40] for _, reason in INVALID])
def test_an_invalid_value_is_an_error_that_names_its_key(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_json(file)
    message = str(raised.value)
    assert message.startswith(f"{file}: ") and reason in message
    message.encode()
    assert len(message) < 300 + len(str(file))


def test_every_error_is_reported_and_bytes_that_are_not_text_are_one(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": NaN, "b": {"c": 1e999}, "d": 1}')
    with pytest.raises(ConfigError, match=r"(?s)a=NaN.*\n.*b\.c=1e999"):
        read_json(file)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not readable as JSON"):
        read_json(file)


def test_valid_json_is_read_unchanged(tmp_path: Path) -> None:
    values = {"a": 1, "b": [1.5, None, True, {"c": "é𝄞"}], "d": {"d": {"d": -3}}, "e": 10**20}
    file = tmp_path / "x.json"
    for ascii_only in (True, False):
        file.write_text(json.dumps(values, ensure_ascii=ascii_only), encoding="utf-8")
        assert read_json(file) == values


NESTED = '{"type": "linear", "factor": %s}'


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("rope_scaling", '{"rope_type": "unheard-of", "factor": 2.0}', "rope_scaling.rope_type=unheard-of"),
        ("rope_scaling", '{"rope_type": {"a": []}, "factor": 2.0}', "rope_scaling.rope_type="),
        ("rope_scaling", NESTED % "1e400", "rope_scaling.factor=1e400: too large for a float"),
        ("rope_scaling", NESTED % "NaN", "rope_scaling.factor=NaN"),
        ("rope_scaling", NESTED % '2, "factor": 3', "rope_scaling.factor=2 and 3: the key occurs twice"),
        ("rms_norm_eps", "NaN", "rms_norm_eps=NaN"),
        ("rope_theta", "1e400", "rope_theta=1e400"),
        ("vocab_size", "1" + "0" * 300, "vocab_size"),
        ("initializer_range", "-1.0", "model.init_std=-1.0"),
        ("rms_norm_eps", "0", "model.norm_eps=0"),
        ("rope_theta", "-1", "model.rope.theta=-1"),
        ("task_specific_params", "[" * DEEP + "]" * DEEP, "task_specific_params: objects and lists are nested"),
    ],
)
def test_an_import_ends_with_a_message_and_78(
    key: str, text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "x", LLAMA | {"num_hidden_layers": 1})
    others = {name: value for name, value in LLAMA.items() if name != key}
    (folder / "config.json").write_text(json.dumps(others)[:-1] + f', "{key}": {text}}}')
    assert main(["import", str(folder), "--out", str(tmp_path / "out")]) == 78
    message = capsys.readouterr().err
    assert reason in message and "Traceback" not in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_an_export_checks_the_copied_files_as_strictly(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "x", LLAMA | {"num_hidden_layers": 1})
    assert main(["import", str(folder), "--out", str(tmp_path / "in"), "--proof", "none"]) == 0
    (folder / name).write_text('{"eos_token_id": 1e400, "model": {"a": NaN}}')
    export = ["export", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--like", str(folder)]
    assert main(export) == 78
    message = capsys.readouterr().err
    assert f"{folder / name}: eos_token_id=1e400" in message and "model.a=NaN" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ['{"model": []}', '{"model": {"vocab": 3}}', '{"added_tokens": {"a": 1}}', '{"added_tokens": [{"a": 1}]}']
)
def test_a_tokenizer_of_another_form_is_an_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "x", LLAMA | {"num_hidden_layers": 1})
    (folder / "tokenizer.json").write_text(text)
    code = main(["import", str(folder), "--out", str(tmp_path / "in"), "--proof", "none"])
    assert code == (0 if text == '{"model": []}' else 78)
    assert ("tokenizer.json: " in capsys.readouterr().err) == (code == 78)
