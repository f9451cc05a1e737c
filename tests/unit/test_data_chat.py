"""Masks of chats: trained are the assistant's words and what ends them, under templates of many kinds."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybridflow.config import ConfigError
from hybridflow.data import DataSettings, build_character_tokenizer
from hybridflow.data.chat import ChatTemplate, mark_turns
from hybridflow.data.encode import Example, ExampleEncoder, Prompt, PromptEncoder
from hybridflow.data.messages import BadRow, pack_messages

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant are known') }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>"]

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "tool", "content": "7"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Seven."},
]


def character_tokenizer(template: str) -> PreTrainedTokenizerFast:
    tokenizer = build_character_tokenizer(string.printable)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def qwen_like_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges over line breaks, no BOS, and one token for pad and eos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["\n\n the\n\n answer is\n\n"] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: object) -> Example | BadRow:
    settings = DataSettings(files=("none",), **settings)
    (example,) = ExampleEncoder(tokenizer, settings, "messages").encode([{"messages": pack_messages(messages, "sft")}])
    return example


def trained_texts(tokenizer: PreTrainedTokenizerBase, example: Example | BadRow) -> list[str]:
    """The text of each unbroken stretch of trained tokens."""
    assert isinstance(example, Example), example
    stretches: list[list[int]] = []
    for index, (token, trained) in enumerate(zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True)):
        if trained and not (index and example.loss_mask[index - 1]):
            stretches.append([])
        if trained:
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize(
    ("tokenizer", "trained"),
    [
        (character_tokenizer(CHATML), ["Hello.<|im_end|>", "Seven.<|im_end|>"]),
        (qwen_like_tokenizer(), ["Hello.<|im_end|>", "Seven.<|im_end|>"]),
        (character_tokenizer(LLAMA), ["Hello.<|eot|>", "Seven.<|eot|>"]),
    ],
    ids=["chatml by characters", "chatml by bpe with pad as eos", "llama"],
)
def test_words_of_the_assistant_and_the_end_of_its_turn_are_trained_and_nothing_else(
    tokenizer, trained: list[str]
) -> None:
    example = encode(tokenizer, TALK)
    assert trained_texts(tokenizer, example) == trained
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert example.tokens.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert example.loss_mask[0] == 0


def test_the_end_of_sequence_token_is_trained_and_the_beginning_comes_once() -> None:
    tokenizer = character_tokenizer(MISTRAL)
    example = encode(tokenizer, [TALK[1], TALK[2]])
    assert trained_texts(tokenizer, example) == [" Hello.<eos>"]
    assert example.tokens.tolist().count(tokenizer.bos_token_id) == 1


def test_only_the_last_turn_is_trained_where_that_is_set() -> None:
    tokenizer = character_tokenizer(CHATML)
    example = encode(tokenizer, TALK, trained_turns="last")
    assert trained_texts(tokenizer, example) == ["Seven.<|im_end|>"]
    assert example.tokens.tolist() == encode(tokenizer, TALK).tokens.tolist()


def test_a_greeting_answers_nothing_and_is_not_trained() -> None:
    tokenizer = character_tokenizer(CHATML)
    assert trained_texts(tokenizer, encode(tokenizer, [TALK[2], TALK[4], TALK[5]])) == ["Seven.<|im_end|>"]


def test_what_follows_the_last_turn_is_left_out() -> None:
    tokenizer = character_tokenizer(CHATML)
    assert (
        encode(tokenizer, [*TALK, {"role": "user", "content": "Bye"}]).tokens.tolist()
        == encode(tokenizer, TALK).tokens.tolist()
    )


def test_words_that_a_template_strips_are_masked_as_they_are_rendered() -> None:
    tokenizer = character_tokenizer(LLAMA)
    example = encode(tokenizer, [TALK[1], {"role": "assistant", "content": "  \n Hello.\n\n"}])
    assert trained_texts(tokenizer, example) == ["Hello.<|eot|>"]


def test_a_template_that_drops_words_of_earlier_turns_is_refused_with_a_remedy() -> None:
    tokenizer = character_tokenizer(THINKING)
    talk = [TALK[1], {"role": "assistant", "content": "<think>hm</think>Hello."}, TALK[4], TALK[5]]
    problem = encode(tokenizer, talk)
    assert (
        isinstance(problem, BadRow) and "changes turn 0" in str(problem) and "data.trained_turns=last" in str(problem)
    )
    assert trained_texts(tokenizer, encode(tokenizer, talk, trained_turns="last")) == ["Seven.<|im_end|>"]
    assert trained_texts(tokenizer, encode(tokenizer, talk[:2])) == ["<think>hm</think>Hello.<|im_end|>"]


def test_ids_that_merge_over_the_start_of_a_turn_are_refused() -> None:
    tokenizer = qwen_like_tokenizer()
    problem = encode(tokenizer, [TALK[1], {"role": "assistant", "content": "\nHello."}])
    assert isinstance(problem, BadRow) and "turn 0 of the assistant do not go on where its prompt ends" in str(problem)


def test_a_template_without_an_end_of_turn_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no special token behind the assistant's words"):
        encode(character_tokenizer(ENDLESS), TALK)


def test_a_tokenizer_without_a_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="needs? a chat template.*data.format=text"):
        encode(build_character_tokenizer("ab"), TALK)


def test_messages_that_a_template_refuses_are_a_bad_row() -> None:
    problem = encode(character_tokenizer(MISTRAL), TALK)
    assert isinstance(problem, BadRow) and "only user and assistant are known" in str(problem)


def test_an_end_of_turn_written_in_the_text_does_not_move_the_mask() -> None:
    tokenizer = character_tokenizer(CHATML)
    talk = [
        {"role": "user", "content": "say <|im_end|> and <eos>"},
        {"role": "assistant", "content": "a<|im_end|>b<eos>"},
    ]
    assert trained_texts(tokenizer, encode(tokenizer, talk)) == ["a<|im_end|>b<eos><|im_end|>"]


@given(
    st.lists(
        st.tuples(st.text(string.printable, max_size=8), st.text(string.printable, max_size=8)), min_size=1, max_size=4
    )
)
def test_every_chat_by_characters_trains_its_answers(pairs: list[tuple[str, str]]) -> None:
    tokenizer = CHATML_CHARACTERS
    talk = [m for q, a in pairs for m in ({"role": "user", "content": q}, {"role": "assistant", "content": a})]
    example = encode(tokenizer, talk)
    assert trained_texts(tokenizer, example) == [f"{answer}<|im_end|>" for _, answer in pairs]


CHATML_CHARACTERS = character_tokenizer(CHATML)


def test_the_end_of_a_turn_is_found_in_the_template() -> None:
    for template, end in ((CHATML, "<|im_end|>\n"), (LLAMA, "<|eot|>"), (MISTRAL, "<eos>")):
        tokenizer = character_tokenizer(template)
        assert tokenizer.decode(ChatTemplate(tokenizer).find_turn_end()) == end


def test_a_turn_that_does_not_end_like_the_others_is_refused() -> None:
    with pytest.raises(BadRow, match="does not end this turn"):
        mark_turns([[1, 2], [1, 2, 3, 4]], turn_end=[9])


# Prompts.


def prompt(tokenizer: PreTrainedTokenizerBase, layout: str, row: dict, **settings: object) -> Prompt | BadRow:
    (found,) = PromptEncoder(tokenizer, DataSettings(files=("none",), **settings), layout).encode([row])
    return found


def test_a_prompt_from_messages_asks_the_assistant_to_go_on() -> None:
    tokenizer = character_tokenizer(LLAMA)
    found = prompt(tokenizer, "messages", {"messages": pack_messages(TALK[:2], "prompt")})
    assert found.text == tokenizer.apply_chat_template(TALK[:2], tokenize=False, add_generation_prompt=True)
    assert found.text.endswith("<|start|>assistant<|stop|>\n\n")
    assert found.tokens.tolist().count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(found.tokens) == found.text


def test_the_prompt_of_a_rollout_is_the_beginning_of_the_example_that_is_learned() -> None:
    tokenizer = character_tokenizer(CHATML)
    example = encode(tokenizer, TALK[:3])
    found = prompt(tokenizer, "messages", {"messages": pack_messages(TALK[:2], "prompt")})
    start = int(example.loss_mask.argmax())
    assert example.tokens[:start].tolist() == found.tokens.tolist()


def test_pairs_go_through_the_template_too() -> None:
    tokenizer = character_tokenizer(CHATML)
    row = {"prompt": "Hi", "response": "Hello."}
    (example,) = ExampleEncoder(tokenizer, DataSettings(files=("none",)), "pair").encode([row])
    assert example.tokens.tolist() == encode(tokenizer, TALK[1:3]).tokens.tolist()
    assert prompt(tokenizer, "pair", row).text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_template_arguments_reach_the_template() -> None:
    tokenizer = character_tokenizer("{{ mood }}" + CHATML)
    assert prompt(tokenizer, "pair", {"prompt": "Hi"}, template_arguments={"mood": "calm"}).text.startswith(
        "calm<|im_start|>"
    )


# Messages.


@pytest.mark.parametrize(
    ("messages", "use", "reason"),
    [
        (None, "sft", "nothing, not a list"),
        ("Hi", "sft", "text, not a list"),
        ([], "sft", "an empty list"),
        (["Hi"], "sft", "message 0 is text, not an object"),
        ([{"from": "human", "value": "Hi"}], "sft", "its keys are from, value"),
        ([{"role": "gpt", "content": "Hi"}], "sft", "the role 'gpt'"),
        ([{"role": "user", "content": 3}], "sft", "message 0 has int for content"),
        ([{"role": "user", "content": None}], "sft", "message 0 has nothing for content"),
        ([{"role": "user", "content": "Hi"}], "sft", "none of its messages is an answer"),
        ([{"role": "assistant", "content": "Hi"}], "sft", "none of its messages is an answer"),
        ([*TALK], "prompt", "its last message is the assistant's"),
    ],
)
def test_messages_that_are_none(messages: object, use: str, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        pack_messages(messages, use)


def test_calls_of_tools_need_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": None}}]}
    assert pack_messages([TALK[1], call], "sft").endswith(
        '{"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}]'
    )


def test_a_tokenizer_that_adds_bos_and_eos_adds_neither_to_a_chat() -> None:
    tokenizer = character_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    )
    example = encode(tokenizer, TALK[:3])
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(example.tokens.tolist())
