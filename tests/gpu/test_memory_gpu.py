"""What saves memory on a GPU: same numbers, less memory, and a real out-of-memory error answered as `auto` promises."""

from __future__ import annotations

import gc
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_train_gpu import CONFIG, LENGTHS, build_rows, flat_gradient, relative_gap

from hybridflow.algorithms.losses import SFTLoss
from hybridflow.models import LoraSettings, fresh_model
from hybridflow.train_engine import OptimizerSettings, OutOfMemoryError, TrainEngine, TrainSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEEP = {
    **CONFIG,
    "num_hidden_layers": 16,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def all_memory() -> Iterator[None]:
    """The device as it was, whatever a test has taken of it."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def build_engine(config: dict[str, Any] = CONFIG, **changes: Any) -> TrainEngine:
    model = fresh_model(config, seed=0, dtype=torch.bfloat16, device="cuda")
    settings = {"compile": False, "micro_batch_tokens": 512, "gradient_checkpointing": "none", **changes}
    return TrainEngine(model, TrainSettings(optimizer=OptimizerSettings(lr=1e-3), **settings))


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": "selective"},
        {"gradient_checkpointing": "full"},
        {"gradient_checkpointing": "full", "activation_offload": True},
        {"offload": "optimizer"},
        {"gradient_checkpointing": "selective", "compile": True},
        {"gradient_checkpointing": "full", "activation_offload": True, "compile": True},
    ],
    ids=lambda changes: ", ".join(f"{name} {value}" for name, value in changes.items()),
)
def test_savings_change_no_number(changes: dict[str, Any]) -> None:
    rows = build_rows(LENGTHS)
    plain, saving = build_engine(), build_engine(**changes)
    # Attention's backward adds up in no fixed order; compiled layers round elsewhere.
    tolerance = 0.05 if changes.get("compile") else 0.01
    assert relative_gap(flat_gradient(saving, rows, SFTLoss()), flat_gradient(plain, rows, SFTLoss())) < tolerance
    for engine in (plain, saving):
        engine.optimizer.discard_gradients()
    for _ in range(3):
        losses = [engine.update(rows, SFTLoss())["sft/loss"].value for engine in (plain, saving)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02 if changes.get("compile") else 2e-3)


@pytest.mark.parametrize("lora", [False, True])
def test_liger_s_kernels_change_no_number_beyond_rounding(lora: bool) -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("needs liger-kernel")
    rows = build_rows(LENGTHS)
    more: dict[str, Any] = {"lora": LoraSettings(rank=8, alpha=16.0)} if lora else {}
    plain, liger = build_engine(**more), build_engine(liger=True, **more)
    first, second = flat_gradient(plain, rows, SFTLoss()), flat_gradient(liger, rows, SFTLoss())
    assert relative_gap(second, first) < 0.02


def test_optimizer_offload_keeps_its_state_off_the_device() -> None:
    peaks = []
    for offload in ("none", "optimizer"):
        engine = build_engine(DEEP, offload=offload)
        engine.update(build_rows(LENGTHS), SFTLoss())
        torch.cuda.synchronize()
        gc.collect()
        peaks.append(torch.cuda.memory_allocated())
        weights = sum(weight.numel() for weight in engine.model.module.parameters())
        del engine
    assert peaks[0] - peaks[1] > 0.9 * 12 * weights


def test_activation_offload_frees_what_full_checkpointing_keeps() -> None:
    peaks, rows = [], build_rows([2000] * 16)
    for offload in (False, True):
        engine = build_engine(DEEP, gradient_checkpointing="full", activation_offload=offload, micro_batch_tokens=32000)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.accumulate(rows, SFTLoss())
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del engine
    # The last layers' inputs are still on their way out when backward begins.
    kept = (DEEP["num_hidden_layers"] - 4) * 32000 * DEEP["hidden_size"] * 2
    assert peaks[0] - peaks[1] > 0.6 * kept


def limit_memory(num_bytes: int) -> None:
    """From here on the allocator fails, as it does on a smaller GPU, beyond this."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)


def measure_peak(checkpointing: str) -> int:
    engine = build_engine(DEEP, gradient_checkpointing=checkpointing, micro_batch_tokens=32000)
    engine.accumulate(build_rows([2000] * 16), SFTLoss())
    return torch.cuda.max_memory_reserved()


def test_auto_becomes_stricter_after_a_real_out_of_memory_error(caplog: pytest.LogCaptureFixture) -> None:
    rows = build_rows([2000] * 16)
    torch.cuda.reset_peak_memory_stats()
    full = measure_peak("full")
    gc.collect()
    engine = build_engine(DEEP, gradient_checkpointing="auto", micro_batch_tokens=32000)
    modes = [engine.layers.mode.checkpointing]
    limit_memory(int(1.1 * full) + torch.cuda.memory_allocated())
    with caplog.at_level(logging.WARNING):
        engine.update(rows, SFTLoss())
    modes.append(engine.layers.mode.checkpointing)
    assert modes == ["none", "full"], "the device has room for all of it, and the limit for no more than this"
    text = caplog.text
    assert "gradient_checkpointing auto takes full and does the step again after: out of memory in " in text
    assert "of a micro-batch of 32000 tokens" in text and "train.micro_batch_tokens=16000" in text
    torch.cuda.set_per_process_memory_fraction(1.0)
    plain = build_engine(DEEP, micro_batch_tokens=32000)
    plain.update(rows, SFTLoss())
    second = [one.update(rows, SFTLoss())["sft/loss"].value for one in (engine, plain)]
    assert second[0] == pytest.approx(second[1], rel=2e-3), "the failed attempts left nothing in the gradients"


def test_out_of_memory_names_phase_tokens_and_remedies() -> None:
    engine = build_engine(DEEP, gradient_checkpointing="full", micro_batch_tokens=32000)
    limit_memory(torch.cuda.memory_reserved() + 2**26)
    with pytest.raises(
        OutOfMemoryError, match="out of memory in (forward|backward) of a micro-batch of 32000 tokens: "
    ) as caught:
        engine.update(build_rows([2000] * 16), SFTLoss())
    assert "train.micro_batch_tokens=16000, if no row is longer (about " in str(caught.value)
    assert "train.activation_offload=true (about " in str(caught.value)
