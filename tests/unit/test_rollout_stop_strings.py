"""Stop strings over token borders, with tokenizers that split text in three ways, against a search in the whole text after each token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridflow.rollout.native.sequences import Draws, Finish, Sequences
from hybridflow.rollout.native.stopping import StopRules
from hybridflow.types import SamplingParams

PROMPT = np.array([3, 4], np.int32)
SPECIAL = ["<unk>", "</s>", "<|end|>"]
LETTERS = ["a", "b", "S", "T", "O", "P", ".", "\n", "é", "語", "🙂", " "]


def wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", additional_special_tokens=["<|end|>"]
    )  # fmt: skip


def build_byte_level() -> PreTrainedTokenizerFast:
    """Every byte a token, and tokens that begin or end within a character, as GPT-2's have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    joint = ["ST", "OP", "STOP", "ab", "a b", " S", "..", ".\n", "\n\n", "Té", "語語"]
    texts = ["".join(part for part, _ in encode(text)) for text in joint]
    accent, kanji = (encode(text)[0][0] for text in ("éa", "a語"))
    pieces = [*SPECIAL, *alphabet, *texts, accent[1:], kanji[:2], kanji[:3]]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


def build_sentencepiece() -> PreTrainedTokenizerFast:
    """Words with their space before them, which a decoder takes off at the start, and bytes for what is no piece: Llama's."""
    words = ["▁", "▁a", "▁S", "a", "b", "S", "T", "O", "P", "STO", "P.", "OP", "ab", ".", "..", "é", "▁▁"]
    pieces = [*SPECIAL, *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(backend)


def build_characters() -> PreTrainedTokenizerFast:
    pieces = [*SPECIAL, *LETTERS]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return wrap(backend)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte level": build_byte_level, "sentencepiece": build_sentencepiece, "characters": build_characters,
}  # fmt: skip


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def feed(tokenizer: PreTrainedTokenizerFast, response: list[int], strings: tuple[str, ...]) -> tuple[int, str, str]:
    """One row, token by token. returns: (tokens that it took, finish, text)."""
    params = SamplingParams(max_new_tokens=len(response) + 1, stop_strings=strings)
    rules = StopRules(params, set(), tokenizer, len(tokenizer))
    sequences = Sequences([PROMPT], 1, len(response) + 1, 1000)
    row = np.zeros(1, np.int64)
    for token in response:
        sequences.append(row, Draws(np.array([token]), np.array([-1.0])))
        rules.mark_finished(sequences, row)
        if sequences.finish[0] != Finish.NONE:
            break
    kept = sequences.tokens[0, 2 : sequences.length[0]]
    return len(kept), Finish(int(sequences.finish[0])).name, rules.decode([kept])[0]


def search(tokenizer: PreTrainedTokenizerFast, response: list[int], strings: tuple[str, ...]) -> tuple[int, str, str]:
    """The same by looking for every string in the whole text after every token."""
    text = ""
    for count in range(1, len(response) + 1):
        text = tokenizer.decode(response[:count], skip_special_tokens=True)
        found = [text.find(string) for string in strings if string in text]
        if found:
            return count, "STOP", text[: min(found)]
    return len(response), "NONE", text


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_row_ends_at_the_first_token_whose_text_holds_a_stop_string(tokenizer, data):
    likely = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).strip("\ufffd") and i not in (1, 2)]
    parts = st.lists(st.one_of(st.sampled_from(likely), st.integers(3, len(tokenizer) - 1)), min_size=1, max_size=24)
    response = data.draw(parts)
    text = tokenizer.decode(response, skip_special_tokens=True)
    # Pieces of the text itself, so that many are found, and what stands in no text.
    within = st.builds(
        lambda at, size: text[at % len(text) :][:size] if text else "a", st.integers(0, 40), st.integers(1, 5)
    )
    free = st.text(st.sampled_from(LETTERS), min_size=1, max_size=4)
    drawn = data.draw(st.lists(st.one_of(within, free), min_size=1, max_size=4))
    strings = tuple(string for string in drawn if "\ufffd" not in string) or ("b",)
    assert feed(tokenizer, response, strings) == search(tokenizer, response, strings)


@pytest.mark.parametrize(
    ("spelt", "strings", "expected"),
    [
        ("aSTOPb", ("STOP",), "a"),
        ("aSTOPb", ("STOPS", "STOP"), "a"),
        ("aSTOPb", ("STOP", "ST"), "a"),
        ("aSTOPb", ("OP", "TO"), "aS"),
        ("aS TOP", ("STOP", "S T"), "a"),
        ("ab.\n\nb", ("\n\n", ".\n"), "ab"),
        ("aéb", ("é",), "a"),
        ("aé語b", ("é語b", "é🙂"), "a"),
        ("T🙂b", ("🙂",), "T"),
    ],
)
def test_however_a_text_is_split_the_same_is_left_of_it(spelt, strings, expected):
    """Each tokenizer spells it in bytes, in its smallest pieces and in larger ones, as far as it has them."""
    splits = set()
    for name, build in TOKENIZERS.items():
        tokenizer = build()
        for response in {tuple(spell(tokenizer, spelt, longest)) for longest in (0, 1, 4)} - {()}:
            splits.add((name, response))
            taken, finish, text = feed(tokenizer, list(response), strings)
            assert (finish, text) == ("STOP", expected), (name, response)
            # The tokens of the string stay, and none after it.
            whole = tokenizer.decode(list(response[:taken]))
            before = tokenizer.decode(list(response[: taken - 1]))
            assert any(string in whole for string in strings) and not any(string in before for string in strings)
    assert {name for name, _ in splits} == set(TOKENIZERS) and len(splits) > 3


def spell(tokenizer: PreTrainedTokenizerFast, text: str, longest: int) -> list[int]:
    """Ids whose text is this, each the longest piece of at most so many characters, bytes where there is none; nothing where it cannot."""
    by_text = {tokenizer.decode([i]): i for i in range(3, len(tokenizer))}
    vocabulary, ids = tokenizer.get_vocab(), []
    # A decoder that takes off a leading space tells pieces with and without one as the same.
    by_text |= {piece: i for piece, i in vocabulary.items() if piece in by_text}
    by_text |= {" ": vocabulary["▁"]} if "▁" in vocabulary else {}
    at = 0
    while at < len(text):
        size = next((n for n in range(longest, 0, -1) if text[at : at + n] in by_text and at + n <= len(text)), 0)
        if size:
            ids.append(by_text[text[at : at + size]])
        else:
            ids += spell_bytes(vocabulary, text[at])
            size = 1
        at += size
    return ids if tokenizer.decode(ids) == text else []


def spell_bytes(vocabulary: dict[str, int], character: str) -> list[int]:
    if "<0x00>" in vocabulary:
        return [vocabulary[f"<0x{byte:02X}>"] for byte in character.encode()]
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    letters = encode(character)[0][0]
    return [vocabulary[letter] for letter in letters] if set(letters) <= vocabulary.keys() else []
