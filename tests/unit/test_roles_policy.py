"""Where exact numerics hold is told before any worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from hybridflow.config import ConfigError
from hybridflow.flow.job import check_placed_models
from hybridflow.roles.policy import ModelSettings, check_model
from hybridflow.runtime.placement import PlacementSettings

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def describe(place: Path, family: str, **settings: str) -> ModelSettings:
    AutoConfig.for_model(family, **SHAPE).save_pretrained(place / family)
    return ModelSettings(path=str(place / family), **settings)


def test_exact_numerics_hold_on_gpus_for_the_families_of_the_kernels(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        for dtype in (None, "bfloat16", "float32"):
            check_model(describe(tmp_path, family), "exact", kind="gpu", dtype=dtype)
    check_model(describe(tmp_path, "gemma2", device="cpu"), "exact")


@pytest.mark.parametrize(
    ("family", "kind", "dtype", "message"),
    [
        ("gemma2", "gpu", None, "holds on a GPU for llama, mistral, qwen2, qwen3, not for gemma2"),
        ("qwen3", "cpu", "bfloat16", "needs float32 on the CPU, or bfloat16 or float32 on a GPU, not bfloat16 on cpu"),
        ("qwen3", "gpu", "float64", "needs float32 on the CPU, or bfloat16 or float32 on a GPU, not float64 on cuda"),
    ],
)
def test_elsewhere_they_are_refused_in_one_sentence(
    family: str, kind: str, dtype: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(describe(tmp_path, family), "exact", kind=kind, dtype=dtype)
    assert str(caught.value).startswith(f"numerics: 'exact' {message}; change model.dtype")


@pytest.mark.parametrize("placed", [{"actor": "gpu:0", "rollout": "cpu:0"}, {"actor": "cpu:0", "rollout": "gpu:0"}])
def test_exact_generators_compute_as_the_trainers_do(placed: dict[str, str], tmp_path: Path) -> None:
    model = describe(tmp_path, "qwen3")
    roles = {"actor": model, "rollout": model}
    with pytest.raises(ConfigError, match="asks for generators whose numbers are the trainers'"):
        check_placed_models(PlacementSettings(device_map=placed), tuple(roles), roles, "exact")
    check_placed_models(PlacementSettings(device_map=placed), tuple(roles), roles, "fast")
    alike = PlacementSettings(device_map={"actor": "gpu:0", "rollout": "gpu:1"})
    check_placed_models(alike, tuple(roles), roles, "exact")
