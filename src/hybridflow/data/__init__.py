"""Rows from files: as examples to learn, and as prompts to continue."""

from hybridflow.data.chat import chat_stop_ids
from hybridflow.data.filters import list_filter_sources
from hybridflow.data.loader import PromptPool, SFTLoader, read_prompts
from hybridflow.data.messages import DataError
from hybridflow.data.settings import DataSettings
from hybridflow.data.tokenizers import build_character_tokenizer

__all__ = [
    "DataError",
    "DataSettings",
    "PromptPool",
    "SFTLoader",
    "build_character_tokenizer",
    "chat_stop_ids",
    "list_filter_sources",
    "read_prompts",
]
