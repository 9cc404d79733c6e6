"""Text files to one token file: its content, bad lines, interrupted attempts, and rejected inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megastack.cli import main
from megastack.corpus import tokenize
from megastack.corpus.inputs import BadLines, plan_slices, read_slice
from megastack.corpus.tokenize import TokenizeResult, make_token_file
from megastack.corpus.worker import Settings, SliceOutput, tokenize_slice
from megastack.data.dataset import build_dataset
from megastack.data.sources import read_documents
from megastack.errors import DataError
from tests.data.token_cases import read_by_hand

TEXTS = [f"number {n} is called {'ü' * (n % 7)}{n}" for n in range(60)]


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 3}, ensure_ascii=False) + "\n" for text in texts))
    return path


def tokenized(tmp_path: Path, *paths: Path, **options: Any) -> TokenizeResult:
    return make_token_file(paths, tmp_path / "out", **({"workers": 1, "slice_bytes": 300} | options))


def texts_of(prefix: Path) -> list[str]:
    code, documents = read_by_hand(prefix)
    assert code == 8 and all(ids[-1] == 255 for ids in documents)
    return [bytes(ids[:-1]).decode() for ids in documents]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return lines(tmp_path / "a.jsonl", TEXTS)


@pytest.mark.parametrize("slice_bytes", [23, 300, 10**6])
def test_every_document_once_and_in_order_whatever_the_slices(tmp_path: Path, corpus: Path, slice_bytes: int) -> None:
    report = tokenized(tmp_path, corpus, slice_bytes=slice_bytes)
    assert texts_of(tmp_path / "out") == TEXTS
    assert (report.counts.documents, report.vocab, report.counts.largest_id) == (60, 256, 255)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.bin", "out.idx", "out.json"]


def test_several_processes_write_the_same_file_as_one(tmp_path: Path, corpus: Path) -> None:
    tokenized(tmp_path, corpus)
    make_token_file([corpus], tmp_path / "two", workers=2, slice_bytes=500)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"two{suffix}").read_bytes() == (tmp_path / f"out{suffix}").read_bytes()


def test_running_text_is_cut_as_the_text_source_cuts_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\n\n".join("word " * (n % 90) for n in range(300)).encode())
    tokenized(tmp_path, path, slice_bytes=10**6)
    assert texts_of(tmp_path / "out") == [document.decode() for document in read_documents("text", [path])]
    parts = [d for each in plan_slices([path], 1000) for d in read_slice(each, "text", BadLines())]
    assert b"".join(parts) == path.read_bytes().removeprefix(b"\xef\xbb\xbf")


BAD = {
    "not json\n": "is not JSON",
    '{"txt": 1}\n': 'has no string field "text"',
    "[1]\n": 'has no string field "text"',
    '{"text": "\\ud800"}\n': "half a surrogate pair",
}


@pytest.mark.parametrize("line", BAD)
@pytest.mark.parametrize("slice_bytes", [100, 10**6])
def test_a_bad_line_is_rejected_by_file_and_line_or_counted(tmp_path: Path, line: str, slice_bytes: int) -> None:
    path = lines(tmp_path / "a.jsonl", TEXTS[:20])
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:7], line, "\n", *rows[7:], line]))
    with pytest.raises(DataError, match=r"a\.jsonl:8\b.*" + BAD[line]):
        tokenized(tmp_path, path, slice_bytes=slice_bytes)
    assert not (tmp_path / "out.idx").exists()
    report = make_token_file([path], tmp_path / "kept", skip_bad=True, workers=1, slice_bytes=slice_bytes)
    assert (report.counts.skipped, texts_of(tmp_path / "kept")) == (2, TEXTS[:20])
    assert "a.jsonl:8" in str(report.counts.first_bad)


@pytest.mark.parametrize(("name", "head"), [("a.jsonl", b'{"text": "'), ("a.txt", b"")])
def test_a_line_that_is_not_utf8(tmp_path: Path, name: str, head: bytes) -> None:
    tail = b'"}\n' if head else b"\n"
    (tmp_path / name).write_bytes(b"".join(head + text + tail for text in (b"one", b"\xff\xfe", b"three")))
    with pytest.raises(DataError, match=rf"{name}:2: byte 0xff is not UTF-8"):
        tokenized(tmp_path, tmp_path / name)
    report = make_token_file([tmp_path / name], tmp_path / "kept", skip_bad=True, workers=1)
    words = "".join(texts_of(tmp_path / "kept")).replace("\n", "")
    assert (report.counts.skipped, words) == (1, "onethree")


def test_a_second_attempt_continues_where_the_first_stopped(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = make_token_file([corpus], tmp_path / "straight", workers=1, slice_bytes=300)
    real, calls = tokenize.tokenize_slice, []

    def stopping(*job: Any) -> Any:
        calls.append(job)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*job)

    monkeypatch.setattr(tokenize, "tokenize_slice", stopping)
    with pytest.raises(KeyboardInterrupt):
        tokenized(tmp_path, corpus)
    assert not (tmp_path / "out.idx").exists()
    torn = tmp_path / "out.parts" / "00000001.ids"
    torn.write_bytes(torn.read_bytes()[:-2])
    report = tokenized(tmp_path, corpus)
    assert report.resumed == 2 and len(calls) == 4 + report.parts - 2
    assert report.counts == straight.counts
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "straight.bin").read_bytes()


def test_parts_of_other_input_or_settings_are_not_mixed(tmp_path: Path, corpus: Path) -> None:
    bad = tmp_path / "b.jsonl"
    bad.write_text("{}\n")
    for paths in ([corpus, bad], [bad]):
        with pytest.raises(DataError):
            tokenized(tmp_path, *paths)
    with pytest.raises(DataError, match="has parts of other input or settings"):
        tokenized(tmp_path, corpus)


def test_the_command_reports_its_output_and_training_reads_it(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, record = tmp_path / "deep" / "out", tmp_path / "r.json"
    assert main(["tokenize", str(corpus), "--out", str(out), "--workers", "1", "--json", str(record)]) == 0
    text = capsys.readouterr().out
    assert "60 documents" in text and "tokens/s" in text
    tokens = json.loads(record.read_text())["counts"]["tokens"]
    data = build_dataset(source="bin", paths=[out], sequence_length=16, vocab=256, validation_fraction=0.1)
    splits = (data.train.stream, data.validation.stream)
    assert sum(map(len, splits)) == tokens and sum(split.documents for split in splits) == 60
    assert main(["tokenize", str(corpus), "--out", str(out)]) == 78
    assert "out.idx exists; use another prefix" in capsys.readouterr().err


def test_a_vocabulary_smaller_than_the_ids_is_rejected(tmp_path: Path, corpus: Path) -> None:
    tokenized(tmp_path, corpus)
    data = build_dataset(source="bin", paths=[tmp_path / "out"], sequence_length=8, vocab=255, validation_fraction=0)
    with pytest.raises(DataError, match=r"255 in .*out.*outside model\.vocab=255"):
        data.train.samples.check_ids(255)


def test_inputs_that_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    for name, message in {
        "gone.txt": "cannot be read",
        "a.csv": "is not a known kind of file",
        "empty.txt": "is empty",
    }.items():
        with pytest.raises(DataError, match=message):
            tokenized(tmp_path, tmp_path / name)


EMPTY = {
    "none.txt": "",
    "none.jsonl": "",
    "blank.jsonl": "\n  \n\t\n",
    "nothing.jsonl": '{"text": ""}\n{"text": ""}\n',
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("place", ["deep/er/out", "out"])
def test_an_output_without_tokens_is_rejected_and_nothing_is_left(tmp_path: Path, name: str, place: str) -> None:
    (tmp_path / name).write_text(EMPTY[name])
    for skip, message in ((False, "is empty|has no tokens"), (True, rf"has no tokens \(1 empty file, .*{name}\)")):
        with pytest.raises(DataError, match=message):
            make_token_file([tmp_path / name], tmp_path / place, skip_bad=skip, workers=1)
        assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_file_stops_a_folder_or_is_skipped_and_counted(
    tmp_path: Path, corpus: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / name).write_text(EMPTY[name])
    corpus.rename(folder / "z.jsonl")
    with pytest.raises(DataError, match=rf"{name}: is empty"):
        make_token_file([folder], tmp_path / "out", workers=1)
    assert not (tmp_path / "out.idx").exists() and not (tmp_path / "out.bin").exists()
    given = ["--out", str(tmp_path / "out"), "--workers", "1", "--on-bad-line", "skip"]
    assert main(["tokenize", str(folder), *given]) == 0
    assert f"skipped   1 empty file, the first: {folder / name}" in capsys.readouterr().out
    assert texts_of(tmp_path / "out") == TEXTS


def test_empty_documents_among_others_are_left_out(tmp_path: Path) -> None:
    report = tokenized(tmp_path, lines(tmp_path / "a.jsonl", ["one", "", "two", ""]))
    assert (texts_of(tmp_path / "out"), report.counts.documents, report.empty) == (["one", "two"], 2, 0)


def test_a_file_of_bad_lines_alone_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("not json\n" * 3)
    with pytest.raises(DataError, match=r"a\.jsonl:1: is not JSON"):
        tokenized(tmp_path, tmp_path / "a.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(DataError, match=r"has no tokens \(3 bad lines, the first: .*a\.jsonl:1: is not JSON"):
        tokenized(tmp_path, tmp_path / "a.jsonl", skip_bad=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_parts_before_a_bad_line_serve_an_attempt_that_skips_it_and_not_the_reverse(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", TEXTS[:30])
    path.write_text(path.read_text() + "not json\n")
    with pytest.raises(DataError, match="is not JSON"):
        tokenized(tmp_path, path)
    slices = plan_slices([path], 300)
    settings = Settings("byte", "", "<u2", "text", True)
    tokenize_slice(slices[-1], settings, SliceOutput(str(tmp_path / "out.parts" / f"{len(slices) - 1:08}")))
    with pytest.raises(DataError, match="is not JSON"):
        tokenized(tmp_path, path)
    report = tokenized(tmp_path, path, skip_bad=True)
    assert report.resumed == report.parts and texts_of(tmp_path / "out") == TEXTS[:30]


def test_text_without_tokens_makes_no_output(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(" \n\t\n")
    with pytest.raises(DataError, match="has no tokens"):
        tokenized(tmp_path, tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "tokenizer.json"]
    tokenized(tmp_path, tmp_path / "a.txt")
    assert texts_of(tmp_path / "out") == [" \n\t\n"], "blanks are text for bytes, as they are in training"


@pytest.mark.parametrize("groups", [0, 1])
def test_parquet_without_rows(tmp_path: Path, groups: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    with parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for _ in range(groups):
            writer.write_table(table)
    for skip in (False, True):
        with pytest.raises(DataError, match=r"is empty|has no tokens"):
            tokenized(tmp_path, tmp_path / "a.parquet", skip_bad=skip)
        assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    report = tokenized(tmp_path, tmp_path / "a.parquet", lines(tmp_path / "b.jsonl", TEXTS), skip_bad=True)
    assert (report.empty, texts_of(tmp_path / "out")) == (1, TEXTS)


def test_parquet_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": [*TEXTS[:9], None]}), path, row_group_size=4)
    with pytest.raises(DataError, match=r"no column 'text'; use --field with one of body"):
        tokenized(tmp_path, path)
    with pytest.raises(DataError, match="row 2 of row group 3 has no text in column 'body'"):
        make_token_file([path], tmp_path / "no", field="body", workers=1)
    report = make_token_file([path], tmp_path / "yes", field="body", skip_bad=True, workers=1)
    assert (report.counts.skipped, report.parts, texts_of(tmp_path / "yes")) == (1, 3, TEXTS[:9])


def test_ids_of_a_large_vocabulary_take_four_bytes(tmp_path: Path, corpus: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {f"w{n}": n for n in range(70_001) if n != 40_000} | {"number": 70_001, "<unk>": 40_000}
    model = tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenized(tmp_path, corpus, tokenizer=str(tmp_path / "tokenizer.json"))
    code, documents = read_by_hand(tmp_path / "out")
    assert code == 4 and len(documents) == 60
    assert all(ids[0] == 70_001 and 40_000 in ids for ids in documents)
