"""Real model shapes with random weights, and the arithmetic of a training step over them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import Lengths
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config import ConfigError
from hybridflow.models import LanguageModel
from hybridflow.models.attention import ATTENTION_NAME

_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN, "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        **_QWEN, "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        **_QWEN, "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN, "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "tiny": {
        **_QWEN, "model_type": "qwen3", "vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""`tiny` tries a benchmark out, on the CPU too."""
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200, by the maker's data sheet."""
BANDWIDTH, PRODUCT_FLOPS = 4.3e12, 790e12
"""Bytes a second that a copy reaches on an H200, and bf16 operations a second that matrix products reach."""


class Layer(NamedTuple):
    """Sizes of a layer: `Layer(heads=16, kv_heads=8, size=128, width=1024, inner=3072)`."""

    heads: int
    kv_heads: int
    size: int
    width: int
    inner: int

    def list_matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each."""
        queries, keys = self.heads * self.size, self.kv_heads * self.size
        ways_in, ways_out = [queries, keys, keys, self.inner, self.inner], [queries, self.inner]
        return [(self.width, outputs) for outputs in ways_in] + [(inputs, self.width) for inputs in ways_out]

    def count_weights(self) -> int:
        """Those of the matrices."""
        return sum(inputs * outputs for inputs, outputs in self.list_matrices())


def read_layer(shape: str) -> Layer:
    """Any layer of a shape: all are alike."""
    values = SHAPES[shape]
    heads, width = values["num_attention_heads"], values["hidden_size"]
    size = values.get("head_dim", width // heads)
    return Layer(heads, values["num_key_value_heads"], size, width, values["intermediate_size"])


def build_module(shape: str, attention: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A Transformers module with random weights, made where and in the type that it will have."""
    values = copy.deepcopy(SHAPES[shape])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def build_model(shape: str, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """The same, driven by hybridflow."""
    return LanguageModel(build_module(shape, ATTENTION_NAME, device, dtype))


def draw_prompts(shape: str, lengths: Iterable[int], rng: np.random.Generator) -> list[np.ndarray]:
    """Random token ids, int32, a row of each length."""
    return [rng.integers(10, SHAPES[shape]["vocab_size"] - 1000, length).astype(np.int32) for length in lengths]


def plan_lengths(rows: Lengths, step_tokens: int, seed: int) -> list[int]:
    """Row lengths with this many tokens in all: equal rows, or documents uniform in between. Raises ConfigError."""
    least, most = rows.bounds
    if most > step_tokens:
        raise ConfigError(f"rows={rows}: step_tokens={step_tokens} hold no such row; write step_tokens={most} at least")
    if least == most:
        return [most] * (step_tokens // most)
    rng, lengths = np.random.default_rng(seed), list[int]()
    while (room := step_tokens - sum(lengths)) > 0:
        lengths.append(min(int(rng.integers(least, most + 1)), room))
    return lengths


def compute_step_flops(shape: str, lengths: Sequence[int], *, lora_rank: int = 0) -> float:
    """Arithmetic of forward and backward, recomputation not counted.

    6 operations a token for each weight of a matrix, the head's among them and the embedding's not; 4 where a weight is frozen (LoRA), 6
    for the adapter's; causal attention counted over each row by itself: 6 H K L^2 a layer for a row of L tokens.
    """
    layer, layers = read_layer(shape), SHAPES[shape]["num_hidden_layers"]
    weights = layers * layer.count_weights() + SHAPES[shape]["vocab_size"] * layer.width
    adapter = layers * lora_rank * sum(inputs + outputs for inputs, outputs in layer.list_matrices())
    a_token = (4 if lora_rank else 6) * weights + 6 * adapter
    attention = 6.0 * layers * layer.heads * layer.size * float(sum(length**2 for length in lengths))
    return a_token * sum(lengths) + attention
