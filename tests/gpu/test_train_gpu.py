"""Training on a GPU: bfloat16 weights at fixed addresses over float32 masters, and a host that never waits inside a mini-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses import PolicyLoss, SFTLoss
from hybridflow.batch import Batch
from hybridflow.models import LanguageModel, fresh_model
from hybridflow.train_engine import OptimizerSettings, TrainEngine, TrainSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCAB = 500
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LENGTHS = [30, 170, 90, 2, 300, 120, 50, 801]


def build_model(dtype: torch.dtype, device: str = "cuda") -> LanguageModel:
    return fresh_model(CONFIG, seed=0, dtype=dtype, device=device)


def build_engine(model: LanguageModel, *, lr: float = 1e-3, **changes: Any) -> TrainEngine:
    # Compiled layers have tests of their own; a compilation takes half a minute.
    return TrainEngine(model, TrainSettings(optimizer=OptimizerSettings(lr=lr), **{"compile": False, **changes}))


def build_rows(lengths: list[int], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch.from_columns(
        tokens=[rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths],
        loss_mask=[(np.arange(length) > length // 3).astype(np.uint8) for length in lengths],
        rollout_logprobs=[rng.normal(-6.2, 0.2, length).astype(np.float32) for length in lengths],
        advantages=[rng.normal(0, 1, length).astype(np.float32) for length in lengths],
        state=np.zeros(len(lengths), dtype=np.int8),
    )


def flat_gradient(engine: TrainEngine, batch: Batch, loss: Any) -> Tensor:
    engine.accumulate(batch, loss)
    return torch.cat([gradient.flatten().cpu() for gradient in engine.optimizer.gradients().values()])


def relative_gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_bfloat16_trains_in_place_over_float32_masters() -> None:
    model, batch = build_model(torch.bfloat16), build_rows(LENGTHS)
    engine = build_engine(model, micro_batch_tokens=512)
    addresses = {name: weight.data_ptr() for name, weight in model.module.named_parameters()}
    losses = [engine.update(batch, SFTLoss())["sft/loss"].value for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    assert {name: weight.data_ptr() for name, weight in model.module.named_parameters()} == addresses
    state = engine.state_tensors()
    for name, weight in model.module.named_parameters():
        assert state[f"model/{name}"].dtype == torch.float32
        assert torch.equal(weight, state[f"model/{name}"].bfloat16())


def test_gradients_agree_with_the_cpu_in_float32() -> None:
    batch = build_rows(LENGTHS)
    on_cpu = flat_gradient(build_engine(build_model(torch.float32, "cpu"), micro_batch_tokens=512), batch, PolicyLoss())
    on_gpu = flat_gradient(build_engine(build_model(torch.float32), micro_batch_tokens=512), batch, PolicyLoss())
    assert relative_gap(on_gpu, on_cpu) < 1e-4
    rounded = flat_gradient(build_engine(build_model(torch.bfloat16), micro_batch_tokens=512), batch, PolicyLoss())
    assert rounded.dtype == torch.float32
    assert relative_gap(rounded, on_cpu) < 0.15


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_gradient_is_the_same_for_every_split(dtype: torch.dtype, tolerance: float) -> None:
    model, batch = build_model(dtype), build_rows(LENGTHS)
    whole, thirds, rows = (
        flat_gradient(build_engine(model, micro_batch_tokens=size), batch, PolicyLoss()) for size in (4096, 801, 1)
    )
    assert relative_gap(thirds, whole) < tolerance
    assert relative_gap(rows, whole) < tolerance


@pytest.mark.parametrize(
    ("dtype", "compiled", "tolerance"),
    [(torch.float32, False, 1e-4), (torch.bfloat16, False, 0.03), (torch.bfloat16, True, 0.05)],
)
def test_shared_prompts_leave_the_gradient_as_it_is(dtype: torch.dtype, compiled: bool, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length) for length in (700, 90, 33)]
    tokens = [
        np.concatenate([prompt, rng.integers(0, VOCAB, rng.integers(1, 200))]).astype(np.int32)
        for prompt in prompts
        for _ in range(5)
    ]
    begins = [len(prompt) for prompt in prompts for _ in range(5)]
    batch = Batch.from_columns(
        tokens=tokens,
        loss_mask=[(np.arange(len(row)) >= begin).astype(np.uint8) for row, begin in zip(tokens, begins, strict=True)],
        state=np.zeros(len(tokens), dtype=np.int8),
    )
    model = build_model(dtype)
    plain, shared = (
        flat_gradient(
            build_engine(model, micro_batch_tokens=4096, share_prompts=share, compile=compiled), batch, SFTLoss()
        )
        for share in (False, True)
    )
    assert relative_gap(shared, plain) < tolerance


@pytest.mark.parametrize(("compiled", "tolerance"), [(False, 1e-3), (True, 0.1)])
def test_log_prob_starts_the_ratio_at_one(compiled: bool, tolerance: float) -> None:
    """Compiled, a pass without gradient is another program than one with, and bfloat16 rounds elsewhere."""
    model, batch = build_model(torch.bfloat16), build_rows(LENGTHS)
    engine = build_engine(model, lr=0.0, micro_batch_tokens=512, compile=compiled)
    batch = batch.with_column("trainer_logprobs", engine.log_prob(batch, 1.0))
    for _ in range(3):
        metrics = engine.update(batch, PolicyLoss(old_logprobs="trainer_logprobs"))
        assert metrics["policy/logprob_gap_max"].value < tolerance


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_host_never_waits_inside_a_mini_batch(checkpointing: str) -> None:
    model, batch = build_model(torch.bfloat16), build_rows(LENGTHS)
    engine = build_engine(model, micro_batch_tokens=512, gradient_checkpointing=checkpointing)
    engine.update(batch, PolicyLoss())
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.accumulate(batch, PolicyLoss())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_checkpointing_saves_memory_and_keeps_the_gradient() -> None:
    batch = build_rows([1500] * 8)
    found, peaks = [], []
    for checkpointing in ("none", "full"):
        engine = build_engine(build_model(torch.bfloat16), gradient_checkpointing=checkpointing)
        torch.cuda.reset_peak_memory_stats()
        found.append(flat_gradient(engine, batch, SFTLoss()))
        peaks.append(torch.cuda.max_memory_allocated())
        del engine
    assert relative_gap(found[1], found[0]) < 0.01
    assert peaks[1] < 0.8 * peaks[0]


def test_resume_goes_on_as_if_nothing_had_happened() -> None:
    batches = [build_rows(LENGTHS, seed=step) for step in range(4)]
    whole, first = (build_engine(build_model(torch.bfloat16), micro_batch_tokens=512) for _ in range(2))
    for batch in batches[:2]:
        first.update(batch, SFTLoss())
        whole.update(batch, SFTLoss())
    saved, state = {name: tensor.cpu() for name, tensor in first.state_tensors().items()}, first.state_json()
    second = build_engine(build_model(torch.bfloat16), micro_batch_tokens=512)
    second.load_state(saved, state)
    assert all(torch.equal(tensor.cpu(), saved[name]) for name, tensor in second.state_tensors().items())
    for batch in batches[2:]:
        one, other = whole.update(batch, SFTLoss()), second.update(batch, SFTLoss())
        assert one["sft/loss"].value == pytest.approx(other["sft/loss"].value, rel=1e-3)
