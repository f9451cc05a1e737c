"""Both runtimes answer the same questions: order, references, errors, spans, bounded waits, user code."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stub_workers import Counter, Reading, read_pid

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.observability.phases import phase, phase_times, set_step
from hybridflow.runtime.api import Group, RecoverySettings, Runtime, RuntimeSettings, WorkerError
from hybridflow.runtime.inprocess import InProcessRuntime
from hybridflow.runtime.placement import PlacementSettings
from hybridflow.runtime.start import start_runtime
from hybridflow.types import BatchRef, ChunkRef, MetricsRef, Ref, Span

DEVICES = {"counter": "cpu:0-2", "gang": "cpu:3-4", "single": "cpu:5", "other": "cpu:6"}


@dataclass(frozen=True)
class Site:
    """Where a test runs: the group that it asks, one worker beside it, and a gang."""

    runtime: Runtime
    group: Group[Counter]
    other: Group[Counter]
    gang: Group[Counter]

    def assign(self, value: int) -> None:
        for group in (self.group, self.other, self.gang):
            self.runtime.get(self.runtime.broadcast(group, Counter.assign, value, replaces=True))
        self.runtime.spans()

    def read_all(self, group: Group[Counter]) -> tuple[Reading, ...]:
        return self.runtime.get(self.runtime.broadcast(group, Counter.read))


def ray_settings(**changes: Any) -> RuntimeSettings:
    values = {"call_timeout_s": 60.0, "start_timeout_s": 60.0, "placement": PlacementSettings(device_map=DEVICES)}
    return RuntimeSettings(kind="ray", **{**values, **changes})


@pytest.fixture(scope="module")
def ray_sites(ray_cluster: None) -> Iterator[dict[str, Site]]:
    from hybridflow.runtime.ray_runtime import RayRuntime

    runtime = RayRuntime(ray_settings())
    three, one, other = (runtime.place(role, Counter) for role in ("counter", "single", "other"))
    gang = runtime.place_gang("gang", Counter)
    yield {"ray_1": Site(runtime, one, other, gang), "ray_3": Site(runtime, three, other, gang)}
    runtime.shutdown()


def build_local_site() -> Site:
    runtime = InProcessRuntime()
    return Site(
        runtime, runtime.place("counter", Counter), runtime.place("other", Counter), runtime.place_gang("gang", Counter)
    )


@pytest.fixture(params=["local", "ray_1", "ray_3"])
def site(request: pytest.FixtureRequest) -> Site:
    local = request.param == "local"
    found: Site = build_local_site() if local else request.getfixturevalue("ray_sites")[request.param]
    found.assign(0)
    return found


@pytest.fixture
def ray_site(ray_sites: dict[str, Site]) -> Site:
    """Three workers on Ray, for what one process has no counterpart to."""
    ray_sites["ray_3"].assign(0)
    return ray_sites["ray_3"]


def start_ray(**changes: Any) -> Runtime:
    """A runtime of its own, for a test that breaks it, whose role `counter` has three workers and all others one."""
    from hybridflow.runtime.ray_runtime import RayRuntime

    placement = PlacementSettings(device_map={"counter": DEVICES["counter"]})
    return RayRuntime(ray_settings(**{"placement": placement, **changes}))


# Groups


def test_each_worker_knows_its_seat(site: Site) -> None:
    seats = site.runtime.get(site.runtime.broadcast(site.group, Counter.seat_of))
    size = site.group.size
    assert [(seat.role, seat.rank, seat.size) for seat in seats] == [
        (site.group.role, rank, size) for rank in range(size)
    ]
    assert all(seat.rendezvous is None for seat in seats), "workers that are no gang meet nowhere"
    gang = site.runtime.get(site.runtime.broadcast(site.gang, Counter.seat_of))
    assert [seat.rank for seat in gang] == list(range(site.gang.size))
    assert len({seat.rendezvous for seat in gang}) == 1, "the ranks of a gang meet in one place"
    assert (gang[0].rendezvous is None) == (site.gang.size == 1)


def test_a_group_has_a_worker_for_each_device(ray_sites: dict[str, Site]) -> None:
    assert [ray_sites[name].group.size for name in ("ray_1", "ray_3")] == [1, 3]
    site = ray_sites["ray_3"]
    seats = site.runtime.get(site.runtime.broadcast(site.group, Counter.seat_of))
    assert all(str(seat.device).startswith("cpu") for seat in seats)
    assert len({reading.pid for reading in site.read_all(site.group)} | {os.getpid()}) == 4


def test_a_submitted_call_runs_on_any_worker(site: Site) -> None:
    readings = [site.runtime.submit(site.group, Counter.read, 0.03) for _ in range(4 * site.group.size)]
    assert {site.runtime.get(reading).rank for reading in readings} == set(range(site.group.size))


def test_a_broadcast_reaches_every_worker_once(site: Site) -> None:
    size = site.group.size
    assert site.runtime.get(site.runtime.broadcast(site.group, Counter.add, 5)) == (5,) * size
    readings = site.read_all(site.group)
    assert [(reading.rank, reading.value, reading.history) for reading in readings] == [
        (rank, 5, ("assign 0", "add 5")) for rank in range(size)
    ]


def test_a_read_on_all_workers_gives_each_its_own_and_collects_by_rank(site: Site) -> None:
    size = site.gang.size
    sizes: list[tuple[int, ...]] = [(3, 1), ()][:size]
    site.runtime.broadcast(site.gang, Counter.add, 5)
    calls = [(own,) for own in sizes]
    made = site.runtime.submit_all_pieces(site.gang, Counter.cut_rows, [len(own) for own in sizes], calls)
    readings = site.runtime.submit_all(site.gang, Counter.read, [()] * size)
    site.runtime.broadcast(site.gang, Counter.add, 2)
    assert [[site.runtime.get(ref).num_rows for ref in refs] for refs in made] == [list(own) for own in sizes]
    assert [(reading.rank, reading.value) for reading in site.runtime.get(readings)] == [
        (rank, 5) for rank in range(size)
    ]
    assert [reading.value for reading in site.read_all(site.gang)] == [7] * size, "a read is no change"


def test_a_read_of_a_team_gives_each_its_own_and_collects_by_place(site: Site) -> None:
    size = site.gang.size
    sizes: list[tuple[int, ...]] = [(3, 1), ()][:size]
    counts, calls = [len(own) for own in sizes], [(own,) for own in sizes]
    made = [site.runtime.submit_team_pieces(site.gang, Counter.cut_rows, counts, calls, "rows 0 to 3") for _ in "ab"]
    assert [[[site.runtime.get(ref).num_rows for ref in refs] for refs in each] for each in made] == [
        [list(own) for own in sizes]
    ] * 2
    assert made[0][0][0].call.rows == "rows 0 to 3"


def test_all_workers_answer_what_they_are_asked_after_the_changes_so_far(site: Site) -> None:
    site.runtime.broadcast(site.group, Counter.add, 5)
    asked = site.runtime.ask(site.group, Counter.read), site.runtime.ask(site.gang, Counter.read)
    site.runtime.broadcast(site.group, Counter.add, 2)
    group, gang = site.runtime.get(asked)
    assert [(reading.rank, reading.value) for reading in group if reading] == [(rank, 5) for rank in range(len(group))]
    assert [reading.rank for reading in gang if reading] == list(range(site.gang.size))
    assert [reading.value for reading in site.read_all(site.group)] == [7] * len(group), "to ask is no change"


def test_what_one_worker_of_all_has_made_can_be_read_by_others(site: Site) -> None:
    made = site.runtime.submit_all(site.gang, Counter.make, [(rank + 2,) for rank in range(site.gang.size)])
    doubled = [site.runtime.submit(site.group, Counter.double, ref) for ref in made]
    assert [site.runtime.get(ref).num_rows for ref in doubled] == [rank + 2 for rank in range(site.gang.size)]


def test_scatter_splits_by_digests_and_collects_by_rank(site: Site) -> None:
    sizes, asked = (3, 1, 2, 5), []
    pieces = site.runtime.submit_pieces(site.other, Counter.cut_rows, len(sizes), sizes)

    def split(digests: Sequence[Any], size: int) -> list[tuple[Ref[Batch], ...]]:
        asked.append((os.getpid(), tuple(digests), size))
        return [pieces[rank::size] for rank in range(size)]

    results = site.runtime.get(site.runtime.scatter(site.group, Counter.add_rows, split, pieces))
    size = site.group.size
    assert asked == [(os.getpid(), sizes, size)], "once, in the controller"
    assert results == tuple((rank, sum(sizes[rank::size])) for rank in range(size))
    assert [reading.value for reading in site.read_all(site.group)] == [value for _, value in results]


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_call_without_digests_is_described_by_none(kind: str, ray_cluster: None) -> None:
    runtime = InProcessRuntime() if kind == "local" else start_ray()
    group = runtime.place("single", Counter)
    asked: list[Any] = []
    made = runtime.submit(group, Counter.make, 3)

    def split(digests: Sequence[Any], size: int) -> list[tuple[Ref[Batch]]]:
        asked.extend(digests)
        return [(made,)] * size

    assert runtime.get(runtime.scatter(group, Counter.add_rows, split, (made,))) == ((0, 3),)
    runtime.shutdown()
    assert asked == [None]


def test_a_gang_is_scattered_over_as_well(site: Site) -> None:
    split = lambda digests, size: [(f"share {rank}", 7) for rank in range(size)]  # noqa: E731
    results = site.runtime.get(site.runtime.scatter(site.gang, Counter.add_share, split, ()))
    assert results == tuple((rank, f"share {rank}") for rank in range(site.gang.size))
    assert {reading.value for reading in site.read_all(site.gang)} == {7}


# Order


def test_calls_see_the_changes_before_them_and_none_after(site: Site) -> None:
    runtime, group = site.runtime, site.group
    before = [runtime.submit(group, Counter.read, 0.03) for _ in range(2 * group.size + 1)]
    runtime.broadcast(group, Counter.add, 1, 0.1)
    between = [runtime.submit(group, Counter.read, 0.03) for _ in range(2 * group.size + 1)]
    runtime.scatter(group, Counter.add, lambda _, size: [(10,)] * size, ())
    after = [runtime.submit(group, Counter.read) for _ in range(2 * group.size + 1)]
    for calls, value in ((before, 0), (between, 1), (after, 11)):
        assert {runtime.get(call).value for call in calls} == {value}


def split_evenly(args: tuple[Any, ...], digests: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """The same arguments for all."""
    return [args] * size


def test_a_random_program_reads_what_its_text_says(site: Site) -> None:
    runtime, group, rng = site.runtime, site.group, random.Random(3)
    value, expected, calls = 0, [], []
    for _ in range(80):
        wait_s = rng.choice((0.0, 0.0, 0.005))
        match rng.choice(("read", "read", "needy", "add", "share")):
            case "read":
                calls.append(runtime.submit(group, Counter.read, wait_s))
                expected.append(value)
            case "needy":
                calls.append(runtime.submit(group, Counter.read, 0.0, runtime.submit(site.other, Counter.read, 0.02)))
                expected.append(value)
            case "add":
                runtime.broadcast(group, Counter.add, 1, wait_s)
                value += 1
            case "share":
                needed = runtime.submit(site.other, Counter.read, wait_s)
                runtime.scatter(group, Counter.add_share, functools.partial(split_evenly, (needed, 100)), ())
                value += 100
    assert [runtime.get(call).value for call in calls] == expected
    assert {reading.value for reading in site.read_all(group)} == {value}


def test_a_read_overtakes_one_that_waits_for_inputs_but_no_change(ray_sites: dict[str, Site]) -> None:
    site = ray_sites["ray_1"]
    site.assign(0)
    runtime, group = site.runtime, site.group
    needed = runtime.submit(site.other, Counter.read, 0.8)
    needy = runtime.submit(group, Counter.read, 0.0, needed)
    quick = runtime.submit(group, Counter.read)
    runtime.broadcast(group, Counter.add, 1)
    late = runtime.submit(group, Counter.read)
    started_s = time.monotonic()
    assert runtime.get(quick).value == 0
    assert time.monotonic() - started_s < 0.6, "it did not wait for the other call's inputs"
    assert (runtime.get(needy).value, runtime.get(late).value) == (0, 1)
    spans = [span for span in runtime.spans() if span.role == "single"]
    first, second, change, last = (span.start_s for span in spans)
    assert second < first < change < last, "the overtaken call ran before the change, the one behind it after"


def test_groups_work_side_by_side(ray_site: Site) -> None:
    runtime = ray_site.runtime
    for group in (ray_site.group, ray_site.other):
        runtime.submit(group, Counter.read, 0.5)
    for group in (ray_site.group, ray_site.other):
        runtime.get(runtime.broadcast(group, Counter.read))
    long = [span for span in runtime.spans() if span.duration_s > 0.4]
    assert len(long) == 2
    assert max(span.start_s for span in long) < min(span.start_s + span.duration_s for span in long)


def test_a_call_returns_before_its_work_is_done(ray_site: Site) -> None:
    runtime, group = ray_site.runtime, ray_site.group
    started_s = time.monotonic()
    slow = [runtime.submit(group, Counter.read, 1.0)]
    slow.append(runtime.submit(group, Counter.read, 0.0, *slow))
    pieces = runtime.submit_pieces(group, Counter.cut_rows, 2, (1, 2))
    runtime.broadcast(group, Counter.add, 1)
    runtime.scatter(group, Counter.add_rows, lambda _, size: [pieces] * size, pieces)
    assert time.monotonic() - started_s < 0.5
    assert runtime.get(slow[1]).value == 0
    assert [reading.value for reading in ray_site.read_all(group)] == [4] * 3


# References


def test_a_result_feeds_another_group_as_data(site: Site) -> None:
    runtime = site.runtime
    rows = runtime.submit(site.group, Counter.make, 3)
    described = runtime.submit(site.other, Counter.describe, {"rows": [rows, (rows, 7)], "none": None})
    one = {"rows": 3, "columns": ["group_id", "tokens"]}
    assert runtime.get(described) == {"rows": [one, (one, 7)], "none": None}
    assert runtime.get(runtime.submit(site.other, Counter.double, rows)).pylist("double") == [0, 2, 4]


def test_pieces_are_fetched_each_by_itself(site: Site) -> None:
    pieces = site.runtime.submit_pieces(site.group, Counter.cut_rows, 3, (4, 0, 2))
    assert [site.runtime.get(piece).num_rows for piece in pieces] == [4, 0, 2]
    described = site.runtime.submit(site.other, Counter.describe, pieces[2])
    assert site.runtime.get(described) == {"rows": 2, "columns": ["group_id", "tokens"]}


def test_pieces_that_were_not_promised_are_refused(site: Site) -> None:
    with pytest.raises((TypeError, WorkerError), match=r"3 pieces"):
        site.runtime.get(site.runtime.submit_pieces(site.group, Counter.cut_rows, 3, (4, 2))[0])


def refer(site: Site, rows: tuple[int, ...]) -> BatchRef:
    """A batch of one chunk for each number of rows, in two parts that share the column `group_id`."""
    chunks = []
    for count in rows:
        tokens, text = site.runtime.submit_pieces(site.group, Counter.cut, 2, count)
        chunks.append(ChunkRef({"tokens": tokens, "text": text}, count))
    return BatchRef(tuple(chunks))


def test_a_batch_arrives_with_its_chunks_below_and_its_parts_beside_each_other(site: Site) -> None:
    batch = refer(site, (3, 2))
    assert batch.num_rows == 5
    found = site.runtime.get(batch)
    assert sorted(found.column_names) == ["group_id", "text", "tokens"]
    assert found.pylist("group_id") == [0, 1, 2, 0, 1]
    assert found.pylist("tokens") == [[0], [1, 1], [2, 2, 2], [0], [1, 1]]
    assert found.pylist("text") == ["row 0", "row 1", "row 2", "row 0", "row 1"]
    arrived = site.runtime.submit(site.other, Counter.describe, (batch, "and more"))
    assert site.runtime.get(arrived) == ({"rows": 5, "columns": ["group_id", "text", "tokens"]}, "and more")


def test_only_some_parts_travel_where_only_some_are_read(site: Site) -> None:
    batch = refer(site, (3, 2))
    arrived = site.runtime.submit(site.other, Counter.describe, [batch.only("text"), batch.only("tokens")])
    assert site.runtime.get(arrived) == [
        {"rows": 5, "columns": ["group_id", "text"]},
        {"rows": 5, "columns": ["group_id", "tokens"]},
    ]


def test_scores_join_the_rows_they_are_of(site: Site) -> None:
    batch = refer(site, (3, 2))
    scores = BatchRef(
        tuple(
            ChunkRef({"double": site.runtime.submit(site.other, Counter.double, chunk.parts["tokens"])}, chunk.num_rows)
            for chunk in batch.chunks
        )
    )
    joined = batch.only("text") | scores
    assert joined.num_rows == 5
    assert site.runtime.get(joined).pylist("double") == [0, 2, 4, 0, 2]
    arrived = site.runtime.get(site.runtime.submit(site.group, Counter.describe, joined))
    assert arrived == {"rows": 5, "columns": ["double", "group_id", "text"]}


def test_a_part_that_is_not_read_is_not_waited_for(ray_site: Site) -> None:
    runtime = ray_site.runtime
    tokens = runtime.submit(ray_site.group, Counter.make, 3)
    late = runtime.submit(ray_site.other, Counter.make_bytes, 8, 1.5)
    batch = BatchRef((ChunkRef({"tokens": tokens, "late": late}, 3),))
    started_s = time.monotonic()
    described = runtime.get(runtime.submit(ray_site.group, Counter.describe, batch.only("tokens")))
    assert described["rows"] == 3
    assert time.monotonic() - started_s < 1.2
    runtime.get(late)


def test_metrics_merge_by_their_own_rules(site: Site) -> None:
    size = site.group.size
    parts = [MetricsRef((site.runtime.broadcast(group, Counter.measure),)) for group in (site.group, site.other)]
    metrics = site.runtime.get(parts[0] | parts[1])
    assert metrics["loss"].value == pytest.approx(sum(range(size)) / (size + 1), abs=1e-15)
    assert (metrics["loss"].weight, metrics["rows"].value) == (2.0 * (size + 1), 3.0 * (size + 1))
    described = site.runtime.submit(site.other, Counter.describe, parts[0])
    assert site.runtime.get(described)["rows"].value == 3.0 * size, "a worker is given the merged record, too"


def test_a_live_function_travels(site: Site) -> None:
    offset = 40
    assert site.runtime.get(site.runtime.submit(site.group, Counter.apply, lambda value: value + offset, 2)) == 42


def test_data_passes_the_controller_by(ray_site: Site) -> None:
    runtime, num_bytes = ray_site.runtime, 4_000_000
    runtime.metrics()
    batch = runtime.submit(ray_site.group, Counter.make_bytes, num_bytes)
    assert runtime.get(runtime.submit(ray_site.other, Counter.describe, batch))["rows"] == 1
    assert 0 < controller_bytes(runtime) < 100_000
    runtime.get(batch)
    assert controller_bytes(runtime) > num_bytes


def controller_bytes(runtime: Runtime) -> float:
    """Bytes through the controller since the last look."""
    return sum(
        metric.value for name, metric in runtime.metrics().items() if name.startswith("controller/") and "bytes" in name
    )


def test_one_process_costs_nothing_and_keeps_no_copies() -> None:
    site = build_local_site()
    assert site.runtime.snapshot(site.gang, Counter.take, Counter.restore) is None
    site.runtime.get(site.runtime.submit(site.group, Counter.make, 3))
    assert site.runtime.metrics() == {}


# Spans


def test_spans_carry_role_rank_phase_and_step(site: Site) -> None:
    runtime, size = site.runtime, site.group.size
    set_step(5)
    with phase("rollout"):
        runtime.get(runtime.submit(site.group, Counter.read, 0.02))
    with phase("update"):
        runtime.get(runtime.broadcast(site.group, Counter.add, 1))
    spans = [span for span in runtime.spans() if span.role == site.group.role]
    assert [(span.verb, span.phase, span.step) for span in spans] == [
        ("read", "rollout", 5),
        *[("add", "update", 5)] * size,
    ]
    assert sorted(span.rank for span in spans[1:]) == list(range(size))
    assert phase_times(spans)["rollout"] >= 0.02
    assert all(span.peak_rss_bytes > 1e6 and abs(span.start_s - time.time()) < 60 for span in spans)
    assert runtime.spans() == []


def test_spans_come_in_the_order_of_submission(ray_site: Site) -> None:
    runtime = ray_site.runtime
    slow = runtime.submit(ray_site.group, Counter.read, 0.4)
    quick = runtime.submit(ray_site.other, Counter.describe, 1)
    runtime.get(quick)
    early: list[Span] = runtime.spans()
    runtime.get(slow)
    assert [span.verb for span in early + runtime.spans()] == ["describe", "read"], "a call that runs is told of later"
    slow = runtime.submit(ray_site.group, Counter.read, 0.3)
    quick = runtime.submit(ray_site.other, Counter.describe, 1)
    runtime.get(quick)
    runtime.get(slow)
    assert [span.verb for span in runtime.spans()] == ["read", "describe"]


# Errors


def assert_one_traceback(message: str, line: str) -> None:
    """The worker's own traceback, once, down to the line that failed."""
    assert message.count("Traceback (most recent call last)") == 1, message
    assert message.count(line) == 1, message


def test_a_failed_call_is_named_once(ray_site: Site) -> None:
    runtime = ray_site.runtime
    set_step(9)
    with phase("score"):
        failed = runtime.submit(ray_site.group, Counter.fail, rows="rows 0 to 63")
    with pytest.raises(WorkerError) as caught:
        runtime.get(failed)
    message = str(caught.value)
    for named in (r"counter\[[012]\]", r"\bcpu\b", r"\bfail\b", "rows 0 to 63", "phase 'score'", "step 9"):
        assert re.search(named, message.splitlines()[0]), (named, message)
    assert_one_traceback(message, 'raise ValueError("row 7 has no tokens")')
    # The worker lives on.
    assert [reading.value for reading in ray_site.read_all(ray_site.group)] == [0, 0, 0]


def test_a_failed_call_is_not_tried_again(ray_site: Site, tmp_path: Path) -> None:
    failed = ray_site.runtime.submit(ray_site.group, Counter.fail, tmp_path / "tries")
    for _ in range(2):
        with pytest.raises(WorkerError, match="row 7 has no tokens"):
            ray_site.runtime.get(failed)
    assert len((tmp_path / "tries").read_text().splitlines()) == 1


def test_the_call_that_failed_is_named_not_the_one_that_needed_it(ray_site: Site) -> None:
    runtime = ray_site.runtime
    with phase("score"):
        failed = runtime.submit(ray_site.group, Counter.fail)
    with phase("update"):
        needing = runtime.submit(ray_site.other, Counter.describe, [failed])
        further = runtime.submit(ray_site.other, Counter.describe, (needing,))
    for call in (further, needing):
        with pytest.raises(WorkerError, match=r"counter\[[012]\].*phase 'score'") as caught:
            runtime.get(call)
        assert_one_traceback(str(caught.value), 'raise ValueError("row 7 has no tokens")')


def test_a_gang_that_fails_as_one_is_told_once(ray_cluster: None) -> None:
    runtime = start_ray()
    gang = runtime.place_gang("counter", Counter)
    set_step(4)
    with phase("update"):
        failed = runtime.broadcast(gang, Counter.fail)
    with pytest.raises(WorkerError) as caught:
        runtime.get(failed)
    runtime.shutdown()
    message = str(caught.value)
    assert re.search(r"counter\[[012]\].*phase 'update', step 4", message.splitlines()[0])
    assert_one_traceback(message, 'raise ValueError("row 7 has no tokens")')


def test_a_rank_that_fails_while_the_others_wait_for_it_is_told_at_once(ray_cluster: None) -> None:
    runtime = start_ray()
    gang = runtime.place_gang("counter", Counter)
    runtime.get(runtime.broadcast(gang, Counter.read))
    started_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"counter\[1\](?s:.)*rows 3 and 4 do not fit"):
        runtime.get(runtime.broadcast(gang, Counter.add_unless_rank, 1))
    assert time.monotonic() - started_s < 10
    runtime.shutdown()


def test_a_failed_call_in_process_keeps_its_own_stack() -> None:
    site = build_local_site()
    with pytest.raises(ValueError, match="row 7") as caught:
        site.runtime.get(site.runtime.submit(site.group, Counter.fail))
    assert caught.traceback[-1].name == "fail"


def test_a_worker_that_cannot_start_is_named(ray_cluster: None) -> None:
    runtime = start_ray()
    with pytest.raises(WorkerError, match=r"^counter\[[012]\].*sleep length must be non-negative") as caught:
        runtime.get(runtime.submit(runtime.place("counter", Counter, 0, None, -1.0), Counter.read))
    runtime.shutdown()
    assert_one_traceback(str(caught.value), "time.sleep(start_s)")


def test_a_start_is_bounded(ray_cluster: None) -> None:
    runtime = start_ray(start_timeout_s=3.0)
    started_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"counter(?s:.)*runtime\.start_timeout_s"):
        runtime.get(runtime.submit(runtime.place("counter", Counter, 0, None, 60.0), Counter.read))
    runtime.shutdown()
    assert time.monotonic() - started_s < 20


def test_a_call_is_bounded_and_named(ray_cluster: None, tmp_path: Path) -> None:
    runtime = start_ray(call_timeout_s=1.0, recovery=RecoverySettings(max_attempts=1))
    counter, reader = runtime.place("counter", Counter), runtime.place("reader", Counter)
    for group in (counter, reader):
        runtime.get(runtime.broadcast(group, Counter.read))
    set_step(2)
    with phase("update"):
        stuck = runtime.submit(counter, Counter.stay, tmp_path / "stuck", rows="rows 0 to 7")
    with phase("score"):
        needy = runtime.submit(reader, Counter.describe, stuck)
    started_s = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        runtime.get(needy)
    assert time.monotonic() - started_s < 10
    message = str(caught.value)
    assert re.search(r"counter\[[012]\].*stay.*rows 0 to 7, phase 'update', step 2", message), message
    assert "runtime.call_timeout_s" in message
    runtime.shutdown()


# Lives of workers


def test_a_result_outlives_its_worker(ray_cluster: None) -> None:
    runtime = start_ray()
    maker, reader = runtime.place("maker", Counter), runtime.place("reader", Counter)
    big, small = runtime.submit(maker, Counter.make_bytes, 2_000_000), runtime.submit(maker, Counter.make, 3)
    pid = runtime.get(runtime.submit(maker, Counter.read, 0.0, big, small)).pid
    os.kill(pid, signal.SIGKILL)
    assert runtime.get(runtime.submit(maker, Counter.read)).pid != pid
    described = runtime.submit(reader, Counter.describe, [big, small])
    assert [found["rows"] for found in runtime.get(described)] == [1, 3]
    assert len(runtime.get(big).pylist("tokens")[0]) == 500_000
    runtime.shutdown()


def test_workers_are_closed_with_their_runtime(ray_cluster: None, tmp_path: Path) -> None:
    for name, runtime in (("local", InProcessRuntime()), ("ray", start_ray())):
        lives = tmp_path / name
        lives.mkdir()
        group = runtime.place("counter", Counter, 3, lives)
        runtime.get(runtime.broadcast(group, Counter.read))
        runtime.shutdown()
        runtime.shutdown()
        started = sorted(path.name.removeprefix("start-") for path in lives.glob("start-*"))
        closed = sorted(path.name.removeprefix("close-") for path in lives.glob("close-*"))
        assert len(started) == (1 if name == "local" else 3)
        assert closed == started
        if name == "ray":
            assert not any(is_alive(int(life.split("-")[1])) for life in started)


def test_a_runtime_ends_with_a_worker_that_does_not(ray_cluster: None, tmp_path: Path) -> None:
    runtime = start_ray()
    group = runtime.place("counter", Counter)
    runtime.get(runtime.broadcast(group, Counter.read))
    runtime.submit(group, Counter.stay, tmp_path / "stuck")
    pid = read_pid(tmp_path / "stuck")
    started_s = time.monotonic()
    runtime.shutdown()
    assert time.monotonic() - started_s < 20
    assert not is_alive(pid)


def is_alive(pid: int, within_s: float = 5.0) -> bool:
    """Whether the process is still there after a while."""
    deadline_s = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return Path(f"/proc/{pid}").exists()


def test_a_worker_sees_the_gpus_that_its_settings_may_name(ray_site: Site) -> None:
    runtime = ray_site.runtime
    unplaced = runtime.place("unplaced", Counter)
    names = ("CUDA_VISIBLE_DEVICES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    visible, override = (runtime.get(runtime.submit(unplaced, Counter.environment, name)) for name in names)
    assert visible == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert override == "0", "without it some releases of Ray hide all GPUs from a worker that reserves none"


def test_more_devices_than_there_are_are_refused(ray_cluster: None) -> None:
    def start() -> None:
        runtime = start_ray(placement=PlacementSettings(device_map={"counter": "cpu:0-63"}))
        runtime.get(runtime.broadcast(runtime.place("counter", Counter), Counter.read))

    with pytest.raises((ConfigError, WorkerError), match=r"cpu:0-63.*\b16 CPUs"):
        start()


def test_ray_address_local_brings_any_run_into_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert isinstance(start_runtime(RuntimeSettings(kind="ray")), InProcessRuntime)
