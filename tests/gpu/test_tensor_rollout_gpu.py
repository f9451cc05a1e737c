"""Two GPUs that share a model generate what one does, by captured graphs whose collectives run on NCCL; and are filled from trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import find_device, join
from processes import Place, run_ranks
from test_actor_layouts import train
from test_graphs_gpu import CONFIG, FAMILIES, build_model, make_prompts
from test_graphs_gpu import tokenizer as tokenizer_fixture

from hybridflow.flow.quickstart import write_sums
from hybridflow.models import fresh_model
from hybridflow.roles.actor_worker import ActorSpec, ActorWorker
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.policy import ModelSettings, ModelSpec
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.rollout.native import parallel
from hybridflow.runtime.api import Seat
from hybridflow.train_engine import OptimizerSettings, ParallelConfig, TrainSettings
from hybridflow.types import SamplingParams, merge_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

tokenizer = tokenizer_fixture
LENGTHS = [5, 70, 33, 58, 1, 32, 64, 200]
WAYS = {
    "whole distribution": SamplingParams(max_new_tokens=90, samples_per_prompt=4, temperature=0.9, seed=5),
    "greedy": SamplingParams(max_new_tokens=60, temperature=0.0),
    "top-k, top-p": SamplingParams(max_new_tokens=60, temperature=1.3, samples_per_prompt=4, top_k=20, top_p=0.9),
}
PLANS: dict[str, tuple[str, str, dict[str, int], int]] = {
    **{family: (family, "whole distribution", {}, 2048) for family in FAMILIES},
    "greedy": ("qwen3", "greedy", {}, 2048),
    "top-k, top-p": ("qwen3", "top-k, top-p", {}, 2048),
    "one kv head, untied": ("untied", "whole distribution", {}, 2048),
    "little room": ("qwen3", "whole distribution", {"kv_cache_tokens": 26 * 32, "max_sequences": 20}, 2048),
    "long passes": ("qwen3", "whole distribution", {}, 64),
    "long passes, own forward": ("gemma2", "whole distribution", {}, 64),
}

Rows = list[tuple[np.ndarray, ...]]
"""Of each row tokens, log-probabilities, and where sampling cuts among how many tokens each was drawn."""


def build_whole(family: str) -> Any:
    if family != "untied":
        return build_model(family)
    changes = {"model_type": "qwen3", "num_key_value_heads": 1, "tie_word_embeddings": False}
    return fresh_model({**CONFIG, **changes}, seed=1, device="cuda")


def generate_worker(place: Place, tokenizer: Any, names: list[str]) -> list[tuple[bool, int, list[Rows]]]:
    """Of each plan whether graphs were captured, how many rows were preempted, and the rows of three calls: new, again, and after
    one rank has slept."""
    ranks, found = join(place, "cuda"), []
    for name in names:
        family, way, limits, parallel.LONG_PASS = PLANS[name]
        whole = build_whole(family)
        model, group = parallel.build_shard(
            whole, ranks, device=find_device(place, "cuda"), dtype=whole.dtype, timeout_s=60.0
        )
        engine = NativeEngine(model, tokenizer, NativeSettings(**limits), group)  # type: ignore[arg-type]
        engine.load_weights(0, whole.module.named_parameters())
        calls = []
        for call in range(3):
            calls.append(read_rows(engine.generate(make_prompts(LENGTHS), WAYS[way], step=3)))
            if call == place.rank == 1:
                engine.sleep()
                engine.wake()
        has_graphs = engine._graphs is not None and bool(engine._graphs._graphs)
        found.append((has_graphs, engine.report.preemptions, calls))
        engine.close()
    ranks.leave()
    return found


def read_rows(samples: Any) -> Rows:
    names = [name for name in ("tokens", "rollout_logprobs", "kept_counts") if name in samples]
    return [tuple(map(np.array, row)) for row in zip(*map(samples.arrays, names), strict=True)]


def compare(ours: Rows, theirs: Rows, tolerance: float = 1e-3, share: float = 0.9) -> None:
    """Rounding may move a draw; until one has moved, tokens are equal and log-probabilities close. It may also move a cut's border."""
    equal = 0
    for (tokens, logprobs, *counts), (others, other_logprobs, *other_counts) in zip(ours, theirs, strict=True):
        length = min(len(tokens), len(others))
        differing = np.flatnonzero(tokens[:length] != others[:length])
        until = int(differing[0]) if differing.size else length
        assert np.abs(logprobs[:until] - other_logprobs[:until]).max(initial=0.0) < tolerance
        for own, other in zip(counts, other_counts, strict=True):
            assert not until or np.mean(own[:until] == other[:until]) > share
        equal += len(tokens) == len(others) and not differing.size
    assert equal >= share * len(ours), f"{equal} of {len(ours)} rows are equal"


def test_two_gpus_generate_what_one_does(tokenizer: Any, tmp_path: Path) -> None:
    names = list(PLANS)
    both = run_ranks(2, generate_worker, tokenizer, names, directory=tmp_path, timeout_s=240.0)
    for name, first, second in zip(names, *both, strict=True):
        family, way, _, _ = PLANS[name]
        slow = NativeEngine(build_whole(family), tokenizer, NativeSettings(cuda_graphs=False))
        expected = read_rows(slow.generate(make_prompts(LENGTHS), WAYS[way], step=3))
        assert first[0] and second[0], name
        assert (len(expected[0]) == 3) == WAYS[way].cuts
        assert first[1] > 0 or name != "little room"
        for ours, theirs in zip(first[2], second[2], strict=True):
            compare(ours, expected)
            for row, other in zip(ours, theirs, strict=True):
                assert all(map(np.array_equal, row, other)), name


def follow_worker(place: Place, spec: ActorSpec) -> tuple[list[float], int]:
    """The gap of the probe after each of three syncs, of which the later ones find graphs captured; and the last version."""
    device = f"cuda:{place.rank}"
    seat = Seat("actor", place.rank, place.size, device=device, rendezvous=place.rendezvous, timeout_s=60.0)
    worker = ActorWorker(seat, spec)
    gaps = []
    for _ in range(3):
        worker.refresh()
        gaps.append(merge_metrics(worker._rollout_metrics[-2:])["probe/mean_gap"].value)
        train(worker, 2)
    worker.close()
    return gaps, worker.version


@pytest.mark.parametrize("parallel_config", [ParallelConfig(shard=2), ParallelConfig(tp=2)], ids=str)
def test_trainers_fill_the_parts_and_graphs_stay_valid(parallel_config: ParallelConfig, tmp_path: Path) -> None:
    write_sums(tmp_path, seed=0)
    config = {name: value for name, value in CONFIG.items() if name != "vocab_size"} | {"model_type": "qwen3"}
    model = ModelSettings(config=config, tokenizer=str(tmp_path / "tokenizer"))
    settings = TrainSettings(
        parallel_config=parallel_config, micro_batch_tokens=512, optimizer=OptimizerSettings(lr=1e-3)
    )
    rollout = RolloutSettings(native=NativeSettings(tp=2))
    spec = ActorSpec(ModelSpec(model, "fast", seed=3, threads=1), settings, rollout)
    for gaps, version in run_ranks(2, follow_worker, spec, directory=tmp_path, timeout_s=200.0):
        assert version == 6 and len(gaps) == 3 and max(gaps) < 0.02
