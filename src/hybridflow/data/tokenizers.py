"""Tokenizers: one made here from single characters, and how text becomes ids with any of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"


def build_character_tokenizer(characters: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one id per character, in the order given, after `<pad>` 0, `<bos>` 1, `<eos>` 2 and `<unk>` 3.

    It puts `<bos>` before a text and gives `<unk>` for any other character. Decoding gives the text back as it was.
    `save_pretrained` writes what `AutoTokenizer.from_pretrained` reads. Raises ValueError for a character given twice.
    """
    from transformers import PreTrainedTokenizerFast  # takes seconds, and reading settings needs none of it

    characters = list(characters)
    odd = [item for index, item in enumerate(characters) if len(item) != 1 or item in characters[:index]]
    if odd:
        raise ValueError(f"characters: {odd[0]!r} comes twice or is not one character; give each character once")
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text in one call, without the special tokens that the tokenizer would add around it."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        list(texts),
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]
    return ids


def find_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the beginning-of-sequence token if the tokenizer puts one before a text, else None."""
    bos_id: int | None = tokenizer.bos_token_id
    if bos_id is None:
        return None
    return bos_id if tokenizer("a")["input_ids"][:1] == [bos_id] else None


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text after a beginning-of-sequence token, where the tokenizer uses one and the text does not bring its own.

    What some tokenizers add behind a text (an end-of-sequence token) is left out: a prompt goes on.
    """
    bos_id = find_bos(tokenizer)
    return [ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids] for ids in encode_texts(tokenizer, texts)]
