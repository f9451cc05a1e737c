"""Batches over epochs: nothing lost, nothing twice, the same after a stop at any row."""

import json
import os
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.data import (
    DataError,
    DataSettings,
    PromptPool,
    SFTLoader,
    build_character_tokenizer,
    read_prompts,
)
from hybridflow.data.order import EpochOrder, permute
from hybridflow.types import RowState

DATA = Path(os.environ.get("HYBRIDFLOW_DATA", Path(__file__).parents[3] / "shared" / "data"))
TOKENIZER = build_character_tokenizer(string.printable)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """Seven rows, told apart by their prompt."""
    return write(
        tmp_path / "numbers.jsonl",
        [{"prompt": f"p{i}", "response": f"r{i}", "answer": i, "tags": ["t"] * i} for i in range(7)],
    )


def pool(path: str, seed: int = 0, **settings: object) -> PromptPool:
    return PromptPool(
        DataSettings(files=(path,), **({"rename": {"response": "gold"}} | settings)), TOKENIZER, seed=seed
    )


def loader(path: str, seed: int = 0, **settings: object) -> SFTLoader:
    return SFTLoader(DataSettings(files=(path,), **settings), TOKENIZER, seed=seed)


def iter_batches(rows: PromptPool | SFTLoader, size: int) -> Iterator[Batch]:
    while (batch := rows.take(size)).num_rows:
        yield batch


def texts(batch: Batch) -> list[str]:
    return [TOKENIZER.decode(tokens) for tokens in batch.pylist("tokens")]


# The order.


@given(st.integers(1, 40), st.integers(0, 2**63), st.lists(st.integers(0, 50), max_size=12), st.booleans())
def test_any_takes_give_one_stream_of_whole_epochs(num_rows: int, seed: int, counts: list[int], shuffle: bool) -> None:
    order = EpochOrder(num_rows, seed=seed, shuffle=shuffle)
    taken = np.concatenate([np.empty(0, np.int64), *(order.take(count) for count in counts)])
    whole = EpochOrder(num_rows, seed=seed, shuffle=shuffle).take(sum(counts))
    assert taken.tolist() == whole.tolist() and len(taken) == sum(counts)
    assert (order.epoch, order.position) == divmod(sum(counts), num_rows)
    for start in range(0, sum(counts) - num_rows + 1, num_rows):
        assert sorted(taken[start : start + num_rows].tolist()) == list(range(num_rows))


@given(st.integers(1, 40), st.integers(0, 99), st.integers(0, 120), st.integers(0, 50))
def test_an_order_goes_on_from_any_place(num_rows: int, seed: int, before: int, after: int) -> None:
    order = EpochOrder(num_rows, seed=seed)
    order.take(before)
    other = EpochOrder(num_rows, seed=seed)
    other.move_to(order.epoch, order.position)
    assert other.take(after).tolist() == order.take(after).tolist()


@given(st.integers(1, 20), st.integers(1, 4), st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_epochs_end(num_rows: int, epochs: int, counts: list[int]) -> None:
    order = EpochOrder(num_rows, seed=1, epochs=epochs)
    taken = [number for count in counts for number in order.take(count).tolist()]
    assert len(taken) == min(sum(counts), num_rows * epochs)


def test_the_permutations_are_these_for_ever() -> None:
    assert permute(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permute(8, 0, 1).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert permute(8, 1, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]


def test_permutations_are_even() -> None:
    places = Counter(
        (place, number) for epoch in range(600) for place, number in enumerate(permute(4, 5, epoch).tolist())
    )
    assert len(places) == 16 and all(100 < count < 200 for count in places.values())


# Examples.


def test_a_batch_of_examples(numbers: str) -> None:
    batch = loader(numbers, shuffle=False).take(3)
    assert batch.column_names == ("tokens", "loss_mask", "group_id", "state")
    assert texts(batch) == ["<bos>p0r0<eos>", "<bos>p1r1<eos>", "<bos>p2r2<eos>"]
    assert batch.pylist("loss_mask") == [[0, 0, 0, 1, 1, 1]] * 3
    assert batch.pylist("group_id") == [0, 1, 2] and batch.pylist("state") == [RowState.OK] * 3


def test_group_ids_never_repeat_and_epochs_are_counted(numbers: str) -> None:
    rows = loader(numbers)
    batches = [rows.take(5) for _ in range(4)]
    assert [i for batch in batches for i in batch.pylist("group_id")] == list(range(20))
    assert rows.epoch == 2
    seen = [text for batch in batches for text in texts(batch)]
    assert (
        sorted(seen[:7]) == sorted(seen[7:14]) == [f"<bos>p{i}r{i}<eos>" for i in range(7)] and seen[:7] != seen[7:14]
    )


def test_a_take_may_be_larger_than_the_data(numbers: str) -> None:
    batch = loader(numbers).take(50)
    assert batch.num_rows == 50 and max(Counter(texts(batch)).values()) == 8


def test_epochs_end_with_what_is_left_and_then_with_nothing(numbers: str) -> None:
    rows = loader(numbers, epochs=2)
    sizes = [rows.take(4).num_rows for _ in range(5)]
    assert sizes == [4, 4, 4, 2, 0] and rows.epoch == 2 and rows.state()["num_taken"] == 14
    empty = rows.take(4)
    assert (
        empty.column_names == ("tokens", "loss_mask", "group_id", "state")
        and empty.ragged("tokens").values.numel() == 0
    )
    resumed = loader(numbers, epochs=2)
    resumed.load_state(rows.state())
    assert resumed.take(4).num_rows == 0


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.integers(0, 9), max_size=5), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_resumed_run_is_the_run(numbers: str, before: list[int], after: list[int]) -> None:
    for make in (loader, pool):
        straight = make(numbers, seed=4, max_tokens=6)
        for count in before:
            straight.take(count)
        resumed = make(numbers, seed=4, max_tokens=6)
        resumed.load_state(json.loads(json.dumps(straight.state())))
        for count in after:
            assert resumed.take(count).equals(straight.take(count))
        assert resumed.state() == straight.state() and resumed.metrics() == straight.metrics()


def test_resume_at_the_border_of_an_epoch_starts_the_next(numbers: str) -> None:
    rows = loader(numbers)
    first = texts(rows.take(7))
    assert (rows.state()["epoch"], rows.state()["position"]) == (1, 0)
    resumed = loader(numbers)
    resumed.load_state(rows.state())
    second = texts(resumed.take(7))
    assert sorted(second) == sorted(first) and second != first


def test_resume_refuses_other_data_seed_or_order(numbers: str, tmp_path: Path) -> None:
    rows = loader(numbers, seed=1)
    rows.take(3)
    state = rows.state()
    other = write(tmp_path / "other.jsonl", [{"prompt": "a", "response": "b"}])
    for make, message in (
        (
            lambda: loader(other, seed=1),
            r"^data.files: .*other.jsonl do not hold the rows .* \(7 rows, sha256 \w{12}; now 1 rows, .*start a new run$",
        ),
        (lambda: loader(numbers, seed=2), "^seed: 2 is not the 1 "),
        (lambda: loader(numbers, seed=1, shuffle=False), "^data.shuffle: false is not the true "),
    ):
        with pytest.raises(ConfigError, match=message):
            make().load_state(state)


# Rows that are too long or bad.


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """Rows of 4, 5, ... 9 tokens: BOS, one of the prompt, the response, EOS."""
    return write(tmp_path / "lengths.jsonl", [{"prompt": str(n), "response": "x" * n} for n in range(1, 7)])


def test_long_rows_are_dropped_and_counted(lengths: str) -> None:
    rows = loader(lengths, max_tokens=6, shuffle=False)
    batch = rows.take(5)
    assert batch.lengths("tokens").tolist() == [4, 5, 6, 4, 5]
    assert rows.metrics()["data/rows_dropped"].value == 3 and rows.metrics()["data/rows_truncated"].value == 0
    assert batch.pylist("group_id") == list(range(5))


def test_long_examples_lose_their_end(lengths: str) -> None:
    rows = loader(lengths, max_tokens=6, on_long_row="truncate", shuffle=False)
    batch = rows.take(6)
    assert batch.lengths("tokens").tolist() == [4, 5, 6, 6, 6, 6]
    assert texts(batch)[5] == "<bos>6xxxx" and batch.pylist("loss_mask")[5] == [0, 0, 1, 1, 1, 1]
    assert rows.metrics()["data/rows_truncated"].value == 3


def test_an_example_cut_before_what_is_learned_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * 9, "response": "r"}, {"prompt": "p", "response": "r"}])
    rows = loader(path, max_tokens=6, on_long_row="truncate", shuffle=False)
    assert texts(rows.take(2)) == ["<bos>pr<eos>"] * 2
    assert rows.metrics()["data/rows_dropped"].value == 2


def test_long_prompts_lose_their_beginning_but_not_the_bos(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "0123456789"}])
    batch = pool(path, max_tokens=4, on_long_row="truncate", rename={}).take(1)
    assert TOKENIZER.convert_ids_to_tokens(batch.pylist("prompt_tokens")[0]) == ["<bos>", "7", "8", "9"]
    assert batch.pylist("prompt") == ["0123456789"]


def test_a_long_row_stops_where_that_is_set(lengths: str) -> None:
    with pytest.raises(
        DataError,
        match=r"lengths.jsonl, line 4: it has 7 tokens, more than data.max_tokens=6; raise that, or set data.on_long_row",
    ):
        loader(lengths, max_tokens=6, on_long_row="error", shuffle=False).take(4)


def test_rows_of_which_none_can_be_used_are_an_error_not_a_wait(lengths: str, tmp_path: Path) -> None:
    for epochs in (None, 1):
        with pytest.raises(
            ConfigError,
            match=r"none of the 6 rows of .*lengths.jsonl can be used \(6 dropped\); raise data.max_tokens$",
        ):
            loader(lengths, max_tokens=2, epochs=epochs).take(1)
    others = write(tmp_path / "others.jsonl", [{"prompt": str(n), "response": "x" * n} for n in (1, 2, 6)])
    with pytest.raises(ConfigError, match=r"\(1 dropped, 2 short\); raise data.max_tokens and lower data.min_tokens$"):
        loader(others, min_tokens=6, max_tokens=7).take(4)


def test_a_row_that_only_its_tokens_show_to_be_bad(tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer("ab")
    tokenizer.backend_tokenizer.post_processor = None
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "", "response": ""}])
    with pytest.raises(
        DataError,
        match=r"a.jsonl, line 2: it has no token that is learned; correct the row, or set data.on_bad_row=skip",
    ):
        SFTLoader(DataSettings(files=(path,)), tokenizer).take(2)
    rows = SFTLoader(DataSettings(files=(path,), on_bad_row="skip"), tokenizer)
    assert rows.take(3).num_rows == 3 and rows.metrics()["data/rows_skipped"].value >= 2


def test_lines_that_cannot_be_read_are_counted_as_skipped(tmp_path):
    path = tmp_path / "torn.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": \n{"prompt": "a", "response": null}\n')
    rows = SFTLoader(DataSettings(files=(str(path),), on_bad_row="skip"), build_character_tokenizer("ab"))
    assert rows.take(2).num_rows == 2
    assert rows.metrics()["data/rows_skipped"].value == 2


# Prompts.


def test_a_batch_of_prompts_carries_its_rows(numbers: str) -> None:
    prompts = pool(numbers, seed=3)
    batch = prompts.take(4)
    assert batch.column_names == ("prompt_id", "group_id", "prompt", "prompt_tokens", "gold", "answer", "tags")
    assert prompts.column_names == ("gold", "answer", "tags") and prompts.num_rows == 7
    ids = batch.pylist("prompt_id")
    assert batch.pylist("prompt") == [f"p{i}" for i in ids] and batch.pylist("answer") == ids
    assert batch.pylist("gold") == [f"r{i}" for i in ids] and batch.pylist("tags") == [["t"] * i for i in ids]
    assert [TOKENIZER.decode(tokens) for tokens in batch.pylist("prompt_tokens")] == [f"<bos>p{i}" for i in ids]
    assert batch.pylist("group_id") == [0, 1, 2, 3] and prompts.take(2).pylist("group_id") == [4, 5]
    assert (
        prompts.list_values("answer") == [*"0123456"]
        and prompts.list_values("prompt") == prompts.list_values(None) == []
    )


def test_a_column_named_like_one_of_the_rollout_is_refused_with_the_remedy(numbers: str) -> None:
    with pytest.raises(ConfigError, match="a column 'response'.*set data.rename.response to another name"):
        pool(numbers, rename={})


def test_the_prompt_may_be_another_column(numbers: str) -> None:
    batch = pool(
        numbers, rename={"prompt": "question", "response": "gold"}, prompt_column="question", shuffle=False
    ).take(2)
    assert batch.pylist("prompt") == batch.pylist("question") == ["p0", "p1"]


def test_prompts_from_messages(tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer(string.printable)
    turns = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}a:{% endif %}"
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "2+2"}], "answer": "4"}])
    batch = PromptPool(DataSettings(files=(path,)), tokenizer).take(1)
    assert batch.pylist("prompt") == ["u:2+2<eos>a:"] and batch.pylist("answer") == ["4"]
    assert json.loads(batch.pylist("messages")[0]) == [{"role": "user", "content": "2+2"}]


# Every row once.


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8, 100])
def test_one_pass_in_order_gives_every_row_once(numbers: str, size: int) -> None:
    batches = list(iter_batches(pool(numbers, shuffle=False, epochs=1), size))
    assert [i for batch in batches for i in batch.pylist("prompt_id")] == list(range(7))
    assert all(batch.num_rows == size for batch in batches[:-1]) and 0 < batches[-1].num_rows <= size
    examples = iter_batches(loader(numbers, shuffle=False, epochs=1), size)
    assert [text for batch in examples for text in texts(batch)] == [f"<bos>p{i}r{i}<eos>" for i in range(7)]


def test_prompts_are_read_all_or_the_first_ones_after_texts(numbers: str) -> None:
    settings = DataSettings(files=(numbers,), rename={"response": "gold"})
    assert read_prompts(settings, TOKENIZER).pylist("prompt_id") == list(range(7))
    batch = read_prompts(settings, TOKENIZER, texts=["2+2="], max_rows=2)
    assert batch.pylist("prompt") == ["2+2=", "p0", "p1"] and batch.pylist("group_id") == [0, 1, 2]
    assert batch.pylist("answer") == [None, 0, 1]
    alone = read_prompts(None, TOKENIZER, texts=["2+2=", ""])
    assert alone.pylist("prompt_tokens")[1] == [TOKENIZER.bos_token_id] and alone.num_rows == 2


# Real rows.


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not there")
def test_real_rows_are_learned_with_their_end() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "stories260K")
    settings = DataSettings(files=(str(DATA / "gsm8k/test.jsonl"),), prompt_column="question", response_column="answer")
    batch = SFTLoader(settings, tokenizer, seed=1).take(100)
    for tokens, mask in zip(batch.pylist("tokens"), batch.pylist("loss_mask"), strict=True):
        assert tokens[0] == 1 and tokens.count(1) == 1 and tokens[-1] == 2 and mask[-1] == 1 and mask[0] == 0
        assert "####" in tokenizer.decode([token for token, kept in zip(tokens, mask, strict=True) if kept])
        assert mask == sorted(mask)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not there")
def test_real_chats_are_learned_turn_by_turn(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "stories260K")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    chats = [
        [
            {"role": roles[turn["from"]], "content": turn["value"].strip()}
            for turn in [*row["conversations"], row["chosen"]]
        ]
        for row in json.loads((DATA / "dpo/dpo_en_demo.json").read_text())[:80]
    ]
    path = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    settings = DataSettings(files=(path,), max_tokens=2000, on_bad_row="skip", shuffle=False, epochs=1)
    num_rows = 0
    for batch in iter_batches(SFTLoader(settings, tokenizer), 64):
        num_rows += batch.num_rows
        for tokens, mask in zip(batch.pylist("tokens"), batch.pylist("loss_mask"), strict=True):
            assert tokens[:2].count(1) == 1 and len(tokens) <= 2000
            starts = sum(now and not before for before, now in zip(mask, mask[1:], strict=False))
            ends = sum(token == 2 and kept for token, kept in zip(tokens, mask, strict=True))
            assert starts == ends >= 1
    assert num_rows > 50
