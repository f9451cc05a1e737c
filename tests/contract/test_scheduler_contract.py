"""What becomes of a group's calls and of its state when workers die or do not answer: as if nothing had happened, or a named stop."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stub_workers import Counter, Reading, read_pid

from hybridflow.batch import Batch
from hybridflow.observability.phases import phase, set_step
from hybridflow.runtime.api import (
    Group,
    RecoverySettings,
    Runtime,
    RuntimeSettings,
    Seat,
    WorkerError,
    WorkersLostError,
)
from hybridflow.runtime.host import Host, Run, Start, decode, encode
from hybridflow.runtime.placement import PlacementSettings
from hybridflow.types import Call, Mark, Ref

REPAIR_S = 30.0
"""A death is noticed and its worker built again well within this, on a busy machine, too; a stuck call takes three times as long."""

pytestmark = pytest.mark.usefixtures("ray_cluster")


@contextlib.contextmanager
def open_ray(devices: Mapping[str, str], call_timeout_s: float = 60.0, **recovery: Any) -> Iterator[Runtime]:
    """A runtime whose roles have a worker on each of these devices."""
    from hybridflow.runtime.ray_runtime import RayRuntime

    runtime = RayRuntime(
        RuntimeSettings(
            kind="ray",
            call_timeout_s=call_timeout_s,
            start_timeout_s=60.0,
            placement=PlacementSettings(device_map=dict(devices)),
            recovery=RecoverySettings(**recovery),
        )
    )
    try:
        yield runtime
    finally:
        runtime.shutdown()


ONE, TWO = {"counter": "cpu:0"}, {"counter": "cpu:0-1"}


@dataclass(frozen=True)
class Site:
    """A group of three and a gang of two that many tests use, since starting workers is what takes time."""

    runtime: Runtime
    group: Group[Counter]
    gang: Group[Counter]


class Sites:
    """Lends one site after the other; one that a test has left in any other way than by its end is not lent again."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._site: Site | None = None

    @contextlib.contextmanager
    def lend(self) -> Iterator[Site]:
        site, self._site = self._site or self._build(), None
        for group in (site.group, site.gang):
            site.runtime.get(site.runtime.broadcast(group, Counter.assign, 0, replaces=True))
        site.runtime.metrics()
        site.runtime.recoveries()
        yield site
        self._site = site

    def _build(self) -> Site:
        self.close()
        runtime = self._stack.enter_context(open_ray({"counter": "cpu:0-2", "gang": "cpu:3-4"}, max_restarts=1000))
        return Site(runtime, runtime.place("counter", Counter), runtime.place_gang("gang", Counter))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def sites(ray_cluster: None) -> Iterator[Sites]:
    lender = Sites()
    yield lender
    lender.close()


def read_all(runtime: Runtime, group: Group[Counter]) -> tuple[Reading, ...]:
    return runtime.get(runtime.broadcast(group, Counter.read))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the runtime has warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("hybridflow.runtime") and record.levelno >= logging.WARNING
    ]


def is_gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether the process has ended, or ends soon."""
    deadline_s = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_when(*marks: Path) -> Future[list[int]]:
    """Kills the workers that leave their process ids in these files, when all have, while the controller waits for something else."""
    killed: Future[list[int]] = Future()

    def run() -> None:
        pids = [read_pid(mark) for mark in marks]
        for pid in pids:
            kill(pid)
        killed.set_result(pids)

    threading.Thread(target=run, daemon=True).start()
    return killed


def add_and_stay(
    runtime: Runtime, group: Group[Counter], directory: Path, whole: int
) -> Ref[tuple[tuple[int, Any], ...]]:
    """A step in which every worker stays, the first time, as if it waited for the others in a collective."""
    split = lambda _, size: [(f"share {rank}", whole, directory) for rank in range(size)]  # noqa: E731
    return runtime.scatter(group, Counter.add_share_and_stay, split, ())


# One worker of a group


def test_a_busy_worker_that_is_killed_is_named_replaced_and_its_call_repeated(
    sites: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sites.lend() as site:
        runtime, group = site.runtime, site.group
        runtime.broadcast(group, Counter.add, 15)
        old = read_all(runtime, group)
        set_step(7)
        with phase("rollout"):
            staying = runtime.submit(group, Counter.stay_once, tmp_path / "mark", rows="rows 0 to 3")
            others = [runtime.submit(group, Counter.read, 0.05) for _ in range(9)]
        killed, started_s = kill_when(tmp_path / "mark"), time.monotonic()
        again = runtime.get(staying)
        assert time.monotonic() - started_s < REPAIR_S
        (pid,) = killed.result()
        (rank,) = (reading.rank for reading in old if reading.pid == pid)
        assert (again.value, again.pid != pid) == (15, True)
        assert [runtime.get(other).value for other in others] == [15] * 9
        new = read_all(runtime, group)
        assert [(reading.rank, reading.value, reading.history) for reading in new] == [
            (each, 15, ("assign 0", "add 15")) for each in range(3)
        ], "built again, and the changes made again, once"
        assert [reading.pid == before.pid for reading, before in zip(new, old, strict=True)] == [
            each != rank for each in range(3)
        ], "the others live on"
    (warning, *_) = warnings_of(caplog)
    for named in (f"counter[{rank}]", "phase 'rollout'", "step 7", "stay_once", "rows 0 to 3"):
        assert named in warning


def test_an_idle_worker_that_is_killed_is_replaced(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    with sites.lend() as site:
        runtime, group = site.runtime, site.group
        runtime.broadcast(group, Counter.add, 3)
        old = read_all(runtime, group)
        kill(old[1].pid)
        readings = [runtime.get(call) for call in [runtime.submit(group, Counter.read, 0.1) for _ in range(12)]]
        assert {reading.value for reading in readings} == {3}
        assert old[1].pid not in {reading.pid for reading in readings}
        runtime.broadcast(group, Counter.add, 4)
        assert [reading.value for reading in read_all(runtime, group)] == [7, 7, 7]
    assert any("counter[1]" in warning for warning in warnings_of(caplog))


def test_the_only_worker_of_a_group_comes_back(tmp_path: Path) -> None:
    with open_ray(ONE) as runtime:
        group = runtime.place("counter", Counter, 10)
        for amount in (1, 2, 3):
            runtime.broadcast(group, Counter.add, amount)
        staying = runtime.submit(group, Counter.stay_once, tmp_path / "mark")
        behind = runtime.broadcast(group, Counter.add, 4)
        late = runtime.submit(group, Counter.read)
        kill_when(tmp_path / "mark")
        assert (runtime.get(staying).value, runtime.get(behind), runtime.get(late).value) == (16, (20,), 20)
        assert runtime.get(late).history == ("add 1", "add 2", "add 3", "add 4")


def test_workers_killed_in_a_change_of_state_make_it_once(sites: Sites, tmp_path: Path) -> None:
    with sites.lend() as site:
        runtime, group = site.runtime, site.group
        runtime.broadcast(group, Counter.add, 1)
        old = read_all(runtime, group)
        changed = add_and_stay(runtime, group, tmp_path, 10)
        killed = kill_when(*(tmp_path / f"rank_{rank}" for rank in range(3)))
        assert runtime.get(changed) == tuple((rank, f"share {rank}") for rank in range(3))
        assert [reading.value for reading in read_all(runtime, group)] == [11, 11, 11]
        assert killed.result() == [reading.pid for reading in old]


def test_a_restarted_worker_repeats_no_more_than_it_must(sites: Sites) -> None:
    with sites.lend() as site:
        runtime, group = site.runtime, site.group
        for amount in (1, 2):
            runtime.broadcast(group, Counter.add, amount)
        runtime.broadcast(group, Counter.assign, 50, replaces=True)
        runtime.broadcast(group, Counter.add, 5)
        kill(read_all(runtime, group)[2].pid)
        readings = read_all(runtime, group)
        assert [(reading.value, reading.history) for reading in readings] == [(55, ("assign 50", "add 5"))] * 3


def test_what_a_change_was_made_of_is_kept_for_the_next_life() -> None:
    with open_ray(ONE) as runtime:
        maker, group = runtime.place("maker", Counter), runtime.place("counter", Counter)
        rows: Ref[Batch] | None = runtime.submit(maker, Counter.make, 40_000)
        runtime.get(runtime.broadcast(group, Counter.add_rows, rows, rows))
        (reading,) = read_all(runtime, group)
        rows = None
        gc.collect()
        kill(reading.pid)
        assert runtime.get(runtime.submit(group, Counter.read)).value == 80_000


def test_two_workers_that_die_at_once_are_both_replaced(
    sites: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sites.lend() as site:
        runtime, group = site.runtime, site.group
        runtime.broadcast(group, Counter.add, 3)
        old = read_all(runtime, group)
        staying = [runtime.submit(group, Counter.stay_once, tmp_path / f"mark_{index}") for index in range(2)]
        killed = kill_when(*(tmp_path / f"mark_{index}" for index in range(2)))
        assert [runtime.get(call).value for call in staying] == [3, 3]
        pids = killed.result()
        new = read_all(runtime, group)
        assert [reading.value for reading in new] == [3, 3, 3]
        assert not {reading.pid for reading in new} & set(pids)
    named = {reading.rank for reading in old if reading.pid in pids}
    for rank in named:
        assert any(f"counter[{rank}]" in warning for warning in warnings_of(caplog))


def test_a_whole_group_that_dies_at_once_comes_back(sites: Sites) -> None:
    with sites.lend() as site:
        runtime, group = site.runtime, site.group
        runtime.broadcast(group, Counter.add, 3)
        for reading in read_all(runtime, group):
            kill(reading.pid)
        runtime.broadcast(group, Counter.add, 4)
        assert [reading.value for reading in read_all(runtime, group)] == [7, 7, 7]


def test_a_worker_that_dies_while_it_is_restarted_is_restarted_again(tmp_path: Path) -> None:
    with open_ray(TWO) as runtime:
        group = runtime.place("counter", Counter, 10, tmp_path, 1.0)
        runtime.broadcast(group, Counter.add, 3)
        first = {reading.pid for reading in read_all(runtime, group)}
        kill(min(first))
        second: Future[int] = Future()
        threading.Thread(target=lambda: second.set_result(kill_new_life(tmp_path, first)), daemon=True).start()
        runtime.broadcast(group, Counter.add, 4)
        third = {(reading.pid, reading.value) for reading in read_all(runtime, group)}
        assert {value for _, value in third} == {17}
        assert not {pid for pid, _ in third} & {min(first), second.result()}
        assert len({pid for pid, _ in third}) == 2


def kill_new_life(lives: Path, known: set[int], within_s: float = REPAIR_S) -> int:
    """Kills a worker that is not known yet as soon as it has begun to start; returns its process id."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        new = {int(path.name.split("-")[2]) for path in lives.glob("start-*")} - known
        if new:
            kill(min(new))
            return min(new)
        time.sleep(0.005)
    raise TimeoutError(f"no worker was started again in {within_s} s")


def test_random_kills_change_no_result(sites: Sites) -> None:
    rng = random.Random(11)
    with sites.lend() as site:
        runtime, group = site.runtime, site.group
        value, calls, expected = 0, [], []
        for round_number in range(4):
            pids = [reading.pid for reading in read_all(runtime, group)]
            for index in range(24):
                if rng.random() < 0.3:
                    runtime.broadcast(group, Counter.add, index, 0.005)
                    value += index
                calls.append(runtime.submit(group, Counter.read, rng.choice((0.0, 0.02, 0.05))))
                expected.append(value)
                if index == 6 * round_number:
                    kill(rng.choice(pids))
            assert [runtime.get(call).value for call in calls] == expected
        histories = {reading.history for reading in read_all(runtime, group)}
        assert len(histories) == 1, "every worker has made the same changes in the same order"


# A gang


def test_a_gang_that_loses_a_rank_goes_back_to_its_snapshot_as_one(
    sites: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sites.lend() as site:
        runtime, gang = site.runtime, site.gang
        runtime.broadcast(gang, Counter.add, 101)
        assert runtime.snapshot(gang, Counter.take, Counter.restore) is not None
        runtime.broadcast(gang, Counter.add, 2)
        old = read_all(runtime, gang)
        assert [reading.value for reading in old] == [103, 103]
        set_step(12)
        with phase("update"):
            step = add_and_stay(runtime, gang, tmp_path, 10)
            behind = runtime.broadcast(gang, Counter.add, 20)
        started_s = time.monotonic()
        kill_when(tmp_path / "rank_1")
        assert runtime.get(step) == ((0, "share 0"), (1, "share 1"))
        assert time.monotonic() - started_s < REPAIR_S, "the ranks that were left did not have to end by themselves"
        assert runtime.get(behind) == (133, 133)
        new = read_all(runtime, gang)
        assert [(reading.rank, reading.value) for reading in new] == [(0, 133), (1, 133)]
        assert not {reading.pid for reading in new} & {reading.pid for reading in old}, "no rank keeps half a step"
        assert {reading.history for reading in new} == {("restore 101", "add 2", "add 10", "add 20")}
    (warning, *_) = warnings_of(caplog)
    for named in ("gang[1]", "phase 'update'", "step 12"):
        assert named in warning


def test_a_gang_without_a_snapshot_starts_from_how_it_was_built(tmp_path: Path) -> None:
    with open_ray(TWO) as runtime:
        gang = runtime.place_gang("counter", Counter, 100)
        runtime.broadcast(gang, Counter.add, 1)
        step = add_and_stay(runtime, gang, tmp_path, 10)
        kill_when(tmp_path / "rank_0")
        runtime.get(step)
        assert {(reading.value, reading.history) for reading in read_all(runtime, gang)} == {(111, ("add 1", "add 10"))}


def test_the_newest_snapshot_counts_and_deaths_may_follow_each_other(sites: Sites, tmp_path: Path) -> None:
    with sites.lend() as site:
        runtime, gang = site.runtime, site.gang
        whole = 0
        for step in range(1, 4):
            directory = tmp_path / str(step)
            directory.mkdir()
            changed = add_and_stay(runtime, gang, directory, step)
            kill_when(directory / f"rank_{step % 2}")
            runtime.get(changed)
            whole += step
            runtime.snapshot(gang, Counter.take, Counter.restore)
        kill(read_all(runtime, gang)[0].pid)
        assert {reading.value for reading in read_all(runtime, gang)} == {whole}
        assert {reading.history[0] for reading in read_all(runtime, gang)} == {f"restore {whole}"}


def test_a_snapshot_outlives_the_whole_gang(sites: Sites) -> None:
    with sites.lend() as site:
        runtime, gang = site.runtime, site.gang
        runtime.broadcast(gang, Counter.add, 9)
        copy = runtime.snapshot(gang, Counter.take, Counter.restore)
        assert copy is not None
        assert runtime.get(copy) == 9
        for reading in read_all(runtime, gang):
            kill(reading.pid)
        readings = read_all(runtime, gang)
        assert {(reading.value, reading.history) for reading in readings} == {(9, ("restore 9",))}


def test_a_death_during_a_snapshot_leaves_the_state_whole(sites: Sites) -> None:
    with sites.lend() as site:
        runtime, gang = site.runtime, site.gang
        runtime.broadcast(gang, Counter.add, 9)
        pids = [reading.pid for reading in read_all(runtime, gang)]
        runtime.snapshot(gang, Counter.take, Counter.restore)
        for pid in pids:
            kill(pid)
        runtime.broadcast(gang, Counter.add, 1)
        assert {reading.value for reading in read_all(runtime, gang)} == {10}


# Bounds


def test_more_deaths_than_may_be_repaired_stop_the_run(tmp_path: Path) -> None:
    with open_ray(TWO, max_restarts=2) as runtime:
        group = runtime.place("counter", Counter)
        set_step(3)
        for life in range(2):
            kill(read_all(runtime, group)[life].pid)
            assert [reading.value for reading in read_all(runtime, group)] == [0, 0]
        with phase("score"):
            staying = runtime.submit(group, Counter.stay_once, tmp_path / "mark")
        kill_when(tmp_path / "mark")
        with pytest.raises(WorkersLostError) as caught:
            runtime.get(staying)
        message = str(caught.value)
        assert re.search(r"\b3\b|\bthree\b", message), message
        assert "max_restarts" in message
        assert re.search(r"counter\[[01]\].*phase 'score', step 3", message), message


def test_no_restart_is_made_where_none_may_be(tmp_path: Path) -> None:
    with open_ray(TWO, max_restarts=0) as runtime:
        group = runtime.place("counter", Counter)
        staying = runtime.submit(group, Counter.stay_once, tmp_path / "mark")
        killed = kill_when(tmp_path / "mark")
        with pytest.raises(WorkersLostError, match=r"counter\[[01]\](?s:.)*max_restarts"):
            runtime.get(staying)
        assert killed.done()


def test_a_death_is_forgotten_after_its_window() -> None:
    with open_ray(ONE, max_restarts=1, window_s=1.5) as runtime:
        group = runtime.place("counter", Counter)
        for _ in range(3):
            kill(read_all(runtime, group)[0].pid)
            assert [reading.value for reading in read_all(runtime, group)] == [0]
            time.sleep(1.6)


def test_a_call_that_kills_each_worker_is_the_cause(tmp_path: Path) -> None:
    with open_ray(ONE, max_attempts=2) as runtime:
        group = runtime.place("counter", Counter)
        set_step(6)
        with phase("rollout"):
            deadly = runtime.submit(group, Counter.die, tmp_path / "mark", rows="rows 8 to 15")
        with pytest.raises(WorkerError) as caught:
            runtime.get(deadly)
        assert len((tmp_path / "mark").read_text().splitlines()) == 2
        message = str(caught.value)
        assert re.search(r"counter.*die.*rows 8 to 15, phase 'rollout', step 6", message), message
        assert re.search(r"\b2\b|\btwice\b", message), message
        assert "max_attempts" in message


def test_a_stuck_call_ends_its_worker_and_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_ray(TWO, call_timeout_s=1.5) as runtime:
        group = runtime.place("counter", Counter, 5)
        read_all(runtime, group)
        set_step(8)
        with phase("rollout"):
            staying = runtime.submit(group, Counter.stay_once, tmp_path / "mark", rows="rows 0 to 3")
            needy = runtime.submit(group, Counter.describe, [staying])
        started_s = time.monotonic()
        assert runtime.get(needy)[0].value == 5
        assert time.monotonic() - started_s < 1.5 + REPAIR_S
        assert is_gone(read_pid(tmp_path / "mark")), "the stuck worker has ended"
        assert [reading.value for reading in read_all(runtime, group)] == [5, 5]
    (warning, *_) = warnings_of(caplog)
    for named in ("counter[", "stay_once", "rows 0 to 3", "phase 'rollout'", "step 8", "1.5 s", "wait"):
        assert named in warning


def test_a_call_that_is_always_stuck_is_the_cause(tmp_path: Path) -> None:
    with open_ray(ONE, call_timeout_s=1.0, max_attempts=2) as runtime:
        group = runtime.place("counter", Counter)
        read_all(runtime, group)
        set_step(8)
        with phase("rollout"):
            stuck = runtime.submit(group, Counter.stay, tmp_path / "mark")
        started_s = time.monotonic()
        with pytest.raises(WorkerError, match=r"counter.*stay.*phase 'rollout', step 8") as caught:
            runtime.get(stuck)
        assert time.monotonic() - started_s < 2 * 1.0 + REPAIR_S
        assert len((tmp_path / "mark").read_text().splitlines()) == 2
        assert "call_timeout_s" in str(caught.value)


def test_a_stuck_rank_restarts_its_gang(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_ray(TWO, call_timeout_s=1.5) as runtime:
        gang = runtime.place_gang("counter", Counter)
        runtime.broadcast(gang, Counter.add, 1)
        runtime.snapshot(gang, Counter.take, Counter.restore)
        read_all(runtime, gang)
        set_step(9)
        with phase("update"):
            step = add_and_stay(runtime, gang, tmp_path, 10)
        assert runtime.get(step) == ((0, "share 0"), (1, "share 1"))
        assert {reading.value for reading in read_all(runtime, gang)} == {11}
    assert any(
        "add_share_and_stay" in warning and "phase 'update', step 9" in warning for warning in warnings_of(caplog)
    )


def test_a_wait_for_a_chain_of_calls_may_last_longer_than_one_call() -> None:
    with open_ray(ONE, call_timeout_s=1.5) as runtime:
        group = runtime.place("counter", Counter)
        read_all(runtime, group)
        calls = [runtime.submit(group, Counter.read, 0.5) for _ in range(6)]
        assert runtime.get(calls[-1]).value == 0


def test_an_error_is_no_death(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_ray(TWO, max_restarts=0) as runtime:
        group = runtime.place("counter", Counter)
        old = {reading.pid for reading in read_all(runtime, group)}
        with pytest.raises(WorkerError, match="row 7 has no tokens") as caught:
            runtime.get(runtime.submit(group, Counter.fail, tmp_path / "mark"))
        assert not isinstance(caught.value, WorkersLostError)
        assert {reading.pid for reading in read_all(runtime, group)} == old
    assert len((tmp_path / "mark").read_text().splitlines()) == 1
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("is_gang", [False, True])
def test_a_death_is_told_once_with_its_times(sites: Sites, is_gang: bool, tmp_path: Path) -> None:
    with sites.lend() as site:
        runtime, group = site.runtime, site.gang if is_gang else site.group
        old = read_all(runtime, group)
        set_step(5)
        with phase("score"):
            staying = runtime.submit(group, Counter.stay_once, tmp_path / "mark")
        killed, started_s = kill_when(tmp_path / "mark"), time.time()
        runtime.get(staying)
        read_all(runtime, group)
        (rank,) = (reading.rank for reading in old if [reading.pid] == killed.result())
        (recovery,) = runtime.recoveries()
        assert recovery.worker.startswith(f"{group.role}[{rank}]")
        assert "stay_once" in recovery.call and "phase 'score'" in recovery.call
        assert recovery.step == 5
        assert recovery.restarted_s is not None and recovery.repeated_s is not None
        times_s = (started_s, recovery.detected_s, recovery.repeated_s, time.time())
        assert list(times_s) == sorted(times_s)
        assert recovery.detected_s < recovery.restarted_s < times_s[-1]
        assert runtime.metrics()["recovery/deaths"].value == 1
        assert (runtime.recoveries(), runtime.metrics()["recovery/deaths"].value) == ([], 0)


# The worker's own side


def start_host() -> Host:
    host = Host("node", "10.0.0.1")
    assert decode(host.answer(encode(Start(Seat("counter"), Counter, (), {})))).failure is None
    return host


def change(position: int, follows: int | None, amount: int) -> bytes:
    """The order for one change of state, as it travels."""
    call = Call("counter", "add", Mark(1, "update"))
    return encode(Run(call, Counter.add, (amount,), {}, 0, position=position, follows=follows))


def value_of(host: Host) -> int:
    reading, _ = host.answer(encode(Run(Call("counter", "read", Mark(1, "score")), Counter.read, (), {}, 0)))
    found: int = reading.value
    return found


def test_a_change_that_is_delivered_twice_is_refused() -> None:
    host = start_host()
    first, second = change(1, None, 5), change(2, 1, 7)
    for order in (first, second):
        assert decode(host.answer(order)).failure is None
    for order in (second, first):
        failure = decode(host.answer(order)).failure
        assert failure is not None and failure.kind == "OutOfOrderError"
        assert "delivered twice" in failure.text
    assert value_of(host) == 12


def test_a_change_that_skips_one_is_refused() -> None:
    host = start_host()
    host.answer(change(1, None, 5))
    failure = decode(host.answer(change(3, 2, 7))).failure
    assert failure is not None and failure.kind == "OutOfOrderError"
    assert value_of(host) == 5
    assert decode(host.answer(change(2, 1, 2))).failure is None
    assert value_of(host) == 7


# Memory


@pytest.mark.slow
def test_the_controller_stays_as_large_as_it_is_over_2000_steps() -> None:
    with open_ray(TWO) as runtime:
        gang, generator = runtime.place_gang("counter", Counter), runtime.place("generator", Counter)
        weights = runtime.submit(gang, Counter.take)
        sizes = {}
        for step in range(1, 2001):
            weights = run_stub_step(runtime, gang, generator, step, weights)
            if step in (500, 2000):
                sizes[step] = (read_rss_bytes(), count_objects(), count_ray_references())
    (rss_500, objects_500, references_500), (rss_2000, objects_2000, references_2000) = sizes.values()
    assert rss_2000 - rss_500 < 4 * 2**20, f"{(rss_2000 - rss_500) / 1500:.0f} bytes a step are kept"
    assert objects_2000 - objects_500 < 30, "what the runtime holds belongs to calls that live"
    assert references_2000 - references_500 < 30, "and so does what it holds in the object store"


def run_stub_step(
    runtime: Runtime, gang: Group[Counter], generator: Group[Counter], step: int, weights: Ref[int]
) -> Ref[int]:
    """The calls of a step in small: rollout with named weights, score, update, a snapshot now and then; returns the new weights."""
    set_step(step)
    with phase("rollout"):
        tokens, text = runtime.submit_pieces(generator, Counter.cut_with, 2, 2, weights)
    with phase("score"):
        double = runtime.submit(gang, Counter.double, text)
    with phase("update"):
        split = lambda digests, size: [(tokens, double) for _ in range(size)]  # noqa: E731
        added = runtime.scatter(gang, Counter.add_rows, split, (tokens,))
        if step % 2 == 0:
            runtime.snapshot(gang, Counter.take, Counter.restore)
        weights = runtime.submit(gang, Counter.take)
    assert runtime.get(added) == ((0, 4 * step), (1, 4 * step))
    runtime.spans()
    runtime.metrics()
    return weights


def read_rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_objects() -> int:
    """Live objects of the project's own classes."""
    return sum(type(item).__module__.startswith("hybridflow.") for item in gc.get_objects())


def count_ray_references() -> int:
    """Objects in the store that this process holds or waits for."""
    from ray._private import worker

    core: Any = vars(worker.global_worker)["core_worker"]
    return len(core.get_all_reference_counts())
