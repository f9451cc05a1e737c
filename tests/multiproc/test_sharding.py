"""FSDP2 in real processes over gloo: the gradients of one process from shards, whatever the storage; and loud ends instead of waits."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Place, run_ranks
from torch import Tensor

from hybridflow.algorithms.losses import LossSum, SFTLoss
from hybridflow.batch import Batch
from hybridflow.models import LoraSettings, fresh_model
from hybridflow.train_engine import OptimizerSettings, ParallelConfig, TrainEngine, TrainSettings, join_ranks
from hybridflow.train_engine.sharding import iter_sharded
from hybridflow.types import PeerLostError

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
"""Tied, and with a vocabulary that no degree divides."""
LENGTHS = (3, 17, 9, 2, 30, 12, 5, 8)
SHARES: dict[int, list[list[int]]] = {
    1: [list(range(8))],
    2: [list(range(8)), []],
    4: [[0, 2, 4, 6], [1], [3, 5, 7], []],
}
"""Rows of each rank; the last of several has none."""
STORAGES: dict[str, dict[str, Any]] = {
    "kept on the device": {},
    "gathered once a step": {"reshard_after_forward": False},
    "optimizer on the host": {"offload": "optimizer"},
    "weights on the host": {"offload": "parameters"},
    "layers computed again": {"gradient_checkpointing": "full"},
}
CASES: dict[str, tuple[int, int]] = {"shard 2": (2, 0), "shard 4": (4, 0), "replicate 2, shard 2": (4, 2)}
"""Ranks, and parallel_config.shard."""


class StrictLoss(SFTLoss):
    """Divides by what counts, as a user's loss may: of nothing it would make 0 / 0."""

    def __call__(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor | None,
        mask_T: Tensor,
        weights_T: Tensor,
        columns: Mapping[str, Tensor],
    ) -> LossSum:
        found = super().__call__(logprobs_T, entropy_T, mask_T, weights_T, columns)
        count = mask_T.sum()
        return LossSum(found.total / count * count, found.weight, found.metrics)


def build_rows(seed: int, lengths: Sequence[int] = LENGTHS) -> Batch:
    rng = np.random.default_rng(seed)
    masks = [(rng.random(length) < 0.6).astype(np.uint8) for length in lengths]
    for mask in masks:
        mask[-1], mask[0] = 1, 0
    tokens = [rng.integers(0, CONFIG["vocab_size"], length).astype(np.int32) for length in lengths]
    return Batch.from_columns(tokens=tokens, loss_mask=masks, state=np.zeros(len(lengths), np.int8))


def build_engine(
    place: Place, dtype: torch.dtype, ranks: Any = None, *, shard: int = 1, tp: int = 1, **changes: Any
) -> TrainEngine:
    ranks = ranks or join_ranks(
        rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=torch.device("cpu"), timeout_s=60.0
    )
    model = fresh_model(CONFIG, seed=0, dtype=dtype)
    optimizer = OptimizerSettings(lr=1e-2, weight_decay=0.1, eps=1e-6, max_grad_norm=0.5)
    config = ParallelConfig(shard=shard, tp=tp)
    settings = TrainSettings(micro_batch_tokens=32, optimizer=optimizer, parallel_config=config, **changes)
    return TrainEngine(model, settings, ranks)


def take_rows(seed: int, rows: list[int]) -> Batch | None:
    return build_rows(seed).take(rows) if rows else None


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {
        name: tensor.detach().double().numpy().copy() for name, tensor in tensors.items() if not name.startswith("rng")
    }


def train(place: Place, dtype: torch.dtype, shard: int, storages: list[str]) -> dict[str, dict[str, Any]]:
    """For each way to store: the gradient, log-probabilities around two steps, and the state after them."""
    found, ranks = {}, None
    for storage in storages:
        engine = build_engine(place, dtype, ranks, shard=shard, **STORAGES[storage])
        ranks, rows = engine.ranks, SHARES[place.size][place.rank]
        engine.accumulate(take_rows(0, rows), StrictLoss())
        gradient = as_arrays(engine.optimizer.gradients())
        log_probs, losses = [engine.log_prob(take_rows(0, rows), 1.0)], []
        for step in range(2):
            losses.append(engine.update(take_rows(step, rows), StrictLoss()))
            log_probs.append(engine.log_prob(take_rows(0, rows), 1.0))
        found[storage] = {
            "gradient": gradient,
            "log_prob": [dict(zip(rows, values, strict=True)) for values in log_probs],
            "grad_norm": [metrics["train/grad_norm"].value for metrics in losses] if place.rank == 0 else None,
            "state": as_arrays(engine.state_tensors()),
            "layout": engine.state_layout(),
            "owned": engine.owned_state(),
            "whole": as_arrays(dict(engine.iter_weights())),
            "dtypes": {str(tensor.dtype) for tensor in engine.optimizer.gradients().values()},
        }
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """`run(dtype, ranks, shard)`: by rank, for each way to store what `train` found; computed once."""

    @functools.cache
    def trained(dtype: torch.dtype, size: int, shard: int) -> list[dict[str, Any]]:
        storages = list(STORAGES) if (size, shard) in ((2, 0), (4, 2)) else list(STORAGES)[:1]
        directory = tmp_path_factory.mktemp("ranks")
        found = run_ranks(size, train, dtype, shard, storages, directory=directory, timeout_s=100.0)
        assert all(result is not None for result in found), "a rank died; its error is above"
        return found

    return trained


def join_boxes(results: list[dict[str, Any]], part: str, kind: str) -> dict[str, np.ndarray]:
    """Whole tensors from the boxes of all ranks; NaN where nobody has anything."""
    whole: dict[str, np.ndarray] = {}
    for result in results:
        for name, values in result[part].items():
            key = f"{kind}/{name}" if part == "gradient" else name
            if not key.startswith(f"{kind}/"):
                continue
            box = result["layout"][key]
            target = whole.setdefault(key.removeprefix(f"{kind}/"), np.full(box.global_shape, np.nan))
            target[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))] = values
    return whole


def largest_gap(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Largest difference of any entry, relative to the largest entry of its tensor."""
    assert set(ours) == set(theirs)
    gaps = [np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max() for name in theirs]
    assert not np.isnan(gaps).any()
    return float(max(gaps))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_shards_train_as_one_process_does(
    case: str, dtype: torch.dtype, tolerance: float, run: Callable[..., list[dict[str, Any]]]
) -> None:
    ((alone,), results) = run(dtype, 1, 1), run(dtype, *CASES[case])
    expected = alone["kept on the device"]
    for storage in results[0]:
        found = [result[storage] for result in results]
        assert largest_gap(join_boxes(found, "gradient", "model"), expected["gradient"]) < tolerance, storage
        assert found[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance), storage
        for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            theirs = join_boxes([expected], "state", kind)
            # Adam divides by the root of a square: what is nearly 0 loses digits there.
            assert largest_gap(join_boxes(found, "state", kind), theirs) < 100 * tolerance, (storage, kind)
        assert set(found[0]["state"]["optimizer/steps"]) == {2.0}
        for values in found:
            assert largest_gap(values["whole"], join_boxes([expected], "state", "model")) < 100 * tolerance


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_those_of_the_weights_as_they_are(
    case: str, run: Callable[..., list[dict[str, Any]]]
) -> None:
    """A gathered weight that a pass without backward leaves behind is of the step before."""
    ((alone,), results) = run(torch.float64, 1, 1), run(torch.float64, *CASES[case])
    expected = alone["kept on the device"]["log_prob"]
    assert np.abs(expected[2][4] - expected[1][4]).max() > 1e-4
    for result in results:
        for storage, found in result.items():
            for ours, theirs in zip(found["log_prob"], expected, strict=True):
                for row, values in ours.items():
                    np.testing.assert_allclose(values, theirs[row], atol=1e-6, err_msg=storage)


@pytest.mark.parametrize("case", CASES)
def test_where_state_lies_changes_no_bit(case: str, run: Callable[..., list[dict[str, Any]]]) -> None:
    for result in run(torch.float32, *CASES[case]):
        expected = result["kept on the device"]
        for storage, found in result.items():
            for part in ("gradient", "state", "whole"):
                assert set(found[part]) == set(expected[part])
                for name, values in found[part].items():
                    assert np.array_equal(values, expected[part][name]), (storage, part, name)


def test_copies_are_bit_equal_and_each_box_has_one_writer(run: Callable[..., list[dict[str, Any]]]) -> None:
    results = [result["kept on the device"] for result in run(torch.float32, 4, 2)]
    for first, copy in ((0, 2), (1, 3)):
        assert results[first]["layout"] == results[copy]["layout"]
        for part in ("gradient", "state"):
            for name, values in results[first][part].items():
                assert np.array_equal(values, results[copy][part][name]), name
    assert results[2]["owned"] == results[3]["owned"] == frozenset()
    for result in results[:2]:
        filled = {name for name, values in result["state"].items() if values.size}
        assert filled - result["owned"] <= {"optimizer/steps"}
    assert {"optimizer/steps", "rng/cpu"} <= results[0]["owned"]
    assert not {"optimizer/steps", "rng/cpu"} & results[1]["owned"]
    assert "model/lm_head.weight" not in results[0]["layout"]


BFLOAT16: dict[str, tuple[int, list[list[int]], dict[str, Any]]] = {
    "shard 2": (2, SHARES[2], {"shard": 0}),
    "tensor 2": (2, [SHARES[1][0]] * 2, {"tp": 2}),
    "tensor 2, shard 2": (4, [SHARES[2][0]] * 2 + [SHARES[2][1]] * 2, {"tp": 2, "shard": 2}),
    "tensor 2, optimizer on the host": (2, [SHARES[1][0]] * 2, {"tp": 2, "offload": "optimizer"}),
    "adapter, shard 2": (2, SHARES[2], {"shard": 0, "lora": LoraSettings(rank=4, alpha=8.0)}),
}
"""Ranks, rows of each, and what is changed."""


def train_bfloat16(place: Place, case: str) -> dict[str, Any]:
    size, shares, changes = BFLOAT16[case]
    rows = shares[place.rank] if place.size > 1 else SHARES[1][0]
    changes = changes if place.size > 1 else {name: value for name, value in changes.items() if name == "lora"}
    engine = build_engine(place, torch.bfloat16, **changes)
    engine.accumulate(take_rows(0, rows), SFTLoss())
    gradient = engine.optimizer.gradients()
    kinds = {tensor.dtype for tensor in gradient.values()} | {
        tensor.dtype for name, tensor in engine.state_tensors().items() if "rng" not in name
    }
    found = {"gradient": as_arrays(gradient), "layout": engine.state_layout(), "kinds": kinds}
    for step in range(3):
        engine.update(take_rows(step, rows), SFTLoss())
    whole = dict(engine.iter_weights())
    found |= {"whole": as_arrays(whole), "computed": {weight.dtype for weight in whole.values()}}
    return found | {"state": as_arrays(engine.state_tensors())}


@pytest.mark.parametrize("case", BFLOAT16)
def test_bfloat16_computes_and_float32_keeps(case: str, tmp_path: Path) -> None:
    results = run_ranks(BFLOAT16[case][0], train_bfloat16, case, directory=tmp_path, timeout_s=60.0)
    (alone,) = run_ranks(1, train_bfloat16, case, directory=tmp_path, timeout_s=60.0)
    for result in (*results, alone):
        assert (result["kinds"], result["computed"]) == ({torch.float32}, {torch.bfloat16})
    ours, theirs = join_boxes(results, "gradient", "model"), alone["gradient"]
    flat = [np.concatenate([found[name].ravel() for name in theirs]) for found in (ours, theirs)]
    assert np.linalg.norm(flat[0] - flat[1]) < 0.02 * np.linalg.norm(flat[1])
    # Float32 sums of bfloat16 terms are no bfloat16 numbers.
    assert any((as_bfloat16(values) != values).any() for values in ours.values())
    masters = join_boxes(results, "state", "model")
    for result in results:
        for name, values in result["whole"].items():
            assert np.array_equal(values, results[0]["whole"][name]), name
            assert np.abs(values - alone["whole"][name]).max() < 0.05
            if name in masters:
                assert np.array_equal(values, as_bfloat16(masters[name])), name
    if "adapter" in case:
        assert all(".lora_" in name for name in masters)
        assert set(results[0]["whole"]) == set(alone["whole"])


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).float().bfloat16().double().numpy()


def resume(place: Place) -> tuple[bool, list[bool]]:
    """Whether a state that was taken and loaded again continues bit for bit, and whether anything stayed gathered."""
    engine = build_engine(place, torch.float32, shard=0)
    rows = SHARES[place.size][place.rank]
    engine.update(take_rows(0, rows), SFTLoss())
    state = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
    after = engine.state_json()
    engine.update(take_rows(1, rows), SFTLoss())
    expected = as_arrays(engine.state_tensors())
    engine.update(take_rows(2, rows), SFTLoss())
    engine.log_prob(take_rows(0, rows), 1.0)
    engine.load_state(state, after)
    engine.update(take_rows(1, rows), SFTLoss())
    again = as_arrays(engine.state_tensors())
    whole = [weight.shape == engine.optimizer.weights[name].live.shape for name, weight in named_locals(engine)]
    return all(np.array_equal(again[name], expected[name]) for name in expected), whole


def named_locals(engine: TrainEngine) -> list[tuple[str, Tensor]]:
    assert len(list(iter_sharded(engine.model))) == CONFIG["num_hidden_layers"] + 1
    return [(name, weight.exp_avg) for name, weight in engine.optimizer.weights.items()]


def test_a_sharded_state_continues_bit_for_bit(tmp_path: Path) -> None:
    for same, whole in run_ranks(2, resume, directory=tmp_path, timeout_s=60.0):
        assert same
        assert not any(whole)


def train_until_lost(place: Place, fault: str, notes: Path) -> str:
    """The last rank dies inside a sharded layer, or has a row too many tokens and keeps its error until the others have noticed."""
    engine = build_engine(place, torch.float32, shard=0)
    engine.update(build_rows(0), SFTLoss())
    at_fault = place.rank == place.size - 1
    if at_fault and fault == "killed":
        layer = engine.model.module.model.layers[1].mlp
        layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    rows = build_rows(0, (65,)) if at_fault and fault == "raised" else build_rows(0)
    try:
        engine.update(rows, SFTLoss())
    except (PeerLostError, ValueError) as error:
        (notes / str(place.rank)).touch()
        give_up_s = time.monotonic() + 20.0
        while len(list(notes.iterdir())) < place.size - (fault == "killed") and time.monotonic() < give_up_s:
            time.sleep(0.02)
        return f"{type(error).__name__}: {error}; noticed by {len(list(notes.iterdir()))}"
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(("fault", "size"), [("killed", 2), ("raised", 3)])
def test_a_rank_that_dies_or_raises_ends_the_waits_of_the_others(fault: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    *others, last = run_ranks(size, train_until_lost, fault, tmp_path / "notes", directory=tmp_path, timeout_s=60.0)
    for rank, message in enumerate(others):
        assert message.startswith(f"PeerLostError: rank {rank} of {size} lost another rank")
        assert message.endswith(f"noticed by {1 if fault == 'killed' else size}")
    assert last is None if fault == "killed" else last.startswith("RowTooLongError: row 0")
