"""Five hundred broken data files: each is told in one sentence that names the file, the line and a remedy; none is read in silence.

What a mutation breaks, and on which line, is known from how it is made, never from the reader.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config import ConfigError
from hybridflow.data import DataError, DataSettings, PromptPool, SFTLoader, build_character_tokenizer

Row = dict[str, Any]
USES = ("sft", "prompt", "chat", "chat prompt")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = build_character_tokenizer(string.printable)
TOKENIZER.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
TOKENIZER.chat_template = TEMPLATE


@dataclass(frozen=True)
class Broken:
    """A file that must be refused.

    name:  of the file.
    line:  of the bad row, from 1; None where the file as a whole is bad.
    about: what the sentence must speak of, as a pattern.
    """

    name: str
    content: bytes
    line: int | None
    about: str


def good_rows(use: str, count: int) -> list[Row]:
    """Rows that can be used, each different."""
    if use.startswith("chat"):
        question = {"role": "user", "content": "2+2?"}
        answers = [
            [] if use == "chat prompt" else [{"role": "assistant", "content": f"It is {i}."}] for i in range(count)
        ]
        return [
            {"messages": [{"role": "system", "content": "Be brief."}, question, *answer], "n": i}
            for i, answer in enumerate(answers)
        ]
    return [{"prompt": f"{i}+{i}=", "response": f"{2 * i}", "n": i} for i in range(count)]


def read(path: Path, use: str, **settings: Any) -> PromptPool | SFTLoader:
    """Reads the file and takes every row of it, as a run would."""
    renamed = {} if use != "prompt" else {"rename": {"response": "gold"}}
    chosen = DataSettings(files=(str(path),), epochs=1, **renamed, **settings)
    loader = (SFTLoader if use in ("sft", "chat") else PromptPool)(chosen, TOKENIZER)
    while loader.take(4).num_rows:
        pass
    return loader


# Rows: what one may hold in place of what it should.

NOT_TEXT: tuple[Any, ...] = (None, 3, 2.5, True, ["a"], {"a": 1}, [], {}, float("nan"), 10**30, "half \ud800")
NOT_MESSAGES: tuple[tuple[Any, str], ...] = (
    (None, "messages are nothing"),
    ("user: hi", "messages are text"),
    (7, "messages are int"),
    ([], "messages are an empty list"),
    ({"role": "user", "content": "hi"}, "messages are an object"),
    (["hi"], "message 0 is text"),
    ([None], "message 0 is nothing"),
    ([["role", "user"]], "message 0 is a list"),
    ([{"from": "human", "value": "hi"}], "message 0 has no role; its keys are from, value"),
    ([{"content": "hi"}], "message 0 has no role"),
    ([{"role": None, "content": "hi"}], "message 0 has no role"),
    ([{"role": "User", "content": "hi"}], "role 'User'"),
    ([{"role": "human", "content": "hi"}], "role 'human'"),
    ([{"role": "asistant", "content": "hi"}], "role 'asistant'"),
    ([{"role": 3, "content": "hi"}], "role 3"),
    ([{"role": ["user"], "content": "hi"}], r"role \['user'\]"),
    ([{"role": "user"}], "nothing for content"),
    ([{"role": "user", "content": None}], "nothing for content"),
    ([{"role": "user", "content": 5}], "int for content"),
    ([{"role": "user", "content": ["hi"]}], "a list for content"),
    ([{"role": "user", "content": "half \ud800"}, {"role": "assistant", "content": "hi"}], "messages"),
    (
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "half \ud800"},
            {"role": "user", "content": "hi"},
        ],
        "messages",
    ),
    ([{"role": "user", "content": {"type": "text", "text": "hi"}}], "an object for content"),
    ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "weight": 0.5}], "0.5 for weight"),
    ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "train": "yes"}], "'yes' for train"),
    ([{"role": "user", "content": "hi", "train": True}], "marked to be learned"),
)
NOT_OBJECTS: tuple[Any, ...] = ([], ["prompt", "a"], 3, -1.5, "text", True, None, [{"prompt": "a"}])


def break_value(rows: list[Row], use: str, place: int, draw: random.Random) -> str:
    """Puts a value of another kind where the text or the chat of a row should be."""
    if use.startswith("chat"):
        value, about = draw.choice(NOT_MESSAGES)
        rows[place]["messages"] = value
        return about
    key = draw.choice(("prompt", "response") if use == "sft" else ("prompt",))
    rows[place][key] = draw.choice(NOT_TEXT)
    return f"'{key}'"


def break_column(rows: list[Row], use: str, place: int, draw: random.Random) -> str:
    """Takes a needed column out of one row, or misspells it there."""
    key = "messages" if use.startswith("chat") else draw.choice(("prompt", "response") if use == "sft" else ("prompt",))
    value = rows[place].pop(key)
    if draw.random() < 0.5:
        rows[place][key + "s"] = value
    # A row without messages is asked for them alone, not for a prompt.
    return f"'{key}'"


def break_turns(rows: list[Row], use: str, place: int, draw: random.Random) -> str:
    """A chat that is right message by message and cannot be learned from, or answered; a prompt without a token."""
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
    if use == "chat":
        rows[place]["messages"] = draw.choice(
            ([user], [answer], [answer, user], [user, user, {"role": "tool", "content": "7"}])
        )
        return "none of its messages is an answer"
    if use == "chat prompt":
        rows[place]["messages"] = draw.choice(([user, answer], [answer], [user, answer, user, answer]))
        return "its last message is the assistant's"
    return break_value(rows, use, place, draw)


def break_extra(rows: list[Row], use: str, place: int, draw: random.Random) -> str:
    """Another column changes its kind from one row to the next."""
    rows[place]["n"] = draw.choice(("three", [1], {"a": 1}, 10**30, "\ud800"))
    return "'n'"


BREAKERS: tuple[Callable[[list[Row], str, int, random.Random], str], ...] = (
    break_value,
    break_column,
    break_turns,
    break_extra,
)


def encode_row(row: Any) -> bytes:
    return json.dumps(row).encode()


def break_row(use: str, draw: random.Random) -> Broken:
    """One row of a JSONL file, or of a list in a JSON file, is not what it should be."""
    rows = good_rows(use, 6)
    place = draw.randrange(1, 6)
    about = draw.choice(BREAKERS)(rows, use, place, draw)
    if draw.random() < 0.3:
        return Broken("rows.json", encode_row(rows), place + 1, about)
    return Broken("rows.jsonl", b"".join(encode_row(row) + b"\n" for row in rows), place + 1, about)


def break_line(use: str, draw: random.Random) -> Broken:
    """The bytes of one line are no row."""
    lines = [encode_row(row) for row in good_rows(use, 6)]
    place = draw.randrange(6)
    line = lines[place]
    cut = draw.randrange(1, len(line) - 1)
    lines[place], about = draw.choice(
        (
            (line[:cut], "not JSON"),
            (line[cut:], "not JSON|not an object"),
            (line + line, "not JSON"),
            (line.replace(b'"', b"'"), "not JSON"),
            (line.replace(b":", b"="), "not JSON"),
            (line[:-1] + b",}", "not JSON"),
            (line[:3] + bytes([draw.choice((0x80, 0xC3, 0xFF, 0xFE))]) + line[3:], "not JSON"),
            (line[:3] + b"\x00" + line[3:], "not JSON"),
            (b"prompt,response", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (encode_row(draw.choice(NOT_OBJECTS)), "not an object"),
        )
    )
    name, pack = draw.choice((("rows.jsonl", bytes), ("rows.ndjson", bytes), ("rows.jsonl.gz", gzip.compress)))
    return Broken(name, pack(b"".join(line + b"\n" for line in lines)), place + 1, about)


def break_file(use: str, draw: random.Random) -> Broken:
    """A file that is not of its kind, or holds nothing to use."""
    rows = good_rows(use, 6)
    lines = b"".join(encode_row(row) + b"\n" for row in rows)
    table = pa.BufferOutputStream()
    pq.write_table(pa.table({key: pa.array([row[key] for row in rows]) for key in rows[0]}), table)
    parquet, packed, listed = table.getvalue().to_pybytes(), gzip.compress(lines), encode_row(rows)
    missing = ("messages" if use.startswith("chat") else "prompt").encode()
    return draw.choice(
        (
            Broken("rows.jsonl", b"", None, "hold no rows"),
            Broken("rows.jsonl", b"\n \n\t\n" * draw.randrange(1, 4), None, "hold no rows"),
            Broken("rows.json", b"[]", None, "hold no rows"),
            Broken("rows.jsonl", lines.replace(missing, b"question"), None, "there is no column"),
            Broken("rows.json", listed[: draw.randrange(2, len(listed) - 1)], None, "cannot be read"),
            Broken("rows.json", listed[:-1] + b",]", None, "cannot be read"),
            Broken("rows.jsonl.gz", packed[: draw.randrange(1, len(packed) - 1)], None, "cannot be read"),
            Broken("rows.jsonl.gz", lines, None, "cannot be read"),
            Broken("rows.parquet", parquet[: draw.randrange(0, len(parquet) - 1)], None, "cannot be read"),
            Broken("rows.parquet", lines, None, "cannot be read"),
            Broken("rows.jsonl", parquet, 1, "not JSON"),
            Broken("rows.csv", b"prompt,response\na,b\n", None, "of no kind that can be read"),
            Broken("rows.jsonl.zip", lines, None, "of no kind that can be read"),
        )
    )


def break_parquet(use: str, draw: random.Random) -> Broken:
    """A Parquet file whose column is of another kind, or whose row has none of it."""
    rows = good_rows(use, 6)
    place = draw.randrange(6)
    chat = use.startswith("chat")
    key = "messages" if chat else "prompt"
    values = [row[key] for row in rows]
    other, told = draw.choice(
        ((list(range(6)), "int64"), ([True] * 6, "bool"), ([["a"]] * 6, "list"), ([b"a"] * 6, "binary"))
    )
    holes = [None if index == place else value for index, value in enumerate(values)]
    column, line, about = draw.choice(
        ((other, 1, "messages are|message 0 is") if chat else (other, None, told), (holes, place + 1, key))
    )
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({key: column, **({} if chat else {"response": ["a"] * 6})}), file)
    return Broken("rows.parquet", file.getvalue().to_pybytes(), line, about)


def make(number: int) -> tuple[str, Broken]:
    draw = random.Random(number)
    use = USES[number % len(USES)]
    return use, draw.choice((break_row, break_row, break_row, break_line, break_line, break_file, break_parquet))(
        use, draw
    )


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_each_broken_file_is_one_sentence(tmp_path: Path, first: int) -> None:
    for number in range(first, first + 100):
        use, broken = make(number)
        path = tmp_path / f"{number}-{broken.name}"
        path.write_bytes(broken.content)
        with pytest.raises((ConfigError, DataError)) as caught:
            read(path, use)
        told = f"{number}, {use}: {caught.value}"
        message = str(caught.value)
        assert "\n" not in message and len(message) < 500, told
        assert path.name in message or re.match(r"data\.\w+_column: ", message), told
        assert re.search(broken.about, message), (broken.about, told)
        assert "; " in message, told
        if broken.line is not None:
            assert f", line {broken.line}: " in message, (broken.line, told)


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_a_bad_row_is_left_out_and_counted_where_that_is_set(tmp_path: Path, first: int) -> None:
    counted = 0
    for number in range(first, first + 50):
        use, broken = make(number)
        if broken.line is None or b"PAR1" in broken.content:
            continue
        path = tmp_path / f"{number}-{broken.name}"
        path.write_bytes(broken.content)
        loader = read(path, use, on_bad_row="skip")
        assert loader.metrics()["data/rows_skipped"].value == 1, (number, use, broken.about)
        assert loader.epoch == 1
        counted += 1
    assert counted > 20


@pytest.mark.parametrize("use", USES)
def test_rows_that_are_merely_unusual_are_read(tmp_path: Path, use: str) -> None:
    """What the mutations start from, and what looks odd and is right."""
    rows = good_rows(use, 6)
    rows[2]["n"] = None
    rows[3]["another"] = "x" * 10
    if use.startswith("chat"):
        rows[4]["messages"][1]["content"] = "long " * 2000
    else:
        rows[4]["prompt"] = "long " * 2000
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n\n".join(map(encode_row, rows)))
    loader = read(path, use)
    assert (loader.num_rows, loader.epoch, loader.metrics()["data/rows_skipped"].value) == (6, 1, 0)
