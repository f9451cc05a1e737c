"""Tiny models that tests of several rooms build, and what is sampled from them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import Batch

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SAMPLED = SMALL | {
    "model_type": "qwen3",
    "vocab_size": 29,
    "head_dim": 8,
    "max_position_embeddings": 160,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
"""A model whose samples end now and then, and end in several blocks of its cache."""
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FOR_KERNELS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2500,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
"""Odd where a kernel's tiles are even."""


def build_letters() -> PreTrainedTokenizerFast:
    """A tokenizer for `SAMPLED`, of single letters; the first three ids are special."""
    pieces = ["<pad>", "<unk>", "</s>"] + [chr(ord("a") + i) for i in range(SAMPLED["vocab_size"] - 3)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


def draw_prompts(lengths: Sequence[int]) -> Batch:
    """Prompts of letters for `SAMPLED`, of these lengths."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, SAMPLED["vocab_size"], length).astype(np.int32) for length in lengths]
    return Batch.from_columns(group_id=[40 + i for i in range(len(lengths))], prompt_tokens=tokens)
