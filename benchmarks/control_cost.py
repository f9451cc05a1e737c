"""What the controller itself costs: CPU seconds and bytes of a step, from 1 to 1,000 workers that compute nothing.

    python benchmarks/control_cost.py --workers 1 2 10 30 100 300 1000 --processes 8 --plot docs/control_cost.svg

The roles' facades, the scheduler and Ray are the real ones, and so are the data's columns and sizes (8,192 sequences of 2,048 tokens go
through Ray's store). Stubs stand in for the verbs of the workers, and a few processes hold many workers each, since no single machine
holds a thousand processes: what a thousand connections would add is not in these numbers.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
import torch
from cases import build_parser, print_line

from hybridflow.algorithms import PolicyGradient, PolicyGradientSettings
from hybridflow.batch import Batch
from hybridflow.columns import Ragged
from hybridflow.observability.phases import phase, set_step
from hybridflow.rewards import RewardSettings
from hybridflow.roles.actor import Actor
from hybridflow.roles.actor_worker import ActorSpec, ActorWorker
from hybridflow.roles.carried import Snapshot, Weights
from hybridflow.roles.generator import GeneratorWorker, RolloutSettings
from hybridflow.roles.parts import cut_columns, cut_rollout
from hybridflow.roles.policy import ModelSettings, ModelSpec
from hybridflow.roles.reward_model import RewardModel, RewardWorker
from hybridflow.runtime.api import Pieces, RuntimeSettings
from hybridflow.runtime.host import Host
from hybridflow.runtime.placement import Placement, RolePlacement, Slot
from hybridflow.runtime.ray_transport import ActorProcess, RayTransport
from hybridflow.runtime.scheduler import Scheduler
from hybridflow.train_engine import TrainSettings
from hybridflow.types import RowState, SamplingParams, mean
from hybridflow.weights.probe import ProbeScores

SEQUENCES, SAMPLES = 8192, 8
METRICS = 24


def stub_rollout(
    worker: Any, prompts: Batch, sampling: SamplingParams, step: int, sizes: tuple[int, ...], weights: Any
) -> Any:
    """Samples without a model: as many rows and tokens as a real one would return."""
    rows, length = sum(sizes), sampling.max_new_tokens
    offsets = np.arange(rows + 1, dtype=np.int64) * length
    flat = {
        "tokens": np.zeros(rows * length, np.int32),
        "loss_mask": np.ones(rows * length, np.uint8),
        "rollout_logprobs": np.zeros(rows * length, np.float32),
    }
    flat["loss_mask"][offsets[:-1]] = 0
    ragged = {name: Ragged(torch.from_numpy(values), torch.from_numpy(offsets)) for name, values in flat.items()}
    batch = Batch.from_columns(
        group_id=np.repeat(prompts.numpy("group_id"), sampling.samples_per_prompt),
        sample_id=np.arange(rows, dtype=np.int64) % sampling.samples_per_prompt,
        finish_reason=["length"] * rows,
        state=np.full(rows, int(RowState.OK), np.int8),
        response=["x" * length] * rows,
        **ragged,
    )
    return cut_rollout(batch, sizes)


def stub_score(worker: Any, batch: Batch, sizes: tuple[int, ...]) -> Any:
    """Rewards without a function."""
    return cut_columns(Batch.from_columns(reward=np.zeros(batch.num_rows), reward_error=[None] * batch.num_rows), sizes)


def stub_update(worker: Any, batch: Batch | None, *_: Any) -> Any:
    """Metrics without a step."""
    return {f"stub/metric_{number}": mean(1.0, 1.0) for number in range(METRICS)}


class StubHosts:
    """One process that holds many workers."""

    def __init__(self) -> None:
        for cls in (ActorWorker, GeneratorWorker, RewardWorker):
            cls.__init__ = lambda self, *_: None  # type: ignore[method-assign, assignment, misc]
            cls.close = lambda self: None  # type: ignore[method-assign]
        GeneratorWorker.rollout = stub_rollout  # type: ignore[method-assign, assignment]
        RewardWorker.score = stub_score  # type: ignore[method-assign, assignment]
        ActorWorker.update = stub_update  # type: ignore[method-assign, assignment]
        ActorWorker.offer_weights = lambda self: None  # type: ignore[method-assign]
        GeneratorWorker.expect_weights = lambda self, _: None  # type: ignore[method-assign]
        ActorWorker.push_weights = GeneratorWorker.pull_weights = lambda self, *_: None  # type: ignore[method-assign, assignment]
        named = Weights(0, {}, ProbeScores((), (), torch.float32))
        ActorWorker.publish = lambda self, *_: Pieces((named,), (None,))  # type: ignore[method-assign]
        ActorWorker.snapshot = lambda self: Snapshot(0, {}, {}, {}, {})  # type: ignore[method-assign]
        self._hosts: dict[int, Host] = {}

    def answer(self, number: int, order: bytes, *values: Any) -> Any:
        """As `Host.answer`, of the worker with this number."""
        return self._hosts.setdefault(number, Host("stub", "stub")).answer(order, *values)


class StubTransport(RayTransport):
    """Ray, with many workers a process."""

    def __init__(self, num_processes: int) -> None:
        super().__init__(Placement(), start_timeout_s=60.0)
        stub = ray.remote(StubHosts).options(num_cpus=0, enable_task_events=False)
        self._processes = [ActorProcess(stub.remote()) for _ in range(num_processes)]
        self._created = 0

    def create(self, role: str, slot: Slot | None) -> Any:
        """See `Transport.create`."""
        self._created += 1
        return self._created

    def send(self, handle: Any, order: bytes, inputs: Sequence[Any], num_objects: int) -> tuple[Any, tuple[Any, ...]]:
        """See `Transport.send`."""
        process = self._processes[handle % len(self._processes)]
        sent = process.call(num_objects + 1, handle, order, *inputs)
        return (sent, ()) if not num_objects else (sent[-1], tuple(sent[:-1]))

    def node_is_lost(self, node_id: str) -> bool:
        """See `Transport.node_is_lost`: the stubs' node is none that could be asked."""
        return False

    def kill(self, handle: Any) -> None:
        """See `Transport.kill`."""

    def close(self) -> None:
        """See `Transport.close`."""
        for process in self._processes:
            ray.kill(process.actor)


def main() -> None:
    """Measures and prints."""
    parser = build_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 10, 100, 300, 1000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="tokens of a response")
    parser.add_argument("--steps", type=int, default=5, help="steps measured, after two that are not")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", help="file for the table as JSON")
    parser.add_argument("--plot", help="file for CPU seconds over workers as SVG")
    arguments = parser.parse_args()
    environment = {
        "env_vars": {"RAY_max_direct_call_object_size": "4096", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    }
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    gc.collect()
    gc.freeze()  # as RayRuntime does
    lines = [
        measure(workers, tokens, arguments.steps, arguments.processes)
        for tokens in arguments.tokens
        for workers in arguments.workers
    ]
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(lines, indent=1) + "\n")
    if arguments.plot:
        Path(arguments.plot).write_text(draw(lines))


def measure(workers: int, tokens: int, steps: int, processes: int) -> dict[str, float]:
    """One line of the table: medians over the steps."""
    trainers, generators, scorers = max(workers // 2, 1), workers // 2, max(workers // 32, 1)
    roles = {"actor": trainers, "reward": scorers} | ({"rollout": generators} if generators else {})
    placement = Placement(tuple(place(role, count) for role, count in roles.items()))
    runtime = Scheduler(StubTransport(processes), RuntimeSettings(kind="ray"), placement)
    actor, reward, algorithm = build_roles(runtime, tokens, separate=bool(generators))
    prompts = Batch.from_columns(group_id=np.arange(SEQUENCES // SAMPLES), prompt_tokens=[[1]] * (SEQUENCES // SAMPLES))
    costs = []
    for step in range(1, steps + 3):
        set_step(step)
        runtime.metrics()
        started_s, thread_s = time.perf_counter(), time.thread_time()
        with phase("rollout"):
            batch = actor.rollout(prompts, step=step)
        with phase("score"):
            scores = {"reward": reward.score(batch)}
        with phase("update"):
            metrics = actor.update(algorithm.policy_loss(batch, scores))
        runtime.get(metrics)
        runtime.spans()
        costs.append({name: metric.value for name, metric in runtime.metrics().items()})
        costs[-1] |= {"step_s": time.perf_counter() - started_s, "thread_s": time.thread_time() - thread_s}
    runtime.shutdown()
    line = {"workers": workers, "tokens": tokens} | {
        name.removeprefix("controller/"): round(statistics.median(cost[name] for cost in costs[2:]), 4)
        for name in ("controller/cpu_s", "controller/sent_bytes", "controller/received_bytes", "thread_s", "step_s")
    }
    print_line(line)
    return line


def draw(lines: Sequence[dict[str, float]]) -> str:
    """CPU seconds of a step over the number of workers (logarithmic), in all threads and in the main one, as SVG."""
    width, height, left, bottom = 640, 320, 60, 270
    top_s = max(0.6, 1.1 * max(line["cpu_s"] for line in lines))

    def at(workers: float, seconds: float) -> str:
        return f"{left + 540 * math.log10(workers) / 3:.1f},{bottom - 230 * seconds / top_s:.1f}"

    marks = [
        f'<text x="{left + 540 * power / 3:.0f}" y="{bottom + 20}" text-anchor="middle">{10**power}</text>'
        for power in range(4)
    ]
    for tenths in range(0, int(10 * top_s) + 1, 2):
        y = bottom - 230 * tenths / 10 / top_s
        marks.append(f'<path d="M{left} {y:.1f}H{left + 540}" stroke="#e2e8f0"/>')
        marks.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tenths / 10:.1f}</text>')
    for name, colour, label_y in (("cpu_s", "#2563eb", 40), ("thread_s", "#d97706", 58)):
        ordered = sorted(lines, key=lambda line: line["workers"])
        points = [at(line["workers"], line[name]) for line in ordered]
        marks.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        dots = (point.split(",") for point in points)
        marks += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots]
        told = "all threads of the controller" if name == "cpu_s" else "its main thread"
        marks.append(f'<text x="{left + 12}" y="{label_y}" fill="{colour}">{told}</text>')
    marks.append(f'<text x="{left + 270}" y="{height - 8}" text-anchor="middle">workers</text>')
    marks.append(f'<text x="{left}" y="18">CPU seconds of a step: 8,192 sequences of 2,048 tokens</text>')
    body = "\n".join(marks)
    style = 'font-family="sans-serif" font-size="12" fill="#334155"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" {style}>'
        f'\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def place(role: str, count: int) -> RolePlacement:
    """As many slots as there are workers, on a node that is none."""
    return RolePlacement(role, role, tuple(Slot("stub", "cpu", (index,)) for index in range(count)))


def build_roles(runtime: Scheduler, tokens: int, *, separate: bool) -> tuple[Actor, RewardModel, PolicyGradient]:
    """The real facades."""
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 1024}))
    model = ModelSpec(ModelSettings(path=str(directory)), "fast", 0, 0)
    sampling = SamplingParams(samples_per_prompt=SAMPLES, max_new_tokens=tokens)
    spec = ActorSpec(model, TrainSettings(), RolloutSettings())
    actor = Actor(runtime, spec, sampling, separate_rollout=separate, snapshot_every_steps=1)
    reward = RewardModel(runtime, RewardSettings(function="exact_match"), columns=frozenset({"response"}))
    return actor, reward, PolicyGradient(PolicyGradientSettings(), sampling)


if __name__ == "__main__":
    main()
