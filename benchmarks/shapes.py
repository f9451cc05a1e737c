"""Real model shapes with random weights, and the arithmetic of a training step over them."""

from __future__ import annotations

import copy
import gc
import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
FAILURES = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, OSError, LookupError)
"""What a measurement may die of, another library's mistakes included, without taking the ones after it along."""

Case = TypeVar("Case")


def parse_case(kind: type[Case], text: str) -> Case:
    """Settings from `key=value,key=value`, in the types of their defaults; what is not named keeps its default."""
    kinds = {name: type(value) for name, value in vars(kind()).items()}
    pairs = [word.split("=", 1) for word in text.split(",")] if text else []
    return kind(**{name: kinds[name](value) for name, value in pairs})


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


def plan_lengths(rows: str, total_tokens: int, seed: int) -> list[int]:
    """Row lengths with this many tokens in all: `8192` for equal rows, `200-2000` for documents uniform in between."""
    least, _, most = rows.partition("-")
    if not most:
        return [int(least)] * (total_tokens // int(least))
    rng, lengths = np.random.default_rng(seed), list[int]()
    while (room := total_tokens - sum(lengths)) > 0:
        lengths.append(min(int(rng.integers(int(least), int(most) + 1)), room))
    return lengths


def compute_step_flops(shape: str, lengths: Sequence[int], *, lora_rank: int = 0) -> float:
    """Arithmetic of forward and backward, recomputation not counted.

    6 operations a token for each weight of a matrix, the head's among them and the embedding's not; 4 where a weight is frozen (LoRA), 6
    for the adapter's; causal attention counted over each row by itself: 6 H K L^2 a layer for a row of L tokens.
    """
    s = SHAPES[shape]
    size = s.get("head_dim", s["hidden_size"] // s["num_attention_heads"])
    width, inner, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
    queries, keys = s["num_attention_heads"] * size, s["num_key_value_heads"] * size
    matrices = [
        (width, queries),
        (width, keys),
        (width, keys),
        (queries, width),
        (width, inner),
        (width, inner),
        (inner, width),
    ]
    weights = layers * sum(rows * columns for rows, columns in matrices) + s["vocab_size"] * width
    adapter = layers * lora_rank * sum(rows + columns for rows, columns in matrices)
    a_token = (4 if lora_rank else 6) * weights + 6 * adapter
    return a_token * sum(lengths) + 6.0 * layers * queries * float(sum(length**2 for length in lengths))


def print_case(case: Any, measure: Callable[[], dict[str, Any]]) -> None:
    """What was measured as a line of JSON, or the error that ended it; a case is a dataclass with `side` and `shape`."""
    given = {name: value for name, value in vars(case).items() if value != vars(type(case)())[name]}
    try:
        result = measure()
    except FAILURES as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    line = {"side": case.side, "shape": case.shape, **given, **result, "torch": torch.__version__}
    print(json.dumps(line), flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
