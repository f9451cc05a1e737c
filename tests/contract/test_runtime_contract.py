"""Both runtimes answer the same questions: order, references, errors, spans, bounded waits, user code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hybridflow.batch import Batch
from hybridflow.observability.phases import phase, phase_times, set_step
from hybridflow.runtime.api import Runtime, RuntimeSettings, WorkerError
from hybridflow.runtime.inprocess import InProcessRuntime
from hybridflow.runtime.start import start_runtime
from hybridflow.types import BatchRef, MetricsRef, mean, total


class Counter:
    """A worker that remembers the order of its calls."""

    def __init__(self, start: int) -> None:
        self.seen: list[int] = [start]

    def add(self, value: int, wait_s: float = 0.0) -> int:
        time.sleep(wait_s)
        self.seen.append(value)
        return sum(self.seen)

    def order(self) -> list[int]:
        return self.seen

    def make(self, rows: int) -> Batch:
        return Batch.from_columns(group_id=list(range(rows)), tokens=[[i, i + 1] for i in range(rows)])

    def count(self, batch: Batch, extra: tuple[Batch, ...] = ()) -> dict[str, Any]:
        assert isinstance(batch, Batch)
        for columns in extra:
            batch = batch.merge(columns)
        return {"rows": batch.num_rows, "names": sorted(batch.column_names)}

    def double(self, batch: Batch) -> Batch:
        return Batch.from_columns(double=[2 * group for group in batch.pylist("group_id")])

    def measure(self, value: float) -> dict[str, Any]:
        return {"loss": mean(value, 2.0), "rows": total(3)}

    def apply(self, function: Any, value: int) -> int:
        return int(function(value))

    def close(self) -> None:
        self.seen.clear()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail(self) -> None:
        raise ValueError("row 7 has no tokens")


@pytest.fixture(scope="module")
def ray_runtime(ray_cluster: None) -> Iterator[Runtime]:
    import ray

    from hybridflow.runtime.ray_runtime import RayRuntime

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    runtime = RayRuntime(RuntimeSettings(kind="ray", call_timeout_s=60.0))
    yield runtime
    runtime.shutdown()


@pytest.fixture(params=["local", "ray"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return InProcessRuntime() if request.param == "local" else request.getfixturevalue("ray_runtime")


def test_calls_of_one_worker_run_in_order(runtime: Runtime) -> None:
    worker = runtime.place("counter", Counter, 0)
    runtime.submit(worker, Counter.add, 1, 0.05)
    runtime.submit(worker, Counter.add, 2)
    last = runtime.submit(worker, Counter.add, 3)
    assert runtime.get(last) == 6
    assert runtime.get(runtime.submit(worker, Counter.order)) == [0, 1, 2, 3]


def test_a_result_feeds_another_worker_as_data(runtime: Runtime) -> None:
    maker, reader = runtime.place("maker", Counter, 0), runtime.place("reader", Counter, 0)
    chunks = tuple(runtime.submit(maker, Counter.make, rows) for rows in (3, 2))
    batch = BatchRef(chunks, (3, 2))
    scores = BatchRef(tuple(runtime.submit(reader, Counter.double, chunk) for chunk in chunks), (3, 2))
    counted = runtime.get(runtime.submit(reader, Counter.count, batch, (scores,)))
    assert counted == {"rows": 5, "names": ["double", "group_id", "tokens"]}
    assert runtime.get(batch).pylist("group_id") == [0, 1, 2, 0, 1]


def test_metrics_of_two_calls_merge_by_their_own_rules(runtime: Runtime) -> None:
    worker = runtime.place("counter", Counter, 0)
    parts = MetricsRef((runtime.submit(worker, Counter.measure, 1.0),)) | MetricsRef(
        (runtime.submit(worker, Counter.measure, 2.0),)
    )
    metrics = runtime.get(parts)
    assert (metrics["loss"].value, metrics["loss"].weight, metrics["rows"].value) == (1.5, 4.0, 6.0)


def test_a_live_function_travels(runtime: Runtime) -> None:
    offset = 40
    worker = runtime.place("counter", Counter, 0)
    assert runtime.get(runtime.submit(worker, Counter.apply, lambda value: value + offset, 2)) == 42


def test_spans_carry_phase_and_step(runtime: Runtime) -> None:
    worker = runtime.place("timed", Counter, 0)
    runtime.spans()
    set_step(5)
    with phase("rollout"):
        runtime.get(runtime.submit(worker, Counter.add, 1, 0.02))
    with phase("update"):
        runtime.get(runtime.submit(worker, Counter.add, 1))
    spans = [span for span in runtime.spans() if span.role == "timed"]
    assert [(span.verb, span.phase, span.step) for span in spans] == [("add", "rollout", 5), ("add", "update", 5)]
    assert phase_times(spans)["rollout"] >= 0.02
    assert all(span.peak_rss_bytes > 1e6 for span in spans)
    assert runtime.spans() == []


def test_a_failed_call_on_ray_is_named_once(ray_runtime: Runtime) -> None:
    worker = ray_runtime.place("reward", Counter, 0)
    set_step(9)
    with phase("score"):
        failed = ray_runtime.submit(worker, Counter.fail)
    with pytest.raises(WorkerError) as caught:
        ray_runtime.get(failed)
    message = str(caught.value)
    assert message.startswith("reward.fail (phase 'score', step 9) failed: ValueError('row 7 has no tokens')")
    assert message.count("ValueError: row 7 has no tokens") == 1, "the worker's own traceback, once"
    assert 'raise ValueError("row 7 has no tokens")' in message
    # The worker lives on.
    assert ray_runtime.get(ray_runtime.submit(worker, Counter.add, 4)) == 4


def test_the_call_that_failed_is_named_not_the_one_that_needed_it(ray_runtime: Runtime) -> None:
    reward, actor = ray_runtime.place("reward", Counter, 0), ray_runtime.place("actor", Counter, 0)
    with phase("score"):
        failed = ray_runtime.submit(reward, Counter.fail)
    with phase("update"):
        needing = ray_runtime.submit(actor, Counter.apply, str, failed)
    with pytest.raises(WorkerError, match=r"^reward.fail \(phase 'score'"):
        ray_runtime.get(needing)


def test_a_failed_call_in_process_keeps_its_own_stack() -> None:
    runtime = InProcessRuntime()
    worker = runtime.place("reward", Counter, 0)
    with pytest.raises(ValueError, match="row 7"):
        runtime.submit(worker, Counter.fail)


def test_a_wait_is_bounded_and_says_for_whom(ray_runtime: Runtime) -> None:
    from hybridflow.runtime.ray_runtime import RayRuntime

    impatient = RayRuntime(RuntimeSettings(kind="ray", call_timeout_s=0.2))
    worker = impatient.place("slow", Counter, 0)
    set_step(2)
    with phase("update"):
        late = impatient.submit(worker, Counter.add, 1, 5.0)
    with pytest.raises(
        WorkerError, match=r"waited 0.2 s for slow.add \(phase 'update', step 2\).*runtime.call_timeout_s"
    ):
        impatient.get(late)
    impatient.shutdown()


def test_a_result_outlives_its_worker(ray_runtime: Runtime) -> None:
    from hybridflow.runtime.ray_runtime import RayRuntime

    short_lived = RayRuntime(RuntimeSettings(kind="ray"))
    worker = short_lived.place("maker", Counter, 0)
    chunk = short_lived.submit(worker, Counter.make, 3)
    short_lived.get(chunk)
    short_lived.shutdown()
    assert ray_runtime.get(chunk).num_rows == 3


def test_a_worker_that_cannot_start_is_named(ray_runtime: Runtime) -> None:
    worker = ray_runtime.place("counter", Counter, "x", 1, 2)  # type: ignore[call-arg]
    with pytest.raises(WorkerError, match=r"counter.start .*lost its worker(?s:.)*TypeError"):
        ray_runtime.get(ray_runtime.submit(worker, Counter.order))


def test_a_worker_sees_the_gpus_that_its_settings_may_name(ray_runtime: Runtime) -> None:
    worker = ray_runtime.place("actor", Counter, 0)
    names = ("CUDA_VISIBLE_DEVICES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    visible, override = (ray_runtime.get(ray_runtime.submit(worker, Counter.environment, name)) for name in names)
    assert visible == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert override == "0", "without it some releases of Ray hide all GPUs from a worker that reserves none"


def test_ray_address_local_brings_any_run_into_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert isinstance(start_runtime(RuntimeSettings(kind="ray")), InProcessRuntime)


def test_workers_are_closed_with_their_runtime() -> None:
    runtime = InProcessRuntime()
    worker = runtime.place("counter", Counter, 3)
    runtime.shutdown()
    assert worker.handle.seen == []
    runtime.shutdown()
