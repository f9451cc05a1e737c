"""Text as ids: the character tokenizer, and plain prompt and response with tokenizers that treat BOS, EOS and pad in different ways."""

import os
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridflow.config import ConfigError
from hybridflow.data import DataSettings, build_character_tokenizer
from hybridflow.data.encode import Example, ExampleEncoder, PromptEncoder
from hybridflow.data.messages import BadRow
from hybridflow.data.tokenizers import find_bos

DATA = Path(os.environ.get("HYBRIDFLOW_DATA", Path(__file__).parents[3] / "shared" / "data"))
PRINTABLE = build_character_tokenizer(string.printable)
SETTINGS = DataSettings(files=("none",))


def learn(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> Example | BadRow:
    (example,) = ExampleEncoder(tokenizer, SETTINGS, "text").encode([{"prompt": prompt, "response": response}])
    return example


def tokenizer_that_adds(pattern: str) -> PreTrainedTokenizerBase:
    tokenizer = build_character_tokenizer(string.printable)
    tokens = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=tokens)
    return tokenizer


@given(st.text(string.printable))
def test_the_character_tokenizer_gives_every_text_back(text: str) -> None:
    ids = PRINTABLE(text)["input_ids"]
    assert len(ids) == len(text) + 1 and ids[0] == PRINTABLE.bos_token_id
    assert PRINTABLE.decode(ids, skip_special_tokens=True) == text


def test_the_character_tokenizer_is_the_same_from_disk(tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer("0123456789+= \n")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab() and len(loaded) == 4 + 14
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2, 3)
    assert loaded("12 + 3=\n")["input_ids"] == tokenizer("12 + 3=\n")["input_ids"] == [1, 5, 6, 16, 14, 16, 7, 15, 17]
    assert loaded.decode(loaded(" 1  2 \n")["input_ids"], skip_special_tokens=True) == " 1  2 \n"
    assert loaded("1x")["input_ids"] == [1, 5, 3]


@pytest.mark.parametrize("characters", ["aa", ["a", "bc"], [""]])
def test_characters_must_be_single_and_differ(characters) -> None:
    with pytest.raises(ValueError, match="give each character once"):
        build_character_tokenizer(characters)


@pytest.mark.parametrize(
    ("pattern", "first"),
    [("<bos> $A", ["<bos>"]), ("<bos> $A <eos>", ["<bos>"]), ("$A <eos>", []), ("$A", [])],
)
def test_response_and_eos_are_trained_and_bos_comes_as_the_tokenizer_has_it(pattern: str, first: list[str]) -> None:
    tokenizer = tokenizer_that_adds(pattern)
    example = learn(tokenizer, "2+2=", "4.")
    assert tokenizer.convert_ids_to_tokens(example.tokens.tolist()) == [*first, *"2+2=", *"4.", "<eos>"]
    assert example.loss_mask.tolist() == [0] * (len(first) + 4) + [1, 1, 1]


def test_a_text_that_brings_its_own_bos_or_eos_gets_no_second_one() -> None:
    example = learn(PRINTABLE, "<bos>2+2=", "4<eos>")
    assert PRINTABLE.convert_ids_to_tokens(example.tokens.tolist()) == ["<bos>", *"2+2=", "4", "<eos>"]
    assert example.loss_mask.tolist() == [0] * 5 + [1, 1]


def test_eos_is_trained_where_it_is_the_pad_token_too() -> None:
    tokenizer = build_character_tokenizer(string.printable)
    tokenizer.pad_token = tokenizer.eos_token
    example = learn(tokenizer, "a<eos>b", "c<eos>d")
    assert tokenizer.convert_ids_to_tokens(example.tokens.tolist()) == [
        "<bos>",
        "a",
        "<eos>",
        "b",
        "c",
        "<eos>",
        "d",
        "<eos>",
    ]
    assert example.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_position_0_is_never_trained() -> None:
    tokenizer = tokenizer_that_adds("$A")
    example = learn(tokenizer, "", "ab")
    assert example.loss_mask.tolist() == [0, 1, 1]
    assert "no token that is learned" in str(learn(tokenizer, "", ""))
    assert learn(tokenizer, "a", "").loss_mask.tolist() == [0, 1]


def test_a_tokenizer_without_eos_is_a_config_error() -> None:
    tokenizer = build_character_tokenizer("ab")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        ExampleEncoder(tokenizer, SETTINGS, "text")


def test_a_prompt_goes_on_and_so_has_no_eos() -> None:
    tokenizer = tokenizer_that_adds("<bos> $A <eos>")
    prompts = PromptEncoder(tokenizer, SETTINGS, "text").encode([{"prompt": "ab"}, {"prompt": "<bos>ab"}])
    assert [tokenizer.convert_ids_to_tokens(p.tokens.tolist()) for p in prompts] == [["<bos>", "a", "b"]] * 2
    assert prompts[0].text == "ab"


def test_a_prompt_without_a_token_is_a_bad_row() -> None:
    (found,) = PromptEncoder(tokenizer_that_adds("$A"), SETTINGS, "text").encode([{"prompt": ""}])
    assert isinstance(found, BadRow) and "nothing to go on from" in str(found)
    (found,) = PromptEncoder(PRINTABLE, SETTINGS, "text").encode([{"prompt": ""}])
    assert found.tokens.tolist() == [PRINTABLE.bos_token_id]


def test_bos_is_found_by_what_the_tokenizer_does() -> None:
    assert find_bos(tokenizer_that_adds("<bos> $A <eos>")) == 1 and find_bos(tokenizer_that_adds("$A")) is None
    assert find_bos(build_character_tokenizer("0")) == 1  # it knows no letter


@given(st.lists(st.tuples(st.text(string.printable, max_size=6), st.text(string.printable, max_size=6)), max_size=5))
def test_rows_encoded_together_are_those_encoded_alone(pairs: list[tuple[str, str]]) -> None:
    rows = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    together = ExampleEncoder(PRINTABLE, SETTINGS, "text").encode(rows)
    for row, example in zip(rows, together, strict=True):
        alone = learn(PRINTABLE, row["prompt"], row["response"])
        assert (
            example.tokens.tolist() == alone.tokens.tolist() and example.loss_mask.tolist() == alone.loss_mask.tolist()
        )


@pytest.mark.skipif(not (DATA / "stories260K").is_dir(), reason="stories260K is not there")
def test_a_real_sentencepiece_tokenizer_that_puts_a_blank_before_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "stories260K")
    example = learn(tokenizer, "Once upon", "a time there was")
    assert example.tokens.tolist() == [
        1,
        *tokenizer("Once upon", add_special_tokens=False)["input_ids"],
        *tokenizer("a time there was", add_special_tokens=False)["input_ids"],
        2,
    ]
    start = int(example.loss_mask.argmax())
    assert tokenizer.decode(example.tokens[start:]).split() == ["a", "time", "there", "was</s>"]
    assert tokenizer.decode(example.tokens) == "<s> Once upon a time there was</s>"
