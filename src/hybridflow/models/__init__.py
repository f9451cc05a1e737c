"""Models: Hugging Face checkpoints, the attention function, the key-value cache and the language-model head."""

from hybridflow.models.attention import Packed, Paged
from hybridflow.models.head import Head, compute_log_softmax, compute_logits, compute_logprobs, predicted_positions
from hybridflow.models.kv_cache import BLOCK_SIZE, PagedKVCache
from hybridflow.models.loading import fresh_model, load_model, load_tokenizer, save_description, save_model
from hybridflow.models.lora import (
    LoraSettings,
    adapter_disabled,
    adapter_weights,
    apply_lora,
    check_lora,
    compute_merged,
    has_adapter,
    load_adapter,
    merged_weights,
    plain_name,
    save_adapter,
    save_adapter_config,
)
from hybridflow.models.model import LanguageModel

__all__ = [
    "BLOCK_SIZE",
    "Head",
    "LanguageModel",
    "LoraSettings",
    "Packed",
    "Paged",
    "PagedKVCache",
    "adapter_disabled",
    "adapter_weights",
    "apply_lora",
    "check_lora",
    "compute_log_softmax",
    "compute_logits",
    "compute_logprobs",
    "compute_merged",
    "fresh_model",
    "has_adapter",
    "load_adapter",
    "load_model",
    "load_tokenizer",
    "merged_weights",
    "plain_name",
    "predicted_positions",
    "save_adapter",
    "save_adapter_config",
    "save_description",
    "save_model",
]
