"""Updates of the weights in a row under load: whether a token is stale, memory grows, or the probe finds the two sides apart.

    python benchmarks/updates.py shape=qwen3-0.6b,rows=256,prompt=128,response=64
    python benchmarks/updates.py gpus=2,shape=qwen2.5-1.5b,rows=128,prompt=128,response=64
    python benchmarks/updates.py gpus=2,shape=tiny,rows=16,prompt=16,response=16                   (CPU and gloo, to try it out)

Each time the actor's workers bring the weights to the rollout, probe them, generate `rows` rows a rank and train on these. One rank
generates on the trainer's own weights, or with `engine=vllm` on vLLM's; several share the model in shards and have a copy each, to
which the weights go by the planned collective. `load=1` (the default): all the while another process on each device multiplies matrices.

Prints one JSON line: `stale` rows of another version than the newest, `probes` made, `mean_gap` and `max_gap` the largest of them,
`switch_ms` the median and the longest, `bytes_moved` an update, over all ranks; `memory_mib` of the fullest rank after the tenth update
and after the last (on a GPU what torch has allocated, with the reserved beside it; on a CPU what is resident), `seconds` an update.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from cases import at_least, check_groups, one_of, parse_whole_line, print_line
from shapes import SHAPES, draw_prompts

from hybridflow.algorithms import SFTLoss, keep_all
from hybridflow.batch import Batch
from hybridflow.data import build_character_tokenizer
from hybridflow.roles import actor_worker
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.policy import ModelSettings, ModelSpec
from hybridflow.roles.shares import split_rows
from hybridflow.runtime.api import Seat
from hybridflow.train_engine import OptimizerSettings, ParallelConfig, TrainSettings, compute_model_work
from hybridflow.types import Metrics, SamplingParams
from hybridflow.weights.transports import read_memory

SETTLED = 10
"""Updates after which memory is to stay."""
SAMPLES = 4
"""Of a prompt."""


@dataclass(frozen=True)
class Case:
    """What is measured; see the module."""

    gpus: int = 1
    shape: str = one_of("qwen3-0.6b", *SHAPES)
    engine: str = one_of("native", "vllm")
    # The first probe comes with the second update.
    updates: int = at_least(2, 50)
    rows: int = 256
    prompt: int = 128
    response: int = 64
    budget: int = 32768
    load: int = one_of(1, 0)

    def __post_init__(self) -> None:
        check_groups(self.rows, SAMPLES)
        if self.engine == "vllm" and not find_spec("vllm"):
            raise ValueError("engine=vllm: vLLM is not installed; pip install vllm, or write engine=native")


def main() -> None:
    """Starts the ranks."""
    case = parse_whole_line(Case)
    with tempfile.TemporaryDirectory() as directory:
        build_character_tokenizer("0123456789").save_pretrained(f"{directory}/tokenizer")
        torch.multiprocessing.spawn(run_rank, (case, directory), nprocs=case.gpus)


def run_rank(rank: int, case: Case, directory: str) -> None:
    """All updates; the first rank prints what all have found."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    worker = build_worker(rank, case, directory, device)
    with loading(device) if case.load else nullcontext():
        found = follow(worker, case, device)
    told = {name: worker.ranks.gather(values) for name, values in found.items()}
    worker.close()
    if rank == 0:
        asked = {"shape": case.shape, "gpus": case.gpus, "engine": case.engine, "load": case.load}
        print_line(asked | summarize(told, case))


@contextmanager
def loading(device: torch.device) -> Iterator[None]:
    """Another process multiplies matrices on this device meanwhile."""
    context = torch.multiprocessing.get_context("spawn")
    other = context.Process(target=multiply, args=(device,), daemon=True)
    other.start()
    try:
        yield
        assert other.is_alive(), "the process that loads the device has ended early"
    finally:
        other.kill()
        other.join()


def multiply(device: torch.device) -> None:
    """Until it is killed."""
    torch.set_num_threads(1)
    matrix = torch.ones((4096 if device.type == "cuda" else 512,) * 2, device=device)
    while True:
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def build_worker(rank: int, case: Case, directory: str, device: torch.device) -> actor_worker.ActorWorker:
    """The actor's worker of this rank, as a run has it."""
    # Where generation runs on the trainer's own weights, each version is probed here.
    actor_worker.SHARED_SYNCS_PER_PROBE = 1
    model = ModelSettings(
        config=SHAPES[case.shape], tokenizer=f"{directory}/tokenizer", device=str(device),
        dtype="bfloat16" if device.type == "cuda" else "float32",
    )  # fmt: skip
    train = TrainSettings(
        parallel_config=ParallelConfig(shard=case.gpus),
        micro_batch_tokens=case.budget,
        compile=False,
        optimizer=OptimizerSettings(lr=1e-5),
    )
    spec = actor_worker.ActorSpec(
        ModelSpec(model, "fast", seed=0, threads=1), train, RolloutSettings(engine=case.engine)
    )
    return actor_worker.ActorWorker(
        Seat("actor", rank, case.gpus, rendezvous=f"file://{directory}/meet", timeout_s=120.0), spec
    )


def follow(worker: actor_worker.ActorWorker, case: Case, device: torch.device) -> dict[str, list[float]]:
    """What this rank saw of each update."""
    rng = np.random.default_rng(worker.ranks.rank)
    sampling = SamplingParams(max_new_tokens=case.response, samples_per_prompt=SAMPLES, ignore_eos=True)
    found: dict[str, list[float]] = {"stale": [], "memory": [], "reserved": [], "seconds": []}
    shares = actor_worker.shares_weights(worker.train_engine.mesh.layout, RolloutSettings(engine=case.engine))
    bring = worker.before_rollout if shares else worker.refresh
    for step in range(case.updates):
        started_s = time.perf_counter()
        bring()
        prompts = draw_prompts(case.shape, [case.prompt] * (case.rows // SAMPLES), rng)
        batch = Batch.from_columns(group_id=list(range(len(prompts))), prompt_tokens=prompts)
        samples = worker.rollout_engine.generate(batch, sampling, step=step)
        versions = np.stack([samples.numpy("policy_version_min"), samples.numpy("policy_version_max")])
        found["stale"].append(float((versions != step).any(axis=0).sum()))
        note(found, train(worker, samples))
        found["seconds"].append(time.perf_counter() - started_s)
        gc.collect()
        found["memory"].append(read_memory(device) / 2**20)
        found["reserved"].append(torch.cuda.memory_reserved(device) / 2**20 if device.type == "cuda" else 0.0)
    return found


def train(worker: actor_worker.ActorWorker, samples: Batch) -> Metrics:
    """One update on this rank's rows."""
    work = compute_model_work(worker.policy.model.config)
    own, update_rows = split_rows(samples, size=1, updates=1, work=work)[0]
    return worker.update(own, update_rows, keep_all, SFTLoss())


def note(found: dict[str, list[float]], metrics: Metrics) -> None:
    """Keeps what an update tells of the switch before it and of its probe."""
    for name in ("probe/mean_gap", "probe/max_gap", "hybrid/switch_ms", "hybrid/bytes_moved"):
        if name in metrics:
            found.setdefault(name, []).append(metrics[name].value)


def summarize(told: dict[str, list[list[float]]], case: Case) -> dict[str, Any]:
    """All ranks' findings, [ranks, updates] each, as one line."""
    widest = {name: [max(values) for values in zip(*ranks, strict=True)] for name, ranks in told.items()}
    settled, switches = min(SETTLED, case.updates) - 1, widest["hybrid/switch_ms"]
    return {
        "updates": case.updates, "rows": case.rows * case.gpus, "stale": int(sum(map(sum, told["stale"]))),
        "probes": len(widest["probe/max_gap"]), "mean_gap": max(widest["probe/mean_gap"]), "max_gap": max(widest["probe/max_gap"]),
        "switch_ms": [round(statistics.median(switches), 3), round(max(switches), 3)],
        "bytes_moved": int(sum(statistics.median(rank) for rank in told["hybrid/bytes_moved"])),
        "memory_mib": [round(widest["memory"][at], 1) for at in (settled, -1)],
        "reserved_mib": [round(widest["reserved"][at], 1) for at in (settled, -1)],
        "seconds": round(statistics.median(widest["seconds"]), 3), "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
