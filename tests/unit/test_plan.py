"""What a step is going to do, found by running the page on a runtime that runs nothing."""

from __future__ import annotations

import pytest

from hybridflow.observability.phases import phase
from hybridflow.runtime.api import Pieces, Seat
from hybridflow.runtime.recording import RecordingRuntime
from hybridflow.types import BatchRef, ChunkRef, MetricsRef


class Toy:
    """A worker that must never be built."""

    def __init__(self, seat: Seat) -> None:
        raise AssertionError("a plan builds no worker")

    def make(self, count: int) -> Pieces[int]:
        raise AssertionError("a plan calls no verb")

    def read(self, *values: object) -> int:
        raise AssertionError("a plan calls no verb")

    def change(self, *values: object) -> int:
        raise AssertionError("a plan calls no verb")

    def close(self) -> None: ...


def test_inputs_are_the_calls_whose_results_are_named() -> None:
    runtime = RecordingRuntime()
    group = runtime.place("toy", Toy)
    tokens, text = runtime.submit_pieces(group, Toy.make, 2, 8, rows="rows 0 to 7")
    batch = BatchRef((ChunkRef({"tokens": tokens, "text": text}, 8),))
    other = runtime.submit(group, Toy.read, 1)
    runtime.submit(group, Toy.read, batch, [{"deep": other}])
    runtime.submit(group, Toy.read, MetricsRef((other,)))
    assert [call.inputs for call in runtime.calls] == [(), (), (1, 2), (2,)]
    assert [call.call.verb for call in runtime.calls] == ["make", "read", "read", "read"]
    assert runtime.calls[0].call.rows == "rows 0 to 7"


def test_a_change_waits_for_what_was_to_see_the_state_before_and_reads_wait_for_the_change() -> None:
    runtime = RecordingRuntime({"toy": 3})
    group, other = runtime.place_gang("toy", Toy), runtime.place("other", Toy)
    with phase("one"):
        first = runtime.submit(group, Toy.read)
        runtime.submit(other, Toy.read)
        runtime.submit(group, Toy.read)
    with phase("two"):
        runtime.broadcast(group, Toy.change, 1)
        runtime.scatter(group, Toy.change, lambda digests, size: (), [first])
        runtime.submit(group, Toy.read)
        runtime.snapshot(group, Toy.read, Toy.change)
        runtime.broadcast(group, Toy.change)
    assert [call.after for call in runtime.calls] == [(), (), (), (1, 3), (4,), (5,), (5,), (6, 7)]
    assert [call.on for call in runtime.calls] == ["one", "one", "one", "each", "each", "one", "one", "each"]
    assert runtime.calls[4].inputs == (1,)
    assert [call.call.mark.phase for call in runtime.calls] == ["one"] * 3 + ["two"] * 5
    assert [(placed.role, placed.size, placed.gang) for placed in runtime.groups] == [("toy", 3, True), ("other", 1, False)]


def test_nothing_can_be_got_from_a_plan() -> None:
    runtime = RecordingRuntime()
    ref = runtime.submit(runtime.place("toy", Toy), Toy.read)
    with pytest.raises(TypeError, match=r"a plan runs nothing, so toy.read \(phase 'setup', step 0\) has no result to get"):
        runtime.get(ref)
