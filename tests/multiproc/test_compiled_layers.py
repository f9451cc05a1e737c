"""Compiled and checkpointed layers under FSDP2: one compilation for all layers and lengths, and the gradients of plain layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Place, run_ranks
from torch import Tensor
from torch._dynamo.utils import counters

from hybridflow.algorithms.losses import SFTLoss
from hybridflow.batch import Batch
from hybridflow.models import fresh_model
from hybridflow.train_engine import ParallelConfig, TrainEngine, TrainSettings, join_ranks

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MODES = {
    "plain": {"compile": False},
    "compiled": {"compile": True},
    "compiled, selective": {"compile": True, "gradient_checkpointing": "selective"},
    "compiled, full": {"compile": True, "gradient_checkpointing": "full"},
}


def build_rows(rank: int, length: int) -> Batch:
    """Two rows of one length: attention on the CPU pads by buckets, whose number is compiled in."""
    rng = np.random.default_rng(10 * length + rank)
    tokens = [rng.integers(0, 41, length).astype(np.int32) for _ in range(2)]
    masks = [np.array([0] + [1] * (length - 1), dtype=np.uint8) for _ in range(2)]
    return Batch.from_columns(tokens=tokens, loss_mask=masks, state=np.zeros(2, dtype=np.int8))


def train(place: Place) -> dict[str, tuple[float, int, int]]:
    """Of each mode the largest relative gap of a gradient of two mini-batches to that of plain layers, how many graphs were compiled, and
    how often one broke."""
    # Without code generation, which takes most of a minute: what is traced, and how often, stays the same.
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    ranks = join_ranks(
        rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=torch.device("cpu"), timeout_s=60.0
    )
    plain: list[dict[str, Tensor]] = []
    found = {}
    for name, mode in MODES.items():
        torch._dynamo.reset()
        counters.clear()
        settings = TrainSettings(parallel_config=ParallelConfig(shard=0), **mode)
        engine = TrainEngine(fresh_model(CONFIG, seed=0, dtype=torch.float64), settings, ranks)
        gradients = []
        for length in (17, 25):
            engine.accumulate(build_rows(place.rank, length), SFTLoss())
            gradients.append({key: gradient.clone() for key, gradient in engine.optimizer.gradients().items()})
        plain = plain or gradients
        gap = max(largest_gap(ours, theirs) for ours, theirs in zip(gradients, plain, strict=True))
        found[name] = (gap, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    ranks.leave()
    return found


def largest_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of an entry, relative to the largest entry of its tensor; NaN where a tensor is all zeros."""
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours)


@pytest.mark.slow
def test_sharded_layers_share_one_compilation_and_keep_their_gradients(tmp_path: Path) -> None:
    for found in run_ranks(2, train, directory=tmp_path, timeout_s=110.0):
        assert found.pop("plain") == (0.0, 0, 0)
        assert len(found) == 3
        for gap, num_graphs, num_breaks in found.values():
            assert gap < 1e-10
            assert (num_graphs, num_breaks) == (1, 0)
