"""Models: Hugging Face checkpoints, the attention function, the key-value cache and the language-model head."""

from hybridflow.models.attention import Packed, Paged
from hybridflow.models.head import Head, compute_log_softmax, compute_logits, compute_logprobs, predicted_positions
from hybridflow.models.kv_cache import BLOCK_SIZE, PagedKVCache
from hybridflow.models.loading import fresh_model, load_model, load_tokenizer, save_description, save_model
from hybridflow.models.model import LanguageModel

__all__ = [
    "BLOCK_SIZE",
    "Head",
    "LanguageModel",
    "Packed",
    "Paged",
    "PagedKVCache",
    "compute_log_softmax",
    "compute_logits",
    "compute_logprobs",
    "fresh_model",
    "load_model",
    "load_tokenizer",
    "predicted_positions",
    "save_description",
    "save_model",
]
