"""Resident memory over 3,000 steps of reinforcement learning: whether anything grows with the number of steps.

    python benchmarks/memory_flat.py --steps 3000

The page itself (`flow/rl.py`) in one process, with all that a run has: a reward in a process of its own, a reference, evaluations,
checkpoints, rollout files, samples for the report, TensorBoard. The model is as small as it can be (two layers of 32), so that what a step
leaves behind is not hidden by what it computes with. Each 100 steps the resident bytes of this process and of its children are written
down, without asking the collector or malloc for anything first.

Prints a line of JSON for each reading and one at the end: the bytes at step `--settled` and at the last step, the most in between, and
the slope of a straight line through all readings from `--settled` on. Exit code 1 where that line rises by more than `--limit-mib` in all.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from cases import build_parser, print_line

from hybridflow.config import load_config
from hybridflow.flow import rl
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.rl_job import RLConfig, RLJob, read_rl_inputs
from hybridflow.runtime.start import open_runtime
from hybridflow.types import BatchRef, MetricsRef

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MODEL = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 1, max_position_embeddings: 64}"
)


class WatchedJob(RLJob):
    """A run that writes down its memory every so many steps."""

    every: int
    traced: bool
    readings: list[dict[str, float]]

    def after_step(self, step: int, metrics: MetricsRef, batch: BatchRef, scores: dict[str, BatchRef]) -> None:
        """As every run does, and then reads."""
        super().after_step(step, metrics, batch, scores)
        if step % self.every == 0:
            self.readings.append(read_memory(step))
            print_line(self.readings[-1])
            if self.traced:
                tell_growth()


def read_memory(step: int) -> dict[str, float]:
    """Resident bytes of this process and of all below it."""
    return {
        "step": step,
        "own_bytes": resident_bytes(os.getpid()),
        "children_bytes": sum(map(resident_bytes, list_descendants(os.getpid()))),
    }


def resident_bytes(pid: int) -> int:
    """Zero for a process that has gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0


def list_descendants(pid: int) -> list[int]:
    """Processes below one, of any depth."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += children
    return found + [below for child in found for below in list_descendants(child)]


def tell_growth() -> None:
    """The lines of code whose objects have grown most since the reading before."""
    global _snapshot
    new = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)])
    for change in new.compare_to(_snapshot, "lineno")[:6] if _snapshot else []:
        print("   ", change, flush=True)
    _snapshot = new


_snapshot: tracemalloc.Snapshot | None = None


def write_config(root: Path, steps: int) -> RLConfig:
    """A run of the smallest size with everything switched on."""
    files = write_sums(root / "data", seed=0)
    return load_config(
        RLConfig,
        config_name="quickstart_rl",
        overrides=[
            "model.path=null",
            f"model.config={MODEL}",
            f"model.tokenizer={root / 'data' / 'tokenizer'}",
            # So few that all their tokens are kept (data/stream.py) long before memory is to be flat.
            f"data.files=[{files['valid']}]",
            f"evaluation={{data: {{files: [{files['test']}]}}, every_steps: 50, max_prompts: 4, stop_at: null}}",
            f"run={{directory: {root / 'runs'}, name: flat, progress: false, save_rollouts_every: 10}}",
            "checkpoint.every_steps=100",
            f"steps={steps}",
            "reward.function=null",
            "prompts_per_step=4",
            "updates_per_step=2",
            "sampling={samples_per_prompt: 4, temperature: 1.0, max_new_tokens: 4}",
            "algorithm.kl_coefficient=0.01",
            "algorithm.report_kl=true",
            "algorithm.drop_constant_groups=false",
        ],
    )


def count_digits(response: str, answer: str) -> float:
    """A reward that a new model gets some of."""
    return sum(got == wanted for got, wanted in zip(response, answer, strict=False)) / len(answer)


def run(steps: int, every: int, traced: bool) -> list[dict[str, float]]:
    """All readings of one run."""
    with tempfile.TemporaryDirectory() as directory:
        config = write_config(Path(directory), steps)
        inputs = read_rl_inputs(config, reward_function=count_digits)
        with open_runtime(config.runtime) as runtime:
            job = WatchedJob(config, inputs, runtime)
            job.every, job.traced, job.readings = every, traced, []
            rl.train(job)
            job.end(None)
            job.close()
        return job.readings


def describe(readings: list[dict[str, float]], settled: int) -> dict[str, Any]:
    """Bytes at both ends and the most between, and how a straight line through the readings rises, of own and children's bytes."""
    kept = [reading for reading in readings if reading["step"] >= settled]
    steps = np.array([reading["step"] for reading in kept])
    found: dict[str, Any] = {"steps": int(steps[-1]), "settled": int(steps[0])}
    for part in ("own", "children"):
        mib = np.array([reading[f"{part}_bytes"] for reading in kept]) / 2**20
        slope = float(np.polyfit(steps, mib, 1)[0])
        found[part] = {
            "first_mib": round(float(mib[0]), 1),
            "last_mib": round(float(mib[-1]), 1),
            "most_mib": round(float(mib.max()), 1),
            "slope_kib_a_step": round(slope * 1024, 3),
            "rise_mib": round(slope * float(steps[-1] - steps[0]), 2),
        }
    return found


def main() -> None:
    """Reads the arguments, runs, judges."""
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=100, help="steps between two readings")
    parser.add_argument("--settled", type=int, default=200, help="the step from which memory is to be flat")
    parser.add_argument("--limit-mib", type=float, default=2.0, help="the most that the line may rise in all")
    parser.add_argument(
        "--trace", action="store_true", help="tells which lines of code hold more than at the reading before"
    )
    args = parser.parse_args()
    if args.trace:
        tracemalloc.start()
    started_s = time.perf_counter()
    readings = run(args.steps, args.every, args.trace)
    found = describe(readings, args.settled) | {"seconds": round(time.perf_counter() - started_s, 1)}
    print_line(found)
    sys.exit(int(any(found[part]["rise_mib"] > args.limit_mib for part in ("own", "children"))))


if __name__ == "__main__":
    main()
