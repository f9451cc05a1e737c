"""Models: Hugging Face checkpoints, the attention function, the key-value cache and the language-model head."""

from hybridflow.models.adapter_files import (
    ADAPTER_CONFIG,
    AdapterForm,
    describe_adapter,
    describe_form,
    read_form,
    write_adapter,
)
from hybridflow.models.attention import Packed, Paged
from hybridflow.models.head import Head, compute_log_softmax, compute_logits, predicted_positions
from hybridflow.models.head_logprobs import compute_logprobs
from hybridflow.models.head_shaping import Shaped, count_kept, cut_logits, find_seen, penalize_repetition
from hybridflow.models.kv_cache import BLOCK_SIZE, PagedKVCache
from hybridflow.models.loading import fresh_model, load_model, load_tokenizer, save_description, save_model
from hybridflow.models.lora import (
    LoraSettings,
    adapter_disabled,
    adapter_weights,
    apply_lora,
    check_lora,
    check_targets,
    compute_base_checksum,
    compute_merged,
    has_adapter,
    iter_base_weights,
    iter_merged_onto,
    iter_merged_weights,
    load_adapter,
    merge_adapter,
    plain_name,
    resolve_lora,
    save_adapter,
    save_adapter_config,
)
from hybridflow.models.model import LanguageModel

__all__ = [
    "ADAPTER_CONFIG",
    "BLOCK_SIZE",
    "AdapterForm",
    "Head",
    "LanguageModel",
    "LoraSettings",
    "Packed",
    "Paged",
    "PagedKVCache",
    "Shaped",
    "adapter_disabled",
    "adapter_weights",
    "apply_lora",
    "check_lora",
    "check_targets",
    "compute_base_checksum",
    "compute_log_softmax",
    "compute_logits",
    "compute_logprobs",
    "compute_merged",
    "count_kept",
    "cut_logits",
    "describe_adapter",
    "describe_form",
    "find_seen",
    "fresh_model",
    "has_adapter",
    "load_adapter",
    "load_model",
    "load_tokenizer",
    "iter_base_weights",
    "iter_merged_onto",
    "iter_merged_weights",
    "merge_adapter",
    "penalize_repetition",
    "plain_name",
    "predicted_positions",
    "read_form",
    "resolve_lora",
    "save_adapter",
    "save_adapter_config",
    "save_description",
    "save_model",
    "write_adapter",
]
