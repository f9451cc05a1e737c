"""An adapter under FSDP2: switched off, trained and merged while every rank holds a part of each weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import Place, run_ranks
from torch import Tensor

from hybridflow.models import (
    LanguageModel,
    LoraSettings,
    Packed,
    adapter_disabled,
    adapter_weights,
    apply_lora,
    compute_logprobs,
    fresh_model,
    iter_merged_weights,
)
from hybridflow.train_engine import join_ranks
from hybridflow.train_engine.mesh import Layout, build_mesh
from hybridflow.train_engine.sharding import apply_sharding, free_gathered

pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
TOKENS = torch.arange(17) * 5 % 41


def build(dtype: torch.dtype) -> LanguageModel:
    model = fresh_model(CONFIG, seed=3, dtype=dtype)
    apply_lora(model, LoraSettings(rank=3, alpha=6.0), seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def score(model: LanguageModel) -> Tensor:
    def forward() -> Tensor:
        attention = Packed(torch.tensor([0, 17], dtype=torch.int32), 17)
        hidden = model.hidden_states(TOKENS, torch.arange(17), attention)
        return compute_logprobs(hidden[:-1], TOKENS[1:], model.head)[0]

    return model.run(forward)


def go_round(model: LanguageModel) -> dict[str, Tensor]:
    """Log-probabilities with the adapter on, off between and inside steps, on again, and the gradient after that."""
    found = {}
    with torch.no_grad():
        found["on"] = score(model)
        with adapter_disabled(model):
            found["off"], found["off again"] = score(model), score(model)
        found["on again"] = score(model)
    score(model).sum().backward()
    with torch.no_grad(), adapter_disabled(model):
        found["off with gradients"] = score(model)
    return found


def work_sharded(place: Place, dtype: torch.dtype, reshard: bool) -> tuple[dict[str, Any], ...]:
    device = torch.device("cpu")
    ranks = join_ranks(rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=device, timeout_s=20.0)
    model = build(dtype)
    apply_sharding(model, build_mesh(ranks, Layout(shard=2, data=2), device), reshard_after_forward=reshard)
    found = go_round(model)
    free_gathered(model)
    adapter = adapter_weights(model)
    parts = {name: weight.to_local().numel() / weight.numel() for name, weight in adapter.items()}  # type: ignore[attr-defined]
    gradients = {name: weight.grad.full_tensor() for name, weight in adapter.items()}  # type: ignore[union-attr]
    merged = {
        name: weight.to(dtype)
        for name, weight in iter_merged_weights(model, lambda weight: weight.full_tensor())  # type: ignore[attr-defined]
    }
    ranks.leave()
    return tuple({name: _pack(tensor) for name, tensor in each.items()} for each in (found, gradients, merged)) + (
        parts,
    )


def _pack(tensor: Tensor) -> Any:
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_sharded_adapter_goes_off_and_on_as_a_whole_one(dtype: torch.dtype, reshard: bool, tmp_path: Any) -> None:
    alone = build(dtype)
    expected = {name: _pack(tensor) for name, tensor in go_round(alone).items()}
    assert (expected["on"] == expected["on again"]).all() and (expected["off"] == expected["off with gradients"]).all()
    assert abs(expected["on"] - expected["off"]).mean() > 0.1
    plain = {name: _pack(weight) for name, weight in iter_merged_weights(alone)}
    for found, gradients, merged, parts in run_ranks(2, work_sharded, dtype, reshard, directory=tmp_path):
        assert all((found[name] == expected[name]).all() for name in expected)
        assert all(part in (1 / 3, 2 / 3, 0.5) for part in parts.values())
        # Both ranks have the same row, and gradients are summed.
        for name, weight in adapter_weights(alone).items():
            assert weight.grad is not None
            whole = 2 * _pack(weight.grad)
            assert abs(gradients[name] - whole).max() <= (1e-10 if dtype == torch.float64 else 2e-2) * abs(whole).max()
        assert list(merged) == list(plain) and all((merged[name] == plain[name]).all() for name in plain)
