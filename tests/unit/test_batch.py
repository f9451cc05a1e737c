"""Batch: its laws, what its views promise, what it refuses, and what travels."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridflow.batch import Batch
from hybridflow.columns import Ragged
from hybridflow.readonly import ReadOnlyError, ReadOnlyTensor

Row = dict[str, Any]
SCHEMA = pa.schema(
    [
        ("group_id", pa.int64()),
        ("sample_id", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("response", pa.string()),
        ("state", pa.int8()),
        ("reward", pa.float64()),
        ("answer", pa.string()),
    ]
)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def table_rows(draw: st.DrawFn, max_groups: int = 5) -> list[Row]:
    rows: list[Row] = []
    for group in range(draw(st.integers(0, max_groups))):
        for sample in range(draw(st.integers(1, 4))):
            tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))
            count = len(tokens)
            rows.append(
                {
                    "group_id": 10 + group,
                    "sample_id": sample,
                    "tokens": tokens,
                    "loss_mask": [0, *draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))][:count],
                    "rollout_logprobs": draw(st.lists(st.floats(-9, 0, width=32), min_size=count, max_size=count)),
                    "response": draw(st.text(max_size=3)),
                    "state": draw(st.integers(0, 3)),
                    "reward": draw(st.none() | st.floats(-1, 1)),
                    "answer": draw(st.none() | st.text(max_size=3)),
                }
            )
    return rows


@st.composite
def chunked(draw: st.DrawFn, rows: list[Row]) -> Batch:
    """The rows in chunks cut anywhere, empty ones included; each with memory of its own, or all slices of one."""
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    edges = [0, *cuts, len(rows)]
    if draw(st.booleans()):
        return Batch.concat(Batch.from_rows(rows, SCHEMA).split(np.diff(edges).tolist()))
    parts = [rows[start:stop] for start, stop in zip(edges[:-1], edges[1:], strict=True)]
    return Batch.concat([Batch.from_rows(part, SCHEMA) for part in parts])


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Row], Batch]:
    rows = draw(table_rows())
    return rows, draw(chunked(rows))


def rows_of(batch: Batch) -> list[Row]:
    columns = {name: batch.pylist(name) for name in batch.column_names}
    return [{name: values[i] for name, values in columns.items()} for i in range(batch.num_rows)]


def sample_batch() -> Batch:
    return Batch.from_columns(
        group_id=[7, 7, 8],
        tokens=[[1, 5, 9], [], [1, 5]],
        loss_mask=[[0, 1, 1], [], [0, 1]],
        rollout_logprobs=[[0.0, -0.5, -1.5], [], [0.0, -0.25]],
        state=[0, 1, 0],
        reward=[1.0, None, 0.5],
        answer=["a", None, "c"],
    )


# Laws.


@quick
@given(tables())
def test_rows_come_out_as_they_went_in(table: tuple[list[Row], Batch]) -> None:
    rows, batch = table
    assert rows_of(batch) == rows
    assert batch.schema == SCHEMA and len(batch) == batch.num_rows == len(rows)
    assert all(chunk.num_rows for chunk in batch.chunks)


@quick
@given(tables(), st.data())
def test_take_and_slice_pick_rows(table: tuple[list[Row], Batch], data: st.DataObject) -> None:
    rows, batch = table
    number = st.integers(0, max(len(rows) - 1, 0))
    first = data.draw(st.lists(number, max_size=8 if rows else 0))
    second = data.draw(st.lists(st.integers(0, max(len(first) - 1, 0)), max_size=8 if first else 0))
    taken = batch.take(first)
    assert rows_of(taken) == [rows[i] for i in first]
    assert taken.take(second).equals(batch.take([first[i] for i in second]))
    start, stop = sorted((data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))))
    assert rows_of(batch.slice(start, stop)) == rows[start:stop]
    keep = np.array([row["state"] == 0 for row in rows], bool)
    assert rows_of(batch.filter(keep)) == [row for row in rows if row["state"] == 0]


@quick
@given(tables(), st.integers(1, 6), st.integers(0, 3))
def test_split_concat_and_repeat(table: tuple[list[Row], Batch], parts: int, times: int) -> None:
    rows, batch = table
    pieces = batch.split(parts)
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) == parts and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert Batch.concat(pieces).equals(batch)
    assert [rows_of(piece) for piece in batch.split(sizes)] == [rows_of(piece) for piece in pieces]
    assert rows_of(batch.repeat(times)) == [row for row in rows for _ in range(times)]


@quick
@given(st.data())
def test_merge_of_different_chunks(data: st.DataObject) -> None:
    rows = data.draw(table_rows())
    left, right = data.draw(chunked(rows)), data.draw(chunked(rows))
    names = ("rollout_logprobs", "reward", "answer")
    merged = left.drop(names).merge(right.select(names))
    assert merged.select(SCHEMA.names).equals(left)
    assert [c.num_rows for c in merged.chunks] == [c.num_rows for c in left.chunks]
    doubled = left.with_column("reward", [2.0 * (row["reward"] or 0) for row in rows])
    assert doubled.pylist("reward") == [2.0 * (row["reward"] or 0) for row in rows]
    assert doubled.drop(["reward"]).equals(left.drop(["reward"]))


@quick
@given(tables())
def test_readers_agree_with_the_rows(table: tuple[list[Row], Batch]) -> None:
    rows, batch = table
    for name, dtype in (("tokens", torch.int32), ("loss_mask", torch.uint8), ("rollout_logprobs", torch.float32)):
        expected = [row[name] for row in rows]
        ragged = batch.ragged(name)
        assert ragged.values.dtype == dtype and ragged.offsets.dtype == torch.int64
        assert [ragged[i].tolist() for i in range(len(ragged))] == expected
        assert ragged.offsets.tolist() == np.cumsum([0] + [len(row) for row in expected]).tolist()
        assert [row.tolist() for row in batch.arrays(name)] == expected
        assert batch.lengths(name).tolist() == [len(row) for row in expected] and batch.lengths(name).dtype == np.int64
        assert Batch.from_columns(**{name: ragged}).equals(batch.select([name]))
        assert Batch.from_columns(**{name: batch.arrays(name)}).equals(batch.select([name]))
    assert batch.tensor("state").tolist() == [row["state"] for row in rows]
    np.testing.assert_array_equal(batch.numpy("reward"), [np.nan if r["reward"] is None else r["reward"] for r in rows])


@quick
@given(table=tables(), protocol=st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_pickle_and_parquet_round_trip(
    table: tuple[list[Row], Batch], protocol: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, batch = table
    path = tmp_path_factory.getbasetemp() / "round_trip.parquet"
    batch.to_parquet(path)
    for copied in (pickle.loads(pickle.dumps(batch, protocol)), Batch.from_parquet(path)):
        assert copied.schema == batch.schema and rows_of(copied) == rows
        assert [c.num_rows for c in copied.chunks] == [c.num_rows for c in batch.chunks]


# Views.


def test_views_are_the_arrow_buffers() -> None:
    batch = sample_batch()
    whole = batch.ragged("tokens").values
    assert whole.data_ptr() == batch.chunks[0].column("tokens").values.buffers()[1].address
    assert batch.slice(2, 3).ragged("tokens").values.data_ptr() == whole.data_ptr() + 3 * 4
    assert batch.tensor("group_id").data_ptr() == batch.chunks[0].column("group_id").buffers()[1].address
    assert batch.arrays("tokens")[2].__array_interface__["data"][0] == whole.data_ptr() + 3 * 4
    assert batch.drop(["reward"]).merge(batch.select(["reward"])).ragged("tokens").values.data_ptr() == whole.data_ptr()
    joined = Batch.concat([batch, batch])
    assert Batch(joined.schema, joined.chunks[:1]).ragged("tokens").values.data_ptr() == whole.data_ptr()


def test_a_view_keeps_its_memory_alive() -> None:
    view = Batch.from_columns(tokens=[np.arange(100_000)]).ragged("tokens").values
    for _ in range(20):
        np.full(100_000, -1, np.int32)
    assert int(view.sum()) == 100_000 * 99_999 // 2


WRITES = {
    "item": lambda v: v.__setitem__(0, 9),
    "slice": lambda v: v.__setitem__(slice(0, 2), 9),
    "mask": lambda v: v.__setitem__(v > 1, 9),
    "index": lambda v: v.__setitem__(v.argsort(), v + 1),
    "add_": lambda v: v.add_(1),
    "iadd": lambda v: v.__iadd__(1),
    "out": lambda v: torch.add(v, 1, out=v),
    "out of a slice": lambda v: torch.zeros(2, dtype=v.dtype, out=v[:2]),
    "copy_ in a slice": lambda v: v[1:].copy_(torch.zeros(4)),
    "detach": lambda v: v.detach().fill_(9),
    "data": lambda v: v.data.fill_(9),
    "view": lambda v: v.view(5, 1).expand(5, 2).fill_(9),
    "view of bytes": lambda v: v.view(torch.uint8).fill_(9),
    "reshape": lambda v: v.reshape(5, 1).fill_(9),
    "as_strided": lambda v: v.as_strided((2,), (1,)).fill_(9),
    "unbind": lambda v: v.unbind()[0].fill_(9),
    "split": lambda v: v.split(2)[1].fill_(9),
    "to": lambda v: v.to("cpu").fill_(9),
    "contiguous": lambda v: v.contiguous().fill_(9),
    "as_tensor": lambda v: torch.as_tensor(v).fill_(9),
    "as_subclass": lambda v: v.as_subclass(torch.Tensor).fill_(9),
    "inplace function": lambda v: torch.nn.functional.relu_(v),
    "inplace flag": lambda v: torch.nn.functional.relu(v, inplace=True),
    "foreach": lambda v: torch._foreach_add_([torch.zeros(5, dtype=v.dtype), v], 1),
    "resize": lambda v: v.resize_(2),
    "random": lambda v: v.random_(),
    "dlpack": lambda v: torch.utils.dlpack.from_dlpack(v).fill_(9),
    "numpy dlpack": lambda v: np.from_dlpack(v).fill(9),
    "numpy": lambda v: v.numpy().fill(9),
    "asarray": lambda v: np.asarray(v).fill(9),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_no_write_gets_through_a_view(write: Any, chunks: int) -> None:
    batch = Batch.concat([sample_batch().slice(0, 3)] if chunks == 1 else sample_batch().split(2))
    before = batch.pylist("tokens")
    view = batch.ragged("tokens").values
    with pytest.raises((ReadOnlyError, ValueError), match="read-only"):
        write(view)
    assert batch.pylist("tokens") == before and view.tolist() == [1, 5, 9, 1, 5]


def test_numpy_readers_are_read_only() -> None:
    batch = sample_batch()
    for array in (batch.numpy("group_id"), batch.numpy("reward"), batch.arrays("tokens")[0]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 3


def test_a_view_computes_like_a_tensor_and_what_it_yields_is_writable() -> None:
    batch = sample_batch()
    view, logprobs = batch.ragged("tokens").values, batch.ragged("rollout_logprobs").values
    plain = torch.tensor([1, 5, 9, 1, 5], dtype=torch.int32)
    for result in (
        view.clone(),
        view + 0,
        view.long(),
        copy.deepcopy(view),
        pickle.loads(pickle.dumps(view)),
        view[view > 0],
    ):
        assert type(result) is torch.Tensor
        result.add_(0)
        torch.testing.assert_close(result, plain, check_dtype=False)
    target = torch.zeros(5, dtype=torch.int32)
    target.copy_(view)
    torch.add(view, 0, out=target)
    assert torch.equal(target, plain) and isinstance(view[1:], ReadOnlyTensor)
    embedding = torch.nn.Embedding(10, 3)
    weight = torch.ones(5, requires_grad=True)
    (embedding(view).sum() + (weight * logprobs).sum()).backward()
    torch.testing.assert_close(weight.grad, torch.tensor([0.0, -0.5, -1.5, 0.0, -0.25]))
    assert embedding.weight.grad is not None and embedding.weight.grad[5].tolist() == [2.0, 2.0, 2.0]
    assert "1, 5, 9, 1, 5" in repr(view)


def test_the_source_array_is_copied() -> None:
    source, scalars = np.array([1, 2, 3], np.int32), np.array([4, 5])
    batch = Batch.from_columns(tokens=[source[:2], source[2:]], group_id=scalars)
    source[:] = 0
    scalars[:] = 0
    assert batch.pylist("tokens") == [[1, 2], [3]] and batch.pylist("group_id") == [4, 5]


# Making one.


def test_types_of_columns() -> None:
    batch = Batch.from_columns(
        tokens=[torch.tensor([1, 2]), []],
        loss_mask=[np.array([False, True]), np.array([], bool)],
        advantages=Ragged(torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0, 2, 2])),
        scores=np.zeros((2, 3)),
        hops=[[1, 2], []],
        tags=[["x"], []],
        reward=[1, 0],
        answer=[3, 4],
        reward_error=[None, None],
        state=torch.tensor([0, 1]),
    )
    types = {field.name: str(field.type).replace("item: ", "") for field in batch.schema}
    assert types == {
        "tokens": "list<int32>",
        "loss_mask": "list<uint8>",
        "advantages": "list<float>",
        "scores": "list<float>",
        "hops": "list<int32>",
        "tags": "list<string>",
        "reward": "double",
        "answer": "int64",
        "reward_error": "string",
        "state": "int8",
    }


def test_columns_of_nothing_take_their_type_in_concat() -> None:
    known = Batch.from_columns(tokens=[[1], []], answer=["a", None], tags=[["x"], []])
    nothing = Batch.from_columns(tokens=[[]], tags=[[]], answer=[None])
    both = Batch.concat([nothing, known, known.slice(1, 1)])
    assert both.pylist("answer") == [None, "a", None] and both.pylist("tags") == [[], ["x"], []]
    assert both.slice(0, 0).schema == both.schema and Batch.concat([both.slice(0, 0)]).num_rows == 0


REFUSED = {
    "rows differ": (lambda: Batch.from_columns(a=[1, 2], b=[1]), "'a': 2, 'b': 1"),
    "keys differ": (lambda: Batch.from_rows([{"a": 1}, {"a": 2, "b": 3}]), r"row 1 differs in the keys \['b'\]"),
    "mixed types": (lambda: Batch.from_columns(answer=[1, "x"]), "column 'answer'"),
    "token too large": (lambda: Batch.from_columns(tokens=[[1], [2, 2**31], [3]]), "'tokens', row 1"),
    "token a float": (lambda: Batch.from_columns(tokens=[[1.5]]), "column 'tokens' is list<item: double>"),
    "null list": (lambda: Batch.from_columns(tokens=[[1], None]), "'tokens', row 1"),
    "null group": (lambda: Batch.from_columns(group_id=[1, None, 3]), "'group_id', row 1"),
    "null in a list": (
        lambda: Batch.from_columns(tokens=pa.array([[1], [2], [3, None]], pa.list_(pa.int32()))),
        "'tokens', row 2",
    ),
    "mask of 2": (lambda: Batch.from_columns(loss_mask=[[0, 1], [0, 2]]), "'loss_mask', row 1: 2"),
    "first token counts": (lambda: Batch.from_columns(loss_mask=[[], [0, 1], [1]]), "'loss_mask', row 2"),
    "not one per token": (
        lambda: sample_batch().drop(["rollout_logprobs"]).with_column("ref_logprobs", [[0.0], [], [0.0, 1.0]]),
        "'ref_logprobs', row 0: 1 values for 3 tokens",
    ),
    "merge not aligned": (
        lambda: Batch.concat([sample_batch()] * 2).merge(
            Batch.from_columns(advantages=[[0.0] * 3, [], [0.0] * 2] + [[]] * 3)
        ),
        "'advantages', row 0: 0 values for 3 tokens",
    ),
    "wrong schema": (lambda: Batch.from_rows([], pa.schema([("tokens", pa.string())])), "'tokens' is string"),
    "dictionary": (lambda: Batch.from_columns(a=pa.array(["x"]).dictionary_encode()), "'a' is dictionary"),
    "column twice": (lambda: sample_batch().merge(sample_batch().select(["state"])), r"\['state'\] are in both"),
    "merge rows": (lambda: sample_batch().merge(Batch.from_columns(x=[1])), "3 rows with 1"),
    "with_column rows": (lambda: sample_batch().with_column("x", [1]), "1 values for 3 rows"),
    "concat columns": (
        lambda: Batch.concat([sample_batch(), sample_batch().drop(["state"])]),
        r"batch 1 .* \['state'\]",
    ),
    "concat types": (lambda: Batch.concat([Batch.from_columns(x=[1]), Batch.from_columns(x=["a"])]), "Field x"),
    "concat nothing": (lambda: Batch.concat([]), "at least one"),
    "split sizes": (lambda: sample_batch().split([1, 1]), "do not add up to 3"),
    "split 0": (lambda: sample_batch().split(0), "0 parts"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_reads_are_named() -> None:
    batch = sample_batch()
    with pytest.raises(KeyError, match="no column 'reards'"):
        batch.column("reards")
    with pytest.raises(ValueError, match="'reward', row 1"):
        batch.tensor("reward")
    for read in (batch.ragged, batch.lengths, batch.arrays):
        with pytest.raises(TypeError, match="'state' is int8"):
            read("state")
    for read in (batch.tensor, batch.numpy):
        with pytest.raises(TypeError, match="'tokens' is list"):
            read("tokens")
    for indices in ([0, 3], [-1]):
        with pytest.raises(IndexError, match=f"row {indices[-1]} does not exist"):
            batch.take(indices)
    with pytest.raises(TypeError, match="filter"):
        batch.take([True, False, True])
    with pytest.raises(IndexError, match="0:4"):
        batch.slice(0, 4)


# Travelling.


def wide_batch() -> Batch:
    tokens = np.arange(1_000 * 50, dtype=np.int32).reshape(1_000, 50)
    return Batch.from_columns(group_id=np.arange(1_000), tokens=tokens, response=[f"text {i}" for i in range(1_000)])


@pytest.mark.parametrize("protocol", [4, 5])
def test_five_rows_travel_as_five(protocol: int) -> None:
    wide = wide_batch()
    five = pickle.dumps(wide.slice(500, 505), protocol)
    assert len(five) < 3_000 < len(pickle.dumps(wide, protocol)) / 50
    assert pickle.loads(five).equals(wide.slice(500, 505))


def test_pickled_buffers_are_read_in_place() -> None:
    buffers: list[pickle.PickleBuffer] = []
    wide = wide_batch()
    head = pickle.dumps(wide, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 1_000
    store = bytes(buffers[0])
    view = pickle.loads(head, buffers=[store]).ragged("tokens").values
    begin = np.frombuffer(store, np.uint8).__array_interface__["data"][0]
    assert begin <= view.data_ptr() < begin + len(store) and torch.equal(view, wide.ragged("tokens").values)


def test_through_the_object_store(ray_cluster: None) -> None:
    import ray

    wide = wide_batch()
    reference = ray.put(wide)
    first, second = ray.get(reference), ray.get(reference)
    assert first.equals(wide)
    views = [batch.ragged("tokens").values for batch in (first, second)]
    assert views[0].data_ptr() == views[1].data_ptr() != wide.ragged("tokens").values.data_ptr()
    with pytest.raises(ReadOnlyError):
        views[0].fill_(0)
    assert torch.equal(views[1], wide.ragged("tokens").values)


# Files.


def test_parquet_is_replaced_only_when_whole(tmp_path: Any) -> None:
    path = tmp_path / "batch.parquet"
    sample_batch().to_parquet(path)
    broken = Batch(pa.schema([("a", pa.int64())]), sample_batch().chunks)
    with pytest.raises(ValueError, match="schema"):
        broken.to_parquet(path)
    assert Batch.from_parquet(path).equals(sample_batch())


FOREIGN = {
    "wider ids": ({"tokens": pa.array([[1], [2, 3]], pa.large_list(pa.int64()))}, None),
    "wrong type": ({"tokens": pa.array(["1 2"])}, "'tokens' is string"),
    "too large": ({"tokens": pa.array([[1], [2**40]])}, "'tokens', row 1"),
    "missing": ({"group_id": pa.array([1, None])}, "'group_id', row 1"),
    "bad mask": ({"loss_mask": pa.array([[0], [1]])}, "'loss_mask', row 1"),
    "not aligned": ({"tokens": pa.array([[1], [2]]), "loss_mask": pa.array([[0], [0, 1]])}, "'loss_mask', row 1"),
    "dictionary": ({"answer": pa.array(["a", "b"]).dictionary_encode()}, "'answer' is dictionary"),
}


@pytest.mark.parametrize(("columns", "message"), FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_file_is_converted_or_named(columns: dict[str, pa.Array], message: str | None, tmp_path: Any) -> None:
    path = tmp_path / "foreign.parquet"
    pq.write_table(pa.table(columns), path)
    if message is None:
        assert Batch.from_parquet(path).schema.field("tokens").type == pa.list_(pa.int32())
        return
    with pytest.raises(ValueError, match=f"foreign.parquet.*{message}"):
        Batch.from_parquet(path)


def test_the_row_is_counted_over_row_groups(tmp_path: Any) -> None:
    path = tmp_path / "groups.parquet"
    pq.write_table(pa.table({"group_id": pa.array([1, 2, 3, 4, None])}), path, row_group_size=2)
    with pytest.raises(ValueError, match="'group_id', row 4"):
        Batch.from_parquet(path)


def is_refused(path: Any) -> bool:
    try:
        Batch.from_parquet(path)
    except ValueError as error:
        return str(path) in str(error)
    return False


def test_a_damaged_file_is_a_value_error(tmp_path: Any) -> None:
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    Batch.concat([sample_batch()] * 2).to_parquet(good)
    data, draws, refused = good.read_bytes(), random.Random(0), 0
    for trial in range(150):
        damaged = bytearray(data)
        damaged[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        bad.write_bytes(damaged if trial % 3 else damaged[: draws.randrange(len(data))])
        refused += is_refused(bad)
    assert refused > 100
    with pytest.raises(FileNotFoundError):
        Batch.from_parquet(tmp_path / "nowhere.parquet")


def test_a_flipped_value_is_found_by_its_checksum(tmp_path: Any) -> None:
    path = tmp_path / "batch.parquet"
    Batch.from_columns(answer=["needle-in-the-file"] * 2, x=[1, 2]).to_parquet(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"needle-in", b"needle-on", 1))
    with pytest.raises(ValueError, match="batch.parquet.*column 'answer', row group 0"):
        Batch.from_parquet(path)


# Cost.


def test_importing_batch_leaves_torch_alone() -> None:
    code = "import sys; from hybridflow.batch import Batch; Batch.from_columns(tokens=[[1]]).arrays('tokens')"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


def test_a_large_batch_is_handled_by_vector_operations() -> None:
    rows, length = 8192, 2048
    chunks = [
        Batch.from_columns(
            group_id=np.arange(start, start + 1024) // 8,
            tokens=np.zeros((1024, length), np.int32),
            loss_mask=np.zeros((1024, length), np.uint8),
        )
        for start in range(0, rows, 1024)
    ]
    scores = Batch.from_columns(reward=np.zeros(rows))
    begin = time.process_time()
    batch = Batch.concat(chunks).merge(scores)
    parts = batch.split(7)
    shuffled = batch.take(np.random.default_rng(0).permutation(rows))
    assert shuffled.ragged("tokens").values.shape == (rows * length,) and len(parts) == 7
    assert batch.lengths("tokens").sum() == rows * length
    assert time.process_time() - begin < 5
