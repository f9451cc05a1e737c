"""Eleven ways in which real tokenizers and chat templates behave, and which tokens of a row are learned under each, written out by hand.

Each tokenizer is a fast one of a few pieces, made like the real one in what matters: where BOS, EOS and pad come from, what a blank
becomes, what ends a turn. In the rows below `+` stands before each token that is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybridflow.data import DataSettings, chat_stop_ids
from hybridflow.data.encode import Example, ExampleEncoder, Prompt, PromptEncoder
from hybridflow.data.messages import BadRow, pack_messages

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "So"},
    {"role": "assistant", "content": "No"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IM = ("<|im_start|>", "<|im_end|>")


def finish(
    tokenizer: Tokenizer, special: Sequence[str], template: str | None, adds: str = "$A", **roles: str
) -> PreTrainedTokenizerFast:
    """adds: what the tokenizer puts around a text by itself, such as `<s> $A`."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    added = [(token, tokenizer.token_to_id(token)) for token in special if token in adds.split()]
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **roles
    )


def byte_level(special: Sequence[str], template: str | None, adds: str = "$A", **roles: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it; a line break is `Ċ`, a blank `Ġ`."""
    words = ["Yes", "No", "Hi", "So", "user", "assistant", "system", "Be", "ĠYes", "ĠNo", "ĠHi"]
    vocabulary = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in words:
        # A blank joins a whole word; a word grows letter by letter.
        for end in (len(word),) if word[0] == "Ġ" else range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[0], word[1:]) if word[0] == "Ġ" else (word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finish(tokenizer, special, template, adds, **roles)


def pieces(words: Sequence[str], special: Sequence[str], template: str | None, adds: str = "$A", **roles: str) -> Any:
    """A unigram model that puts a blank before a text and writes it `▁`, as SentencePiece does for Llama 2."""
    vocabulary = [("<unk>", 0.0), *((word, -1.0) for word in words), ("▁", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    return finish(tokenizer, special, template, adds, unk_token="<unk>", **roles)


def words(known: Sequence[str], special: Sequence[str], template: str | None, adds: str = "$A", **roles: str) -> Any:
    """One token a word or line break; blanks are tokens too."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["<unk>", *known])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return finish(tokenizer, special, template, adds, unk_token="<unk>", **roles)


def learn(tokenizer: PreTrainedTokenizerFast, row: list[dict] | tuple[str, str], **settings: Any) -> Example | BadRow:
    """The row as an example: a chat, or prompt and response as they are."""
    chosen = DataSettings(files=("none",), **settings)
    if isinstance(row, tuple):
        (found,) = ExampleEncoder(tokenizer, chosen, "text").encode([{"prompt": row[0], "response": row[1]}])
    else:
        packed = {"messages": pack_messages(row, "sft", chosen.trained_turns)}
        (found,) = ExampleEncoder(tokenizer, chosen, "messages").encode([packed])
    return found


def show(tokenizer: PreTrainedTokenizerFast, found: Example | BadRow) -> str:
    """The tokens with `+` before those that are learned, and a line break as `Ċ`."""
    assert isinstance(found, Example), found
    tokens = tokenizer.convert_ids_to_tokens(found.tokens.tolist())
    marks = ["+" if kept else "" for kept in found.loss_mask.tolist()]
    return " ".join(mark + token for mark, token in zip(marks, tokens, strict=True)).replace("\n", "Ċ")


def ask(tokenizer: PreTrainedTokenizerFast, row: list[dict] | str) -> str:
    """The tokens of the row as the prompt of a rollout."""
    layout, key = ("text", "prompt") if isinstance(row, str) else ("messages", "messages")
    packed = row if isinstance(row, str) else pack_messages(row, "prompt")
    (found,) = PromptEncoder(tokenizer, DataSettings(files=("none",)), layout).encode([{key: packed}])
    assert isinstance(found, Prompt), found
    return " ".join(tokenizer.convert_ids_to_tokens(found.tokens.tolist())).replace("\n", "Ċ")


def check_beginning(tokenizer: PreTrainedTokenizerFast) -> None:
    """A rollout is asked with the very tokens that the answer to it is learned behind."""
    assert ask(tokenizer, TALK[:1]) == show(tokenizer, learn(tokenizer, TALK[:2])).partition(" +")[0]


def stops(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """What a rollout of chats stops on, beside the model's own end."""
    return tokenizer.convert_ids_to_tokens(chat_stop_ids(tokenizer, DataSettings(files=("none",))))


def test_gpt2_has_one_token_for_bos_eos_pad_and_unknown() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}Hi {{ m.content }}\n"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = byte_level(
        ["<|end|>"], template, **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|end|>")
    )
    assert show(tokenizer, learn(tokenizer, ("Hi", "Yes No"))) == "Hi +Yes +ĠNo +<|end|>"
    # The row's own end is learned, whatever ends stand before it; those of a prompt are not.
    assert show(tokenizer, learn(tokenizer, ("Hi<|end|>", "Yes<|end|>No"))) == "Hi <|end|> +Yes +<|end|> +No +<|end|>"
    assert show(tokenizer, learn(tokenizer, TALK)) == "Hi ĠHi Ċ +Yes +<|end|> Hi Ġ So Ċ +No +<|end|>"
    assert ask(tokenizer, "Hi") == "Hi" and stops(tokenizer) == ["<|end|>"]
    check_beginning(tokenizer)


def test_llama2_puts_a_blank_before_a_text_and_a_bos_that_the_template_has_too() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
        "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
    )
    known = ["▁Hi", "▁Yes", "▁So", "▁No", "[INST]", "▁[INST]", "▁[/INST]"]
    tokenizer = pieces(known, ["<s>", "</s>"], template, "<s> $A", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    assert tokenizer.convert_ids_to_tokens(tokenizer("Hi")["input_ids"]) == ["<s>", "▁Hi"]
    assert show(tokenizer, learn(tokenizer, ("Hi", "Yes"))) == "<s> ▁Hi +▁Yes +</s>"
    # The template gives each exchange a BOS of its own, and the tokenizer adds none; the blank before the end is the model's to write.
    assert show(tokenizer, learn(tokenizer, TALK)) == (
        "<s> [INST] ▁Hi ▁[/INST] +▁Yes +▁ +</s> <s> [INST] ▁So ▁[/INST] +▁No +▁ +</s>"
    )
    check_beginning(tokenizer)


def test_llama3_adds_a_bos_by_its_post_processor_and_another_by_its_template() -> None:
    template = (
        "{% for m in messages %}{% set text = '<|start|>' + m.role + '<|stop|>\n\n' + m.content | trim + '<|eot|>' %}"
        "{{ bos_token + text if loop.first else text }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
    )
    special = ["<|begin|>", "<|end|>", "<|start|>", "<|stop|>", "<|eot|>"]
    tokenizer = byte_level(special, template, "<|begin|> $A", bos_token="<|begin|>", eos_token="<|end|>")
    whole = tokenizer(tokenizer.apply_chat_template(TALK, tokenize=False))["input_ids"]
    assert tokenizer.convert_ids_to_tokens(whole)[:3] == ["<|begin|>", "<|begin|>", "<|start|>"]
    assert show(tokenizer, learn(tokenizer, TALK)) == (
        "<|begin|> <|start|> user <|stop|> Ċ Ċ Hi <|eot|> <|start|> assistant <|stop|> Ċ Ċ +Yes +<|eot|> "
        "<|start|> user <|stop|> Ċ Ċ So <|eot|> <|start|> assistant <|stop|> Ċ Ċ +No +<|eot|>"
    )
    for prompt in ("Hi", "<|begin|>Hi"):
        assert show(tokenizer, learn(tokenizer, (prompt, "Yes"))) == "<|begin|> Hi +Yes +<|end|>"
        assert ask(tokenizer, prompt) == "<|begin|> Hi"
    assert stops(tokenizer) == ["<|eot|>"]
    check_beginning(tokenizer)


def test_qwen_has_no_bos_and_ends_a_turn_with_another_token_than_a_text() -> None:
    tokenizer = byte_level(["<|end|>", *IM], CHATML, eos_token="<|end|>", pad_token="<|end|>")
    assert tokenizer.bos_token is None
    assert show(tokenizer, learn(tokenizer, TALK)) == (
        "<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> assistant Ċ +Yes +<|im_end|> Ċ "
        "<|im_start|> user Ċ So <|im_end|> Ċ <|im_start|> assistant Ċ +No +<|im_end|> Ċ"
    )
    assert show(tokenizer, learn(tokenizer, ("Hi", "Yes"))) == "Hi +Yes +<|end|>" and ask(tokenizer, "Hi") == "Hi"
    assert stops(tokenizer) == ["<|im_end|>"]
    check_beginning(tokenizer)


def test_bytes_of_one_character_are_learned_one_by_one() -> None:
    tokenizer = byte_level(["<|end|>", *IM], CHATML, eos_token="<|end|>")
    found = learn(tokenizer, [{"role": "user", "content": "é"}, {"role": "assistant", "content": "é😀"}])
    assert show(tokenizer, found) == (
        "<|im_start|> user Ċ Ã © <|im_end|> Ċ <|im_start|> assistant Ċ +Ã +© +ð +Ł +ĺ +Ģ +<|im_end|> Ċ"
    )
    assert tokenizer.decode(found.tokens[10:16]) == "é😀"
    # A cut counts tokens: a part of a character may be left.
    assert show(tokenizer, found.cut(13, "right")).endswith(" assistant Ċ +Ã +© +ð")
    assert show(tokenizer, found.cut(5, "left")) == "Ł +ĺ +Ģ +<|im_end|> Ċ"
    assert show(tokenizer, learn(tokenizer, ("é", "é"))) == "Ã © +Ã +© +<|end|>"


def test_smollm_puts_a_system_prompt_where_there_is_none() -> None:
    template = (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = byte_level(["<|end|>", *IM], template, bos_token=IM[0], eos_token=IM[1], pad_token=IM[1])
    one = (
        "<|im_start|> system Ċ Be <|im_end|> Ċ <|im_start|> user Ċ Hi <|im_end|> Ċ "
        "<|im_start|> assistant Ċ +Yes +<|im_end|> Ċ"
    )
    assert show(tokenizer, learn(tokenizer, TALK[:2])) == one
    assert show(tokenizer, learn(tokenizer, [{"role": "system", "content": "Be"}, *TALK[:2]])) == one
    rest = " <|im_start|> user Ċ So <|im_end|> Ċ <|im_start|> assistant Ċ +No +<|im_end|> Ċ"
    assert show(tokenizer, learn(tokenizer, TALK)) == one + rest
    assert show(tokenizer, learn(tokenizer, TALK, trained_turns="last")) == one.replace("+", "") + rest
    check_beginning(tokenizer)


def test_gemma_calls_the_assistant_model_and_knows_no_system() -> None:
    template = (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}"
    )
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    known = ["user", "model", "Hi", "Yes", "So", "No", "\n"]
    tokenizer = words(known, [*roles.values(), "<turn>", "<end>"], template, "<bos> $A", **roles)
    assert show(tokenizer, learn(tokenizer, TALK)) == (
        "<bos> <turn> user Ċ Hi <end> Ċ <turn> model Ċ +Yes +<end> Ċ <turn> user Ċ So <end> Ċ <turn> model Ċ +No +<end> Ċ"
    )
    refused = learn(tokenizer, [{"role": "system", "content": "Be"}, *TALK])
    assert isinstance(refused, BadRow)
    assert str(refused) == "the chat template refuses its messages (System role not supported)"
    assert stops(tokenizer) == ["<end>"]
    check_beginning(tokenizer)


def test_templates_that_strip_blanks_of_a_message_or_of_the_whole_text() -> None:
    by_message = (
        "{% for m in messages %}<{{ m.role[0] }}>\n{{ m.content.strip() }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<a>\n{% endif %}"
    )
    known, special = ["Hi", "Yes", "So", "No", "\n", " "], ["<eos>", "<a>", "<u>", "<end>"]
    tokenizer = words(known, special, by_message, eos_token="<eos>")
    blank = [TALK[0] | {"content": "  Hi\n"}, TALK[1] | {"content": "\n Yes  \n"}]
    assert show(tokenizer, learn(tokenizer, blank)) == "<u> Ċ Hi <end> Ċ <a> Ċ +Yes +<end> Ċ"
    check_beginning(tokenizer)
    # Here the line break behind <a> is no part of what the model is asked with, and so it is what the model begins with.
    whole = "{% set text %}" + by_message + "{% endset %}{{ text.strip() }}"
    tokenizer = words(known, special, whole, eos_token="<eos>")
    assert ask(tokenizer, TALK[:1]) == "<u> Ċ Hi <end> Ċ <a>"
    assert (
        show(tokenizer, learn(tokenizer, TALK))
        == "<u> Ċ Hi <end> Ċ <a> +Ċ +Yes +<end> Ċ <u> Ċ So <end> Ċ <a> +Ċ +No +<end>"
    )
    check_beginning(tokenizer)


def test_a_tokenizer_without_pad_needs_none() -> None:
    template = (
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    tokenizer = words(["Hi", "Yes", "So", "No"], ["<eos>", "<u>", "<a>"], template, eos_token="<eos>")
    assert tokenizer.pad_token is None
    rows = [{"prompt": "Hi", "response": "Yes"}, {"prompt": "Hi So", "response": "No"}]
    found = ExampleEncoder(tokenizer, DataSettings(files=("none",)), "text").encode(rows)
    assert [show(tokenizer, example) for example in found] == ["Hi +Yes +<eos>", "Hi <unk> So +No +<eos>"]
    assert show(tokenizer, learn(tokenizer, TALK)) == "<u> Hi <a> +Yes +<eos> <u> So <a> +No +<eos>"
    check_beginning(tokenizer)


def test_a_tokenizer_that_adds_eos_by_its_post_processor_adds_it_neither_to_a_prompt_nor_twice() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    known = ["▁Hi", "▁Yes", "Yes", "So", "No"]
    tokenizer = pieces(known, ["<pad>", "</s>"], template, "$A </s>", eos_token="</s>", pad_token="<pad>")
    assert tokenizer.convert_ids_to_tokens(tokenizer("Hi")["input_ids"]) == ["▁Hi", "</s>"]
    for response in ("Yes", "Yes</s>"):
        assert show(tokenizer, learn(tokenizer, ("Hi", response))) == "▁Hi +▁Yes +</s>"
    assert show(tokenizer, learn(tokenizer, TALK)) == "▁Hi </s> +Yes +</s> So </s> +No +</s>"
    assert ask(tokenizer, "Hi") == "▁Hi" and ask(tokenizer, TALK[:1]) == "▁Hi </s>"
    check_beginning(tokenizer)


def test_a_template_that_drops_the_thinking_of_earlier_turns_is_refused_or_learns_the_last() -> None:
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
    )
    tokenizer = byte_level(["<|end|>", *IM, "<think>", "</think>"], template, eos_token="<|end|>")
    think = [TALK[0], {"role": "assistant", "content": "<think>So</think>Yes"}, *TALK[2:]]
    refused = learn(tokenizer, think)
    assert isinstance(refused, BadRow) and str(refused) == (
        "the chat template changes turn 0 of the assistant once more messages follow, so its tokens cannot be told; set "
        "data.trained_turns=last, mark that turn `train: false`, or use a template that leaves earlier turns as they were"
    )
    last = (
        "<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> assistant Ċ Yes <|im_end|> Ċ "
        "<|im_start|> user Ċ So <|im_end|> Ċ <|im_start|> assistant Ċ +No +<|im_end|> Ċ"
    )
    assert show(tokenizer, learn(tokenizer, think, trained_turns="last")) == last
    assert show(tokenizer, learn(tokenizer, [think[0], think[1] | {"train": False}, *think[2:]])) == last
    assert show(tokenizer, learn(tokenizer, think[:2])) == (
        "<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> assistant Ċ +<think> +So +</think> +Yes +<|im_end|> Ċ"
    )
    check_beginning(tokenizer)


# Marks of templates and of messages.


@pytest.mark.parametrize("takes_in", ["", "<|im_end|>", "<|im_end|>\n"])
def test_marks_of_a_template_for_what_is_generated_change_nothing(takes_in: str) -> None:
    end = "<|im_end|>\n".removeprefix(takes_in)
    marked_words = f"{{% generation %}}{{{{ m.content }}}}{takes_in}{{% endgeneration %}}{{{{ {end!r} }}}}"
    template = CHATML.replace(
        "{{ m.content }}<|im_end|>\n",
        "{% if m.role == 'assistant' %}" + marked_words + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
    )
    plain, marked = (byte_level(["<|end|>", *IM], text, eos_token="<|end|>") for text in (CHATML, template))
    assert show(marked, learn(marked, TALK)) == show(plain, learn(plain, TALK))
    assert show(marked, learn(marked, TALK)).endswith("+No +<|im_end|> Ċ")
    check_beginning(marked)


THREE = [*TALK, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]


@pytest.mark.parametrize(
    ("marks", "trained_turns", "learned"),
    [
        ([{}, {}, {}], "all", ["Yes", "No", "So"]),
        ([{}, {}, {}], "last", ["So"]),
        ([{"train": False}, {}, {}], "all", ["No", "So"]),
        ([{}, {}, {"weight": 0}], "all", ["Yes", "No"]),
        ([{}, {}, {"weight": 0.0}], "last", ["No"]),
        ([{"weight": 1}, {}, {}], "last", ["Yes", "So"]),
        ([{"train": True}, {"train": False}, {}], "marked", ["Yes"]),
        ([{}, {"train": None, "weight": 1.0}, {}], "marked", ["No"]),
    ],
)
def test_a_message_says_itself_whether_it_is_learned(marks: list[dict], trained_turns: str, learned: list[str]) -> None:
    # The template shows every key that it is given.
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if 'train' in m or 'weight' in m %}!{% endif %}")
    tokenizer = byte_level(["<|end|>", *IM], template, eos_token="<|end|>")
    talk = [message | (marks[index // 2] if index % 2 else {"train": False}) for index, message in enumerate(THREE)]
    shown = show(tokenizer, learn(tokenizer, talk, trained_turns=trained_turns)).split()
    assert [token for token in shown if "+" in token] == [
        part for word in learned for part in (f"+{word}", "+<|im_end|>")
    ]
    assert shown[-3:] == [f"+{learned[-1]}", "+<|im_end|>", "Ċ"] and "!" not in shown


@pytest.mark.parametrize(
    ("index", "mark", "trained_turns", "reason"),
    [
        (
            1,
            {"weight": 0.5},
            "all",
            "message 1 has 0.5 for weight; a turn is learned or not, so write 1 or 0, true or false",
        ),
        (1, {"train": "yes"}, "all", "message 1 has 'yes' for train; a turn"),
        (1, {"train": True, "weight": 1}, "all", "message 1 has both train and weight; give one of them"),
        (
            2,
            {"train": True},
            "all",
            "message 2 is marked to be learned and is no answer of the assistant; take its train out",
        ),
        (1, {"train": False}, "last", r"none of its 1 answers is to be learned, .* data.trained_turns=last"),
        (0, {}, "marked", r"none of its 1 answers is to be learned, .* data.trained_turns=marked"),
    ],
)
def test_marks_that_cannot_be(index: int, mark: dict, trained_turns: str, reason: str) -> None:
    talk = [message | (mark if place == index else {}) for place, message in enumerate(TALK[:3])]
    with pytest.raises(BadRow, match=f"^{reason}"):
        pack_messages(talk, "sft", trained_turns)


def test_a_greeting_cannot_be_marked() -> None:
    with pytest.raises(BadRow, match="message 0 is marked to be learned and is no answer"):
        pack_messages([TALK[1] | {"weight": 1}, *TALK[2:]], "sft")
