"""Data parallel training in real processes over gloo: the same steps as in one process, and loud ends instead of waits."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Place, run_ranks
from safetensors import safe_open
from tiny_models import SMALL
from torch import Tensor

from hybridflow.algorithms import prepare_policy_batch
from hybridflow.algorithms.advantages import compute_group_advantages
from hybridflow.algorithms.losses import LossSum, MetricSum, PolicyLoss, SFTLoss
from hybridflow.batch import Batch
from hybridflow.models import fresh_model, save_model
from hybridflow.roles.parts import describe_rows
from hybridflow.roles.shares import plan_shares
from hybridflow.train_engine import (
    DriftError,
    ModelWork,
    NonFiniteError,
    OptimizerSettings,
    TrainEngine,
    TrainSettings,
    join_ranks,
)
from hybridflow.train_engine.optimizer import AdamW
from hybridflow.types import Metrics, PeerLostError, Reduce, merge_metrics

CONFIG = SMALL | {"model_type": "llama", "max_position_embeddings": 64, "tie_word_embeddings": False}
LENGTHS = [3, 17, 9, 2, 30, 12, 5, 8]
STEPS = 3
SPLITS: dict[str, list[list[list[int]]]] = {
    "one process": [[list(range(8))]] * STEPS,
    "two ranks, odd": [[[0, 1, 2, 3, 4, 5, 6], [7]], [[4], [0, 1, 2, 3, 5, 6, 7]], [[1, 3, 5], [0, 2, 4, 6, 7]]],
    "three ranks, one idle": [[[0, 2, 4], [1, 3, 5, 6, 7], []], [[], [0, 1, 2], [3, 4, 5, 6, 7]], [[6], [], [0, 1, 2, 3, 4, 5, 7]]],
}  # fmt: skip
"""Rows of each rank in each step."""
ONCE = {"train/lr", "train/grad_norm", "train/skipped_steps", "train/nonfinite_steps"}
"""What rank 0 alone reports."""


class ProbeLoss(PolicyLoss):
    """A policy loss that also reports on tokens of which some ranks have none."""

    def __call__(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor | None,
        mask_T: Tensor,
        weights_T: Tensor,
        columns: Mapping[str, Tensor],
    ) -> LossSum:
        found = super().__call__(logprobs_T, entropy_T, mask_T, weights_T, columns)
        rare_T = (columns["advantages"] > 0.75) & mask_T.bool()
        values_T = columns["advantages"].double()[rare_T]
        kept_T = values_T if values_T.numel() else values_T.new_full((1,), -99.0)
        rare = {
            "rare/mean": MetricSum(values_T.sum(), rare_T.sum(), Reduce.MEAN),
            "rare/sum": MetricSum(rare_T.sum(), rare_T.sum(), Reduce.SUM),
            "rare/max": MetricSum(kept_T.max(), rare_T.sum(), Reduce.MAX),
            "rare/min": MetricSum(kept_T.min(), rare_T.sum(), Reduce.MIN),
        }
        return LossSum(found.total, found.weight, found.metrics | rare)


LOSS = ProbeLoss(clip_low=0.1, clip_high=0.1, entropy_coefficient=0.01, temperature=0.7)


def build_rows(seed: int, lengths: Sequence[int] = LENGTHS) -> Batch:
    rng = np.random.default_rng(seed)
    masks = [(rng.random(length) < 0.6).astype(np.uint8) for length in lengths]
    for mask in masks:
        mask[-1], mask[0] = 1, 0
    floats = {
        name: [rng.normal(shift, 0.3, length).astype(np.float32) for length in lengths]
        for name, shift in (("rollout_logprobs", -3.7), ("advantages", 0.2))
    }
    tokens = [rng.integers(0, CONFIG["vocab_size"], length).astype(np.int32) for length in lengths]
    return Batch.from_columns(tokens=tokens, loss_mask=masks, state=np.zeros(len(lengths), np.int8), **floats)


def build_engine(
    place: Place, dtype: torch.dtype = torch.float32, *, device: str = "cpu", timeout_s: float = 30.0, **changes: Any
) -> TrainEngine:
    where = torch.device(f"cuda:{place.rank}" if device == "cuda" else device)
    ranks = join_ranks(rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=where, timeout_s=timeout_s)
    model = fresh_model(CONFIG, seed=0, device=where, dtype=dtype, numerics="fast")
    model.module.register_parameter("unused", torch.nn.Parameter(torch.ones(3, 3, dtype=dtype, device=where)))
    optimizer = OptimizerSettings(lr=1e-4, weight_decay=0.1, eps=1e-6, max_grad_norm=0.5)
    return TrainEngine(model, TrainSettings(micro_batch_tokens=40, optimizer=optimizer, **changes), ranks)


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {
        name: tensor.detach().cpu().double().numpy().copy() for name, tensor in tensors.items() if "rng" not in name
    }


def take_rows(batch: Batch, rows: list[int]) -> Batch | None:
    return batch.take(rows) if rows else None


def train(place: Place, dtype: torch.dtype, split: list[list[list[int]]], device: str = "cpu") -> dict[str, Any]:
    """Three steps; the gradient before the first, the state after each, and what each reported."""
    engine = build_engine(place, dtype, device=device)
    parts = [take_rows(build_rows(step), ranks[place.rank]) for step, ranks in enumerate(split)]
    engine.accumulate(parts[0], LOSS)
    gradient = as_arrays(engine.optimizer.gradients())
    metrics = [engine.update(part, LOSS) for part in parts]
    engine.ranks.leave()
    return {"gradient": gradient, "state": as_arrays(engine.state_tensors()), "metrics": metrics}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`run(dtype, split)`: the results by rank, computed once."""

    @functools.cache
    def trained(dtype: torch.dtype, split: str) -> list[dict[str, Any]]:
        size = len(SPLITS[split][0])
        return run_ranks(size, train, dtype, SPLITS[split], directory=tmp_path_factory.mktemp("ranks"))

    return trained


def equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return set(ours) == set(theirs) and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def relative_gap(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Largest difference of any entry, relative to the largest entry of its tensor."""
    assert set(ours) == set(theirs)
    largest = {name: max(float(np.abs(value).max()), 1e-300) for name, value in theirs.items()}
    return max(float(np.abs(ours[name] - theirs[name]).max()) / largest[name] for name in ours)


def weights(result: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: value for name, value in result["state"].items() if name.startswith("model/")}


@pytest.mark.parametrize(
    ("dtype", "split", "tolerance"),
    [
        (torch.float64, "two ranks, odd", 1e-10),
        (torch.float64, "three ranks, one idle", 1e-10),
        (torch.float32, "three ranks, one idle", 1e-6),
    ],
    ids=str,
)
def test_gradient_and_weights_are_those_of_one_process(
    run: Any, dtype: torch.dtype, split: str, tolerance: float
) -> None:
    (alone,) = run(dtype, "one process")
    for result in run(dtype, split):
        assert relative_gap(result["gradient"], alone["gradient"]) < tolerance
        assert relative_gap(weights(result), weights(alone)) < tolerance


@pytest.mark.parametrize(
    ("dtype", "split"),
    [
        (torch.float64, "three ranks, one idle"),
        (torch.float32, "three ranks, one idle"),
        (torch.bfloat16, "two ranks, odd"),
    ],
    ids=str,
)
def test_replicas_are_bit_equal(run: Any, dtype: torch.dtype, split: str) -> None:
    first, *others = run(dtype, split)
    assert others
    for result in others:
        assert equal(result["gradient"], first["gradient"])
        assert equal(result["state"], first["state"])
    assert set(first["state"]["optimizer/steps"]) == {0.0, STEPS}


def test_a_weight_that_no_rank_reached_takes_no_step(run: Any) -> None:
    for result in run(torch.float32, "three ranks, one idle"):
        assert "unused" not in result["gradient"]
        assert np.array_equal(result["state"]["model/unused"], np.ones((3, 3)))


def test_the_same_ranks_give_the_same_bits_again(run: Any, tmp_path: Path) -> None:
    again = run_ranks(3, train, torch.float32, SPLITS["three ranks, one idle"], directory=tmp_path)
    assert equal(again[0]["state"], run(torch.float32, "three ranks, one idle")[0]["state"])


@pytest.mark.parametrize("split", ["two ranks, odd", "three ranks, one idle"])
def test_merged_metrics_are_those_of_one_process(run: Any, split: str) -> None:
    (alone,) = run(torch.float64, "one process")
    ranks = [result["metrics"] for result in run(torch.float64, split)]
    for step, expected in enumerate(alone["metrics"]):
        merged = merge_metrics([metrics[step] for metrics in ranks])
        assert set(merged) == set(expected) >= ONCE | {"rare/mean", "rare/sum", "rare/max", "rare/min", "policy/loss"}
        for name in set(merged) - {"train/micro_batches"}:
            ours, theirs = merged[name], expected[name]
            assert (ours.reduce, ours.weight) == (theirs.reduce, theirs.weight), name
            exact = ours.reduce is Reduce.SUM or name == "train/lr"
            assert ours.value == (theirs.value if exact else pytest.approx(theirs.value, rel=1e-9)), name
        assert [ONCE & set(metrics[step]) for metrics in ranks] == [ONCE] + [set()] * (len(ranks) - 1)
        assert merged["train/micro_batches"].value == sum(
            metrics[step]["train/micro_batches"].value for metrics in ranks
        )
        assert merged["train/rows"].value == len(LENGTHS)
        assert 0 < merged["rare/sum"].value < sum(LENGTHS)


WORK = ModelWork(matrices=24 * 32 * 32, attention=2 * 32, windows=(None, None))


def train_shares(place: Place) -> tuple[Metrics, dict[str, np.ndarray]]:
    """One step of reinforcement learning in two updates, as the actor does it: rows by share, whole groups in each chunk."""
    engine = build_engine(place, torch.float64)
    chunks = build_chunks()
    shares = plan_shares([describe_rows(chunk) for chunk in chunks], size=place.size, updates=2, work=WORK)
    share = shares[place.rank]
    batch = Batch.concat([chunks[chunk] for chunk in share.chunks])
    prepared = prepare_policy_batch(batch, advantage_function=normalized, drop_constant_groups=True)
    metrics = [engine.update(part, PolicyLoss()) for part in prepared.batch.split(share.update_rows)]
    return merge_metrics([prepared.metrics, *metrics]), as_arrays(engine.state_tensors())


def normalized(rewards_S: np.ndarray, group_ids_S: np.ndarray, ok_S: np.ndarray) -> np.ndarray:
    return compute_group_advantages(rewards_S, group_ids_S, ok_S, normalize_std=True)


def build_chunks() -> list[Batch]:
    """Five chunks of one to three groups of four; the third lies across the border of two updates."""
    rng = np.random.default_rng(5)
    chunks, first = [], 0
    for step, num_groups in enumerate([2, 1, 3, 1, 2]):
        rows = build_rows(step, rng.integers(2, 30, 4 * num_groups).tolist()).drop(["advantages"])
        rows = rows.with_column("group_id", np.repeat(np.arange(first, first + num_groups), 4))
        rows = rows.with_column("reward", rng.integers(0, 2, rows.num_rows).astype(np.float64))
        chunks.append(rows.with_column("finish_reason", ["stop"] * rows.num_rows))
        first += num_groups
    return chunks


def test_shares_train_as_one_process_does(tmp_path: Path) -> None:
    ((expected, alone),) = run_ranks(1, train_shares, directory=tmp_path)
    results = run_ranks(3, train_shares, directory=tmp_path)
    merged = merge_metrics([metrics for metrics, _ in results])
    assert set(merged) == set(expected) >= {"rows/ok", "groups/constant", "reward/std", "policy/loss"}
    for name in set(merged) - {"train/micro_batches"}:
        assert merged[name].value == pytest.approx(expected[name].value, rel=1e-9), name
    for _, state in results:
        assert relative_gap(state, alone) < 1e-10


def train_poisoned(place: Place) -> tuple[list[Metrics], str, dict[str, np.ndarray], int]:
    """A good step, one without a token, and NaN on rank 1 until the engine gives up."""
    engine = build_engine(place, max_skipped_steps=1)
    good = build_rows(0).take([2 * place.rank, 2 * place.rank + 1])
    nothing = good.with_column("loss_mask", [[0] * length for length in good.lengths("tokens")])
    nan = good.with_column("advantages", [np.full(n, np.nan, np.float32) for n in good.lengths("tokens")])
    metrics = [engine.update(good, LOSS)]
    state = as_arrays(engine.state_tensors())
    metrics += [engine.update(nothing, LOSS), engine.update(nan if place.rank == 1 else good, LOSS)]
    try:
        engine.update(nan if place.rank == 1 else good, LOSS)
    except NonFiniteError as error:
        assert equal(as_arrays(engine.state_tensors()), state)
        return metrics, str(error), state, engine.steps_taken
    raise AssertionError("the engine went on")


def test_all_ranks_skip_the_same_steps_and_stop_together(tmp_path: Path) -> None:
    results = run_ranks(2, train_poisoned, directory=tmp_path)
    merged = [merge_metrics([metrics[step] for metrics, *_ in results]) for step in range(3)]
    assert [metrics["train/skipped_steps"].value for metrics in merged] == [0, 1, 1]
    assert [metrics["train/nonfinite_steps"].value for metrics in merged] == [0, 0, 1]
    assert [metrics["train/rows"].value for metrics in merged] == [4, 0, 4]
    assert results[0][1] == results[1][1] and "2 steps in a row" in results[0][1]
    assert equal(results[0][2], results[1][2])
    assert [steps for *_, steps in results] == [1, 1]


def train_unsynchronized(place: Place, fault: str) -> str:
    engine = build_engine(place)
    part = build_rows(0).take([place.rank, place.rank + 2])
    if fault == "gradients":
        AdamW.sum_gradients = lambda self, partial: None  # type: ignore[method-assign]
    if fault == "one weight" and place.rank == 1:
        weight = engine.model.module.lm_head.weight.data.view(-1)
        weight[7] = torch.nextafter(weight[7], torch.tensor(1.0))
    try:
        for _ in range(2):
            engine.update(part, LOSS)
    except DriftError as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize(
    ("fault", "what"), [("gradients", "the gradient norm"), ("one weight", "the checksum of the weights")]
)
def test_replicas_that_drift_are_named(fault: str, what: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, train_unsynchronized, fault, directory=tmp_path)
    assert first == second
    assert first.startswith(f"ranks 0 and 1 are no replicas of each other: {what} is ")


def train_until_lost(place: Place, fault: str, notes: Path) -> str:
    """How the second step ended on this rank. The last one dies in it, or raises and keeps its error until the others have noticed."""
    engine = build_engine(place, timeout_s=60.0)
    engine.update(build_rows(0), SFTLoss())
    at_fault = place.rank == place.size - 1
    if at_fault and fault == "killed":
        layer = engine.model.module.model.layers[1]
        layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        engine.update(build_rows(0, [5, 65] if at_fault and fault == "raised" else LENGTHS), SFTLoss())
    except (PeerLostError, ValueError) as error:
        (notes / str(place.rank)).touch()
        give_up_s = time.monotonic() + 15.0
        while len(list(notes.iterdir())) < place.size - (fault == "killed") and time.monotonic() < give_up_s:
            time.sleep(0.02)
        noticed = sorted(int(note.name) for note in notes.iterdir())
        return f"{type(error).__name__}: {error}; noticed by {noticed}"
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(("fault", "size"), [("killed", 2), ("raised", 4)])
def test_a_rank_that_dies_or_raises_ends_the_waits_of_the_others(fault: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    *others, last = run_ranks(size, train_until_lost, fault, tmp_path / "notes", directory=tmp_path)
    for rank, message in enumerate(others):
        assert message.startswith(f"PeerLostError: rank {rank} of {size} lost another rank")
        assert message.endswith("noticed by [0]" if fault == "killed" else "noticed by [0, 1, 2, 3]")
    assert last is None if fault == "killed" else last.startswith("RowTooLongError: row 1")


def join_alone(place: Place) -> tuple[str, float]:
    begin_s = time.monotonic()
    try:
        build_engine(place, timeout_s=1.0)
    except PeerLostError as error:
        return str(error), time.monotonic() - begin_s
    raise AssertionError("it took itself for two")


def test_a_rank_that_never_comes_is_waited_for_within_the_bound(tmp_path: Path) -> None:
    ((message, waited_s),) = run_ranks(2, join_alone, missing=1, directory=tmp_path)
    assert "rank 0 of 2 did not meet all others at file:///" in message
    assert "within 1 s" in message
    assert 0.9 < waited_s < 5.0


def use_after_error(place: Place) -> list[str]:
    """The engine's second call after its first has failed, on every rank."""
    engine, messages = build_engine(place), []
    for rows in (build_rows(0, [65] if place.rank else [5]), build_rows(0)):
        try:
            engine.update(rows, SFTLoss())
        except (PeerLostError, ValueError) as error:
            messages.append(type(error).__name__ + ": " + str(error))
    engine.ranks.leave()
    return messages


def test_an_engine_that_has_failed_takes_no_further_step(tmp_path: Path) -> None:
    results = run_ranks(2, use_after_error, directory=tmp_path)
    assert [messages[0].partition(":")[0] for messages in results] == ["PeerLostError", "RowTooLongError"]
    for rank, messages in enumerate(results):
        assert messages[1].startswith(f"PeerLostError: rank {rank} of 2 has left its gang")


def save_on_each(place: Place, directory: Path) -> list[str]:
    engine = build_engine(place)
    save_model(engine.model, None, directory / str(place.rank))
    engine.ranks.leave()
    with safe_open(directory / str(place.rank) / "model.safetensors", "pt") as file:
        return sorted(file.keys())


def test_any_rank_may_export_and_writes_all_weights(tmp_path: Path) -> None:
    # Transformers' save_pretrained leaves the weights out on every rank but 0, and says nothing.
    names = sorted(dict(fresh_model({**CONFIG}, seed=0).module.named_parameters())) + ["unused"]
    assert run_ranks(2, save_on_each, tmp_path, directory=tmp_path) == [sorted(names)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_process_does(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, train, torch.float32, SPLITS["one process"], "cuda", directory=tmp_path)
    first, second = run_ranks(2, train, torch.float32, SPLITS["two ranks, odd"], "cuda", directory=tmp_path)
    assert equal(first["state"], second["state"])
    assert relative_gap(first["gradient"], alone["gradient"]) < 1e-5
