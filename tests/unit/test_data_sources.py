"""Rows from files: kinds, bad rows with their places, and columns."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config import ConfigError
from hybridflow.data import DataError, DataSettings, files
from hybridflow.data.messages import unpack_messages
from hybridflow.data.sources import Rows, read_rows

DATA = Path(os.environ.get("HYBRIDFLOW_DATA", Path(__file__).parents[3] / "shared" / "data"))
ROWS = [{"prompt": f"p{i}", "response": f"r{i}", "answer": i} for i in range(5)]


def write_lines(path: Path, lines: list[object]) -> str:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (gzip.open if path.suffix == ".gz" else open)(path, "wt").write(text)
    return str(path)


def read(*patterns: str | Path, use: str = "sft", **settings: object) -> Rows:
    return read_rows(DataSettings(files=tuple(map(str, patterns)), **settings), use)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_ROWS", 3)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.json.gz", "list.json", "list.json.gz", "a.parquet"]
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str, small_chunks: None) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif name.startswith("list"):
        (gzip.open if name.endswith(".gz") else open)(path, "wt").write("\n " + json.dumps(ROWS, indent=1))
    else:
        write_lines(path, ROWS)
    rows = read(path)
    assert rows.table.to_pylist() == ROWS
    assert [rows.where(row) for row in range(5)] == [f"{path}, line {line}" for line in range(1, 6)]
    assert rows.take([4, 0, 3, 3]).to_pylist() == [ROWS[4], ROWS[0], ROWS[3], ROWS[3]]
    assert rows.take([], ["prompt"]).to_pylist() == []


def test_globs_go_by_name_and_paths_by_the_order_given(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": name, "response": name}])
    rows = read(tmp_path / "c.jsonl", tmp_path / "[ab].jsonl")
    assert rows.table.column("prompt").to_pylist() == ["c", "a", "b"]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\r\n\n   \n" + json.dumps(ROWS[1]).encode())
    rows = read(path)
    assert rows.num_rows == 2 and rows.where(1) == f"{path}, line 4"


BAD = [
    ("{", "line 2: it is not JSON"),
    ("[1]", "line 2: it is list, not an object"),
    ('{"prompt": "a"}', "line 2: it has no 'response'"),
    ('{"prompt": null, "response": "b"}', "line 2: it has no 'prompt'"),
    ('{"prompt": 3, "response": "b"}', "line 2: its 'prompt' is 3, which does not fit the string of the rows before"),
    ('{"prompt": "a", "response": "b", "answer": "x"}', "line 2: its 'answer' is 'x', which does not fit the int64"),
    ('{"prompt": "a", "response": "b", "answer": 99999999999999999999}', "line 2: its 'answer' is 9999"),
    ('{"prompt": "\\ud800", "response": "b"}', "line 2: its 'prompt' is "),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_row_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [ROWS[0], line, ROWS[1]])
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"{path}, {message}" in str(caught.value)
    assert str(caught.value).endswith("correct the row, or set data.on_bad_row=skip to leave such rows out")


def test_bad_rows_are_skipped_and_counted_where_that_is_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, small_chunks: None
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [ROWS[0], *(line for line, _ in BAD), ROWS[1]])
    rows = read(path, on_bad_row="skip")
    assert rows.table.to_pylist() == ROWS[:2] and rows.left_out["skipped"] == len(BAD)
    assert rows.where(1) == f"{path}, line {len(BAD) + 2}"
    assert f"data: 2 of {len(BAD) + 2} rows (left out: {len(BAD)} by data.on_bad_row) of {path}" in caplog.text


def test_types_hold_over_chunks_and_files(tmp_path: Path, small_chunks: None) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*ROWS, ROWS[0] | {"answer": [1]}])
    with pytest.raises(DataError, match=r"line 6: its 'answer' is \[1\], which does not fit the int64"):
        read(path)
    one = write_lines(tmp_path / "b.jsonl", ROWS)
    pq.write_table(pa.Table.from_pylist([ROWS[0] | {"answer": "x"}]), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match="the files differ in the type of a column.*answer"):
        read(one, tmp_path / "c.parquet")


def test_numbers_widen_and_missing_values_are_null(tmp_path: Path, small_chunks: None) -> None:
    base = {"prompt": "a", "response": "b"}
    path = write_lines(
        tmp_path / "a.jsonl",
        [base, base, base, base | {"score": 1}, base | {"score": 0.5, "tags": []}, base | {"tags": ["x"]}],
    )
    table = read(path).table
    assert table.column("score").to_pylist() == [None, None, None, 1.0, 0.5, None]
    assert table.column("tags").to_pylist() == [None, None, None, None, [], ["x"]]


def test_text_that_looks_like_a_date_stays_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "2026-01-01", "response": "2026-01-01T00:00:00"}])
    assert read(path).table.to_pylist() == [{"prompt": "2026-01-01", "response": "2026-01-01T00:00:00"}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"response_column": "reply"},
            "data.response_column: there is no column 'reply'; set it to one of prompt, response, answer",
        ),
        ({"response_column": "answer"}, "data.response_column: column 'answer' is int64, not text"),
        ({"rename": {"reply": "x"}}, "data.rename: there is no column 'reply'"),
        ({"rename": {"answer": "prompt"}}, "data.rename: 'answer' cannot become 'prompt'"),
    ],
)
def test_settings_that_do_not_fit_the_columns(tmp_path: Path, settings: dict, message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=message):
        read(path, **settings)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.csv").write_text("prompt\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_text("PAR1")
    (tmp_path / "bad.json").write_text('[{"prompt": }]')
    whole = gzip.compress(json.dumps(ROWS[0]).encode() * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    for patterns, message in (
        ((tmp_path / "no*.jsonl",), "names no file"),
        ((path, tmp_path / "*.jsonl"), "a.jsonl' is named twice"),
        ((tmp_path / "a.csv",), "a.csv' is of no kind that can be read; give .jsonl"),
        ((tmp_path / "bad.parquet",), "bad.parquet' cannot be read"),
        ((tmp_path / "bad.json",), "bad.json' cannot be read: .*line 1"),
        ((tmp_path / "cut.jsonl.gz",), "cut.jsonl.gz' cannot be read"),
        ((tmp_path / "empty.jsonl",), "empty.jsonl hold no rows; give files with rows"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read(*patterns)
        assert "\n" not in str(caught.value)


def test_a_file_of_bad_rows_alone_is_an_error_also_where_they_are_skipped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "response": None}])
    with pytest.raises(ConfigError, match=r"no row can be used, 0 of 1 rows \(left out: 1 by data.on_bad_row\) of"):
        read(path, on_bad_row="skip")


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first = read(write_lines(tmp_path / "a.jsonl", ROWS)).fingerprint
    assert read(write_lines(tmp_path / "b.jsonl", ROWS)).fingerprint == first
    assert read(write_lines(tmp_path / "c.jsonl", [*ROWS[:4], ROWS[4] | {"answer": 5}])).fingerprint != first
    assert (
        read(tmp_path / "a.jsonl", tmp_path / "c.jsonl").fingerprint
        != read(tmp_path / "c.jsonl", tmp_path / "a.jsonl").fingerprint
    )


TALKS = [
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "user", "content": "c", "name": "Ann"}, {"role": "assistant", "content": "d"}],
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_keep_just_the_keys_they_have(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    lines = [{"talk": talk, "id": index} for index, talk in enumerate(TALKS)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(lines), path)
    else:
        write_lines(path, lines)
    for settings in ({"messages_column": "talk"}, {"rename": {"talk": "messages"}}):
        rows = read(path, **settings)
        assert rows.layout == "messages"
        assert [unpack_messages(text) for text in rows.table.column(rows.needed[0]).to_pylist()] == TALKS


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_bad_messages_name_their_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    lines = [{"messages": TALKS[0]}, {"messages": [{"role": "user", "content": "a"}]}, {"messages": TALKS[1]}]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(lines), path)
    else:
        write_lines(path, lines)
    with pytest.raises(DataError, match=rf"a.{kind}, line 2: none of its messages is an answer"):
        read(path)
    rows = read(path, on_bad_row="skip")
    assert rows.num_rows == 2 and rows.left_out["skipped"] == 1 and rows.where(1).endswith("line 3")


def test_the_format_says_what_a_row_is_made_from(tmp_path: Path) -> None:
    pairs = write_lines(tmp_path / "pairs.jsonl", ROWS)
    both = write_lines(tmp_path / "both.jsonl", [ROWS[0] | {"messages": TALKS[0]}])
    assert read(pairs).layout == "text" and read(pairs, format="chat").layout == "pair"
    assert read(both, format="chat").layout == "messages" and read(both, format="text").layout == "text"
    with pytest.raises(ConfigError, match="rows have both 'messages' and 'prompt'; set data.format=chat"):
        read(both)


def test_columns_that_a_batch_does_not_keep_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["a"]).dictionary_encode(),
            "response": pa.array(["b"], pa.large_string()),
            "image": pa.array([b"\x00"]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").table.to_pylist() == [{"prompt": "a", "response": "b"}]
    assert "the columns image are left out" in caplog.text


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not there")
def test_real_files() -> None:
    rows = read(DATA / "gsm8k/*.jsonl", prompt_column="question", response_column="answer")
    assert rows.num_rows == 1319 + 7473 and rows.where(1319).endswith("train.jsonl, line 1")
    rows = read(DATA / "mbpp/mbpp.jsonl", use="prompt", prompt_column="text")
    assert rows.num_rows == 974 and all(isinstance(test, str) for test in rows.table.column("test_list")[0].as_py())
    rows = read(DATA / "hh-rlhf/harmless-base-test.jsonl.gz", prompt_column="chosen", response_column="rejected")
    assert rows.num_rows == 2312
    with pytest.raises(ConfigError, match="data.prompt_column: column 'chosen' is struct"):
        read(DATA / "dpo/dpo_en_demo.json", prompt_column="chosen", response_column="rejected")
