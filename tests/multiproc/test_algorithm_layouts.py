"""Each algorithm's step is the same on any layout of trainers: what it divides by is counted over the rows of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import Place, run_ranks

import hybridflow.roles.actor_worker as worker_module
from hybridflow.algorithms import PolicyGradient, Prepared, normalize_advantages
from hybridflow.batch import Batch
from hybridflow.config import load_config
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.rl_job import RLConfig
from hybridflow.roles.actor_worker import ActorSpec, ActorWorker
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.parts import describe_rows
from hybridflow.roles.policy import ModelSettings, ModelSpec
from hybridflow.roles.shares import plan_shares
from hybridflow.runtime.api import Seat
from hybridflow.train_engine import OptimizerSettings, ParallelConfig, TrainSettings, compute_model_work
from hybridflow.types import Metrics, SamplingParams, merge_metrics

MODEL = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
PAPERS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
SAMPLING = SamplingParams(max_new_tokens=20)


def build_algorithm(name: str) -> PolicyGradient:
    lines = ["model.path=m", "data.files=[d]", f"algorithm={name}", "algorithm.entropy_coefficient=0.01"]
    return PolicyGradient(load_config(RLConfig, config_name="rl", overrides=lines).algorithm, SAMPLING)


def build_spec(tokenizer: str, parallel: ParallelConfig) -> ActorSpec:
    model = ModelSettings(config=MODEL, tokenizer=tokenizer, device="cpu", dtype="float64")
    optimizer = OptimizerSettings(lr=1e-2, max_grad_norm=1e9)
    train = TrainSettings(parallel_config=parallel, micro_batch_tokens=40, optimizer=optimizer)
    return ActorSpec(ModelSpec(model, "fast", seed=3, threads=1), train, RolloutSettings(), 2)


def build_groups() -> list[Batch]:
    """A chunk a group, of uneven sizes and lengths; rewards of another mean and spread in each; a failed row and an empty one."""
    draws = np.random.default_rng(11)
    chunks = []
    for group, (num_rows, mean) in enumerate([(4, 0.0), (2, 5.0), (3, -1.0), (4, 2.0), (2, 0.5), (3, 0.5)]):
        lengths = draws.integers(5, 24, num_rows)
        masks = [(np.arange(length) >= 3).astype(np.uint8) for length in lengths]
        rewards = np.round(mean + (group + 1) * draws.normal(size=num_rows), 2)
        if group == 1:
            rewards[0] = np.nan
        if group == 2:
            masks[1][:] = 0
        chunks.append(
            Batch.from_columns(
                tokens=[draws.integers(3, 12, length).astype(np.int32) for length in lengths],
                loss_mask=masks,
                rollout_logprobs=[draws.uniform(-3, -1, length).astype(np.float32) for length in lengths],
                ref_logprobs=[draws.uniform(-3, -1, length).astype(np.float32) for length in lengths],
                group_id=np.full(num_rows, group),
                state=np.zeros(num_rows, np.int8),
                reward=rewards,
                finish_reason=["stop"] * num_rows,
            )
        )
    return chunks


def train(
    place: Place, spec: ActorSpec, name: str, plant: Callable[..., Prepared] | None
) -> tuple[Metrics, dict[str, np.ndarray]]:
    """Two updates of one step, shared out as the facade does it; the weights after them."""
    if plant is not None:
        worker_module.normalize_advantages = plant
    seat = Seat("actor", place.rank, place.size, rendezvous=place.rendezvous, timeout_s=30.0)
    worker, algorithm, chunks = ActorWorker(seat, spec), build_algorithm(name), build_groups()
    layout, at = worker.train_engine.mesh.layout, worker.train_engine.mesh.at
    work = compute_model_work(worker.policy.model.config)
    shares = plan_shares([describe_rows(chunk) for chunk in chunks], size=layout.data, updates=2, work=work)
    share = shares[at.data]
    rows = Batch.concat([chunks[chunk] for chunk in share.chunks]) if share.chunks else None
    metrics = worker.update(rows, share.update_rows, algorithm.prepare, algorithm.loss)
    weights = {name: weight.numpy().copy() for name, weight in worker.train_engine.iter_weights()}
    worker.close()
    return metrics, weights


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("task")
    write_sums(directory, seed=0)
    return str(directory / "tokenizer")


@pytest.fixture(scope="module")
def run(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    known: dict[Any, list[Any]] = {}

    def run(size: int, parallel: ParallelConfig, name: str, plant: Callable[..., Prepared] | None = None) -> list[Any]:
        key = size, str(parallel), name, plant
        if key not in known:
            spec = build_spec(tokenizer, parallel)
            known[key] = run_ranks(
                size, train, spec, name, plant, directory=tmp_path_factory.mktemp("ranks"), timeout_s=60.0
            )
        return known[key]

    return run


CASES = [
    *((name, 2, ParallelConfig()) for name in PAPERS),
    # A denominator of its own, and statistics of all rows.
    *((name, 2, ParallelConfig(sp=2)) for name in ("rloo", "reinforce_plus_plus")),
    *((name, 4, ParallelConfig(tp=2)) for name in ("rloo", "reinforce_plus_plus")),
]


@pytest.mark.parametrize(("name", "size", "parallel"), CASES, ids=str)
def test_no_layout_changes_an_algorithms_step(
    run: Callable[..., list[Any]], name: str, size: int, parallel: ParallelConfig
) -> None:
    ((expected, alone),) = run(1, ParallelConfig(), name)
    results = run(size, parallel, name)
    for _, weights in results:
        for key, weight in alone.items():
            np.testing.assert_allclose(weights[key], weight, rtol=1e-9, atol=1e-10, err_msg=key)
    merged = merge_metrics(metrics for metrics, _ in results)
    for key in ("policy/loss", "reward/mean", "rows/ok", "train/grad_norm", "advantages/mean", "advantages/std"):
        if key in expected:
            assert merged[key].value == pytest.approx(expected[key].value, rel=1e-9, abs=1e-12), key
    assert ("advantages/std" in merged) is name.startswith("reinforce")


def normalize_by_own_rows(prepared: Prepared, parts: Any) -> Prepared:
    """The fault: a rank's own mean and spread in place of all ranks'."""
    return normalize_advantages(prepared, [prepared.moments] if prepared.moments else [])


def test_statistics_of_a_ranks_own_rows_would_be_seen(run: Callable[..., list[Any]]) -> None:
    ((_, alone),) = run(1, ParallelConfig(), "reinforce_plus_plus")
    (_, wrong), _ = run(2, ParallelConfig(), "reinforce_plus_plus", normalize_by_own_rows)
    assert max(float(np.abs(wrong[key] - weight).max()) for key, weight in alone.items()) > 1e-4


def test_the_plan_has_ranks_without_rows_too(run: Callable[..., list[Any]], tokenizer: str, tmp_path: Path) -> None:
    """Seven ranks for six groups: one has nothing to say about the mean, and waits for nobody."""
    ((_, alone),) = run(1, ParallelConfig(), "reinforce_plus_plus")
    spec = build_spec(tokenizer, ParallelConfig())
    results = run_ranks(7, train, spec, "reinforce_plus_plus", None, directory=tmp_path, timeout_s=100.0)
    for _, weights in results:
        assert all(np.allclose(weights[key], weight, rtol=1e-9, atol=1e-10) for key, weight in alone.items())
