"""Which rows a run learns from: by columns, by a function, each once, not too long and not too short; all of it counted and told."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config import ConfigError, load_config
from hybridflow.data import (
    DataError,
    DataSettings,
    PromptPool,
    SFTLoader,
    build_character_tokenizer,
    files,
    list_filter_sources,
    read_prompts,
)
from hybridflow.data.sources import Rows, read_rows
from hybridflow.flow.plan import plan_rl, plan_sft
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.rl_job import RLConfig, read_rl_inputs
from hybridflow.flow.sft_job import SFTConfig, read_sft_inputs

TOKENIZER = build_character_tokenizer("0123456789+=abcdefghijklmnopqrstuvwxyz ")
ROWS = [
    {"prompt": "1+1=", "response": "2", "split": "train", "level": 1, "tags": ["a"]},
    {"prompt": "2+2=", "response": "4", "split": "train", "level": 2, "tags": ["b"]},
    {"prompt": "1+1=", "response": "3", "split": "train", "level": 3, "tags": ["a"]},
    {"prompt": "3+3=", "response": None, "split": "test", "level": 4, "tags": ["c"]},
    {"prompt": "5+5=", "response": "10", "split": "train", "level": None, "tags": ["b"]},
    {"prompt": "2+2=", "response": "4", "split": "train", "level": 5, "tags": ["b"]},
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Six rows in chunks of two, one of them incomplete."""
    monkeypatch.setattr(files, "CHUNK_ROWS", 2)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "rows.jsonl"


def read(data: str, use: str = "sft", **settings: Any) -> Rows:
    return read_rows(DataSettings(files=(data,), **settings), use)


def lines(rows: Rows) -> list[int]:
    """The lines of the file that are kept."""
    return rows.place[:, 1].tolist()


def loader(data: str, seed: int = 0, **settings: Any) -> SFTLoader:
    return SFTLoader(DataSettings(files=(data,), **({"shuffle": False} | settings)), TOKENIZER, seed=seed)


def counts(source: SFTLoader | PromptPool) -> dict[str, float]:
    """Counts that are not 0."""
    values = {name.removeprefix("data/rows_"): metric.value for name, metric in source.metrics().items()}
    return {name: value for name, value in values.items() if value and not name.startswith("data/")}


# By columns.


def test_a_value_of_short_floats_is_found_as_near_as_they_have_it(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "response": ["c", "d"], "score": pa.array([0.1, 0.2], pa.float32())})
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = read(str(tmp_path / "rows.parquet"), keep_where={"score": 0.1})
    assert rows.table.column("prompt").to_pylist() == ["a"]


def test_a_file_of_the_user_may_have_dataclasses_and_what_it_raises_is_told(data: str) -> None:
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Kind:\n    name: str\n"
    Path("filters.py").write_text(head + "def keep(response):\n    return Kind(response).name == '2'\n")
    assert read(data, on_bad_row="skip", keep_function="filters.py:keep").left_out["filtered"] == 4
    Path("filters.py").write_text("raise KeyError('level')\n")
    with pytest.raises(
        ConfigError,
        match=r"^data.keep_function: 'filters.py:keep' cannot be loaded \(KeyError: 'level'\); correct the file$",
    ):
        read(data, on_bad_row="skip", keep_function="filters.py:keep")


@pytest.mark.parametrize(
    ("keep_where", "kept"),
    [
        ({"split": "train"}, [1, 2, 3, 5, 6]),
        ({"split": "train", "level": [1, 2, 4]}, [1, 2]),
        ({"split": ["train"], "level": None}, [5]),
        ({"split": "train", "level": [None, 3]}, [3, 5]),
        ({"split": "train", "level": 2.0}, [2]),
    ],
)
def test_rows_are_kept_by_the_values_of_columns(data: str, keep_where: dict, kept: list[int]) -> None:
    rows = read(data, keep_where=keep_where)
    assert lines(rows) == kept
    assert rows.table.to_pylist() == [ROWS[line - 1] for line in kept]
    assert rows.left_out == {"skipped": 0, "unmatched": 6 - len(kept), "filtered": 0, "duplicate": 0}


@pytest.mark.parametrize(
    ("keep_where", "message"),
    [
        ({"kind": 1}, "^data.keep_where: there is no column 'kind'; the columns are prompt, response, split, level, tags$"),
        ({"level": "2"}, "^data.keep_where.level is '2', which the column 'level' of int64 cannot have; give one of its values"),
        ({"level": [1, 1.5]}, r"^data.keep_where.level is \[1, 1.5\], which"),
        ({"level": True}, "^data.keep_where.level is True, which"),
        ({"split": []}, r"^data.keep_where.split is \[\], which"),
        ({"tags": ["a"]}, r"^data.keep_where.tags is \['a'\], which the column 'tags' of list"),
    ],
)  # fmt: skip
def test_values_that_a_column_cannot_have_are_refused(data: str, keep_where: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(data, keep_where=keep_where)


def test_a_row_that_is_left_out_by_its_columns_need_not_be_complete(data: str) -> None:
    with pytest.raises(DataError, match="line 4: it has no 'response'"):
        read(data)
    assert lines(read(data, keep_where={"split": "train"})) == [1, 2, 3, 5, 6]


# By a function.


def write_filter(body: str, parameters: str = "response, level=0") -> str:
    Path("filters.py").write_text(f"def keep({parameters}):\n    {body}\n")
    return "filters.py:keep"


def test_rows_are_kept_by_a_function_of_their_columns(data: str) -> None:
    name = write_filter("return len(response) == 1 and level != 5 and tags != ['c']", "response, *, level, tags")
    rows = read(data, keep_where={"split": "train"}, keep_function=name)
    assert lines(rows) == [1, 2, 3] and rows.left_out["filtered"] == 2 and rows.left_out["unmatched"] == 1


def test_a_function_is_given_messages_as_a_list(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"talk": talk * number}) + "\n" for number in (1, 2, 3)))
    (tmp_path / "filters.py").write_text("def keep(talk):\n    return len(talk) == 4 and talk[-1]['content'] == 'b'\n")
    rows = read(str(path), messages_column="talk", keep_function=f"{tmp_path}/filters.py:keep")
    assert lines(rows) == [2]


@pytest.mark.parametrize(
    ("body", "parameters", "message"),
    [
        ("return 1 / (level - 2) < 9", "level", r"^rows.jsonl, line 2: data.keep_function 'filters.py:keep' fails on it "
         r"\(ZeroDivisionError: division by zero\); mend the function$"),
        ("return response", "response", "^rows.jsonl, line 1: data.keep_function 'filters.py:keep' gives '2' for it; give true or false$"),
        ("return None", "response", "gives None for it; give true or false$"),
        ("return True", "kind", "^data.keep_function: its parameter 'kind' is no column; the columns are level, prompt, "),
        ("return True", "", "^data.keep_function: 'filters.py:keep' takes no column; name columns as its parameters: prompt, "),
        ("return True", "response, /", "^data.keep_function: 'filters.py:keep': its parameter 'response' is positional-only"),
        ("return (", "response", "^data.keep_function: 'filters.py:keep' cannot be loaded .*; correct the file$"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_used_is_told_in_one_sentence(
    data: str, body: str, parameters: str, message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        read(data, on_bad_row="skip", keep_function=write_filter(body, parameters))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["keep", "none.py:keep", "no.such.module:keep", "filters.py:keep", "filters.py:keeps"])
def test_a_function_that_is_not_there(data: str, name: str) -> None:
    Path("filters.py").write_text("keeps = 3\n")
    with pytest.raises(ConfigError, match=rf"^data.keep_function: .*'{name.partition(':')[0]}") as caught:
        read(data, on_bad_row="skip", keep_function=name)
    assert "\n" not in str(caught.value)


def test_the_source_of_a_function_is_recorded_with_a_run(data: str) -> None:
    name = write_filter("return True")
    digest = hashlib.sha256(Path("filters.py").read_bytes()).hexdigest()
    assert list_filter_sources(DataSettings(files=(data,), keep_function=name)) == {"data.keep_function": digest}
    assert list_filter_sources(DataSettings(files=(data,))) == list_filter_sources(None) == {}


# Each once.


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ([], [1, 2, 3, 5, 6]),
        (["prompt"], [1, 2, 5]),
        (["prompt", "response"], [1, 2, 3, 5]),
        (["prompt", "response", "level"], [1, 2, 3, 5, 6]),
        (["tags"], [1, 2]),
    ],
)
def test_the_first_of_equal_rows_is_kept(data: str, columns: list[str], kept: list[int]) -> None:
    rows = read(data, keep_where={"split": "train"}, deduplicate_by=columns)
    assert lines(rows) == kept and rows.left_out["duplicate"] == 5 - len(kept)


def test_values_are_not_run_together(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    pairs = [("a", "bc"), ("ab", "c"), ("", "abc"), ('a", "b', "c"), ("a", 'b", "c'), ("a", "bc")]
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))
    assert lines(read(str(path), deduplicate_by=["prompt", "response"])) == [1, 2, 3, 4, 5]


def test_rows_are_told_apart_over_files_and_by_chats_and_times(tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": "b"}] for text in "aba"]
    stamps = pa.array([1, 1, 2], pa.timestamp("s"))
    pq.write_table(pa.table({"messages": talks, "at": stamps}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": talks[1:], "at": stamps[1:]}), tmp_path / "b.parquet")
    by_chat = read(f"{tmp_path}/*.parquet", deduplicate_by=["messages"])
    assert by_chat.place.tolist() == [[0, 1], [0, 2]]
    by_both = read(f"{tmp_path}/*.parquet", deduplicate_by=["messages", "at"])
    assert by_both.place.tolist() == [[0, 1], [0, 2], [0, 3]]


def test_filters_come_before_duplicates(data: str) -> None:
    name = write_filter("return response != '2'", "response")
    rows = read(data, keep_where={"split": "train"}, keep_function=name, deduplicate_by=["prompt"])
    assert lines(rows) == [2, 3, 5]  # The first `1+1=` is filtered, so the second is the first.
    assert rows.left_out == {"skipped": 0, "unmatched": 1, "filtered": 1, "duplicate": 1}


def test_a_column_to_deduplicate_by_must_be_there(data: str) -> None:
    with pytest.raises(
        ConfigError, match="^data.deduplicate_by: there is no column 'question'; the columns are prompt"
    ):
        read(data, on_bad_row="skip", deduplicate_by=["question"])


# Counted, told, and the same after a stop.


def test_what_is_left_out_is_counted_and_told_in_one_line(data: str, caplog: pytest.LogCaptureFixture) -> None:
    name = write_filter("return response != '10'", "response")
    with caplog.at_level(logging.WARNING):
        rows = loader(
            data,
            on_bad_row="skip",
            keep_where={"level": [1, 2, 3, 4, None]},
            keep_function=name,
            deduplicate_by=["prompt"],
        )
    told = "2 of 6 rows (left out: 1 by data.on_bad_row, 1 by data.keep_where, 1 by data.keep_function, 1 by data.deduplicate_by)"
    assert [record.getMessage() for record in caplog.records] == [f"data: {told} of rows.jsonl"]
    assert rows.describe() == told and rows.num_rows == 2
    expected = {"skipped": 1, "unmatched": 1, "filtered": 1, "duplicate": 1}
    assert counts(rows) == expected
    rows.take(5)
    assert counts(rows) == expected


def test_nothing_is_told_where_nothing_is_left_out(data: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = PromptPool(DataSettings(files=(data,), rename={"response": "gold"}), TOKENIZER)
    assert rows.describe() == "6 rows" and caplog.records == [] and counts(rows) == {}
    limited = PromptPool(
        DataSettings(files=(data,), rename={"response": "gold"}, max_tokens=9, min_tokens=2), TOKENIZER
    )
    assert limited.describe() == "6 rows; over 9 tokens: drop; under 2: drop"


def test_filters_that_keep_nothing_are_an_error(data: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^data.files: no row can be used, 0 of 6 rows \(left out: 6 by data.keep_where\) of rows.jsonl;",
    ):
        read(data, keep_where={"split": "valid"})


FILTERS: dict[str, Any] = {"keep_where": {"split": "train"}, "deduplicate_by": ["prompt", "response"], "max_tokens": 7}


@pytest.mark.parametrize("stop", range(9))
def test_a_filtered_run_goes_on_as_if_it_had_not_stopped(data: str, stop: int) -> None:
    straight, stopped = (loader(data, seed=3, shuffle=True, **FILTERS) for _ in range(2))
    stopped.take(stop)
    resumed = loader(data, seed=3, shuffle=True, **FILTERS)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    straight.take(stop)
    assert resumed.take(7).equals(straight.take(7))
    assert resumed.state() == straight.state() and resumed.metrics() == straight.metrics()
    assert (
        straight.state()["counts"]["dropped"] > 0 and counts(resumed)["unmatched"] == counts(resumed)["duplicate"] == 1
    )


def test_a_stopped_run_refuses_other_filters_also_where_they_keep_as_many_rows(data: str) -> None:
    name = write_filter("return response in ('2', '4')", "response")
    first = loader(data, on_bad_row="skip", keep_function=name)
    write_filter("return response in ('3', '4')", "response")
    second = loader(data, on_bad_row="skip", keep_function=name)
    assert first.num_rows == second.num_rows == 3
    with pytest.raises(
        ConfigError,
        match="^data.files: rows.jsonl do not hold the rows .* data.keep_function and data.deduplicate_by of then",
    ):
        second.load_state(first.state())


def test_a_run_of_before_there_were_filters_goes_on(data: str) -> None:
    rows = loader(data, on_bad_row="skip")
    state = rows.state()
    assert state["fingerprint"] == hashlib.sha256(hashlib.sha256(Path(data).read_bytes()).digest()).hexdigest()
    del state["counts"]["short"]
    rows.load_state(state)
    assert rows.metrics()["data/rows_short"].value == 0


def test_held_out_prompts_are_filtered_too_and_told_of(data: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = DataSettings(files=(data,), rename={"response": "gold"}, keep_where={"split": "test"})
    assert read_prompts(settings, TOKENIZER).pylist("prompt") == ["3+3="]
    caplog.clear()
    Path(data).write_text("".join(json.dumps({"prompt": "1" * n}) + "\n" for n in range(1, 7)))
    cut = DataSettings(files=(data,), min_tokens=3, max_tokens=5)
    assert read_prompts(cut, TOKENIZER).pylist("prompt") == ["11", "111", "1111"]
    assert caplog.records[-1].getMessage() == f"data: of the prompts of {data}, 2 dropped, 1 short; 3 are left"


# Too short, too long.


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """Rows of 5, 6, ... 9 tokens: BOS, two of the prompt, the response, EOS."""
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}=", "response": "abcdefg"[:n]}) + "\n" for n in range(1, 6)))
    return str(path)


def show(rows: SFTLoader, count: int) -> list[str]:
    """Rows as text, with `|` before what is learned."""
    batch = rows.take(count)
    found = []
    for tokens, mask in zip(batch.pylist("tokens"), batch.pylist("loss_mask"), strict=True):
        start = mask.index(1)
        assert mask == [0] * start + [1] * (len(mask) - start)
        found.append(f"{TOKENIZER.decode(tokens[:start])}|{TOKENIZER.decode(tokens[start:])}")
    return found


def test_short_rows_are_left_out_and_counted(lengths: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = loader(lengths, min_tokens=8, epochs=2)
    assert show(rows, 9) == ["<bos>4=|abcd<eos>", "<bos>5=|abcde<eos>"] * 2
    assert counts(rows) == {"short": 6}
    assert [record.getMessage() for record in caplog.records] == [
        f"data: {lengths}, line 1 is left out (5 tokens, less than data.min_tokens=8); further rows like it are only counted"
    ]


def test_an_example_is_cut_at_the_side_that_is_set(lengths: str) -> None:
    left = loader(lengths, max_tokens=6, on_long_row="truncate", truncation_side="left")
    # Its beginning goes, but for BOS: the end of the answer and EOS stay.
    assert show(left, 5) == [
        "<bos>1=|a<eos>",
        "<bos>2=|ab<eos>",
        "<bos>=|abc<eos>",
        "<bos>|abcd<eos>",
        "<bos>|bcde<eos>",
    ]
    assert counts(left) == {"truncated": 3}
    for side in ("right", "auto"):
        right = loader(lengths, max_tokens=6, on_long_row="truncate", truncation_side=side)
        assert show(right, 5) == ["<bos>1=|a<eos>", "<bos>2=|ab<eos>", "<bos>3=|abc", "<bos>4=|abc", "<bos>5=|abc"]
        assert counts(right) == {"truncated": 3}


def test_a_row_without_bos_is_cut_to_its_very_end(lengths: str) -> None:
    tokenizer = build_character_tokenizer("0123456789+=abcdefghijklmnopqrstuvwxyz ")
    tokenizer.backend_tokenizer.post_processor = None
    settings = DataSettings(
        files=(lengths,), max_tokens=3, on_long_row="truncate", truncation_side="left", shuffle=False
    )
    batch = SFTLoader(settings, tokenizer).take(5)
    assert [tokenizer.decode(tokens) for tokens in batch.pylist("tokens")][-2:] == ["cd<eos>", "de<eos>"]
    assert batch.pylist("loss_mask")[-1] == [0, 1, 1]  # Nothing predicts a row's first token.


def test_a_prompt_is_cut_at_the_side_that_is_set(data: str) -> None:
    def prompts(side: str) -> list[str]:
        settings = DataSettings(
            files=(data,),
            rename={"response": "gold"},
            max_tokens=3,
            on_long_row="truncate",
            truncation_side=side,
            shuffle=False,
        )
        pool = PromptPool(settings, TOKENIZER)
        tokens = pool.take(2).pylist("prompt_tokens")
        assert counts(pool) == {"truncated": 2}
        return [TOKENIZER.decode(row) for row in tokens]

    assert prompts("left") == prompts("auto") == ["<bos>1=", "<bos>2="]
    assert prompts("right") == ["<bos>1+", "<bos>2+"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"truncation_side": "left"}, "^data.truncation_side: 'left' says where rows are cut, and with data.on_long_row=drop none is; "
         "set data.on_long_row=truncate, or leave the side at auto$"),
        ({"min_tokens": 9, "max_tokens": 8}, "^data.min_tokens: 9 is more than data.max_tokens=8, and no row is both; lower it$"),
        ({"format": "chat", "on_long_row": "truncate", "truncation_side": "right", "rename": {"response": "gold"}},
         "^data.truncation_side: 'right' would cut off the words of a chat that ask the assistant to answer; set it to left or auto$"),
    ],
)  # fmt: skip
def test_lengths_that_contradict_themselves_are_refused(data: str, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(data, "prompt", **settings)


# In a run.


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_plan_tells_of_filters_and_a_run_records_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written = Path(write_sums(tmp_path, seed=0)["valid"])
    rows = [json.loads(line) for line in written.read_text().splitlines()[:20]]
    written.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[:4]]))
    name = write_filter("return answer != gone", f"answer, gone={rows[7]['answer']!r}")
    num_gone = sum(row["answer"] == rows[7]["answer"] for row in [*rows, *rows[:4]])
    model = "{model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, max_position_embeddings: 64}"
    overrides = [
        f"+model.config={model}", f"+model.tokenizer={tmp_path / 'tokenizer'}", f"data.files=[{written}]", "model.path=null",
        f"+data.keep_function={name}", "+data.deduplicate_by=[prompt]", "+data.max_tokens=40", "+data.on_long_row=error",
        f"run={{directory: {tmp_path}, name: first}}", "evaluation={data: null, stop_at: null}", "steps=2",
    ]  # fmt: skip
    if command == "sft":
        config = load_config(SFTConfig, config_name="quickstart_sft", overrides=overrides)
        sources, facts = read_sft_inputs(config).sources, plan_sft(config).facts
    else:
        config = load_config(RLConfig, config_name="quickstart_rl", overrides=overrides)
        sources, facts = read_rl_inputs(config).sources, plan_rl(config).facts
    assert sources["data.keep_function"] == hashlib.sha256(Path("filters.py").read_bytes()).hexdigest()
    assert facts["data"] == (
        f"{20 - num_gone} of 24 rows (left out: {num_gone} by data.keep_function, 4 by data.deduplicate_by); over 40 tokens: error"
    )
