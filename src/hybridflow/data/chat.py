"""The tokenizer's chat template: chats as text, and which of their tokens the assistant wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hybridflow.config import ConfigError
from hybridflow.data.messages import MARKS, BadRow, Message, TrainedTurns, choose_turns
from hybridflow.data.settings import DataSettings
from hybridflow.data.tokenizers import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION: Message = {"role": "user", "content": "Hi"}
_ANSWERS: tuple[Message, ...] = ({"role": "assistant", "content": "Yes"}, {"role": "assistant", "content": "No"})


class ChatTemplate:
    """Renders chats, and tells the assistant's tokens by comparing the ids of a chat before and after a turn; it never searches a text, and
    reads no `{% generation %}` of a template, which may leave out what ends a turn.

    What ends a turn is learned from the template: the first special token that stands behind either of two answers to one question. That
    token counts, and what the template puts behind it (a line break in ChatML) does not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "data.format: chats need a chat template and the tokenizer has none; "
                "use the tokenizer of a chat model, or set data.format=text"
            )
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The chat as text. Raises BadRow if the template refuses it."""
        shown = [{key: value for key, value in message.items() if key not in MARKS} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                shown, tokenize=False, add_generation_prompt=add_generation_prompt, **self._arguments
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise BadRow(f"the chat template refuses its messages ({' '.join(str(error).split())})") from error
        return str(text)

    def render_turns(self, messages: Sequence[Message], trained_turns: TrainedTurns) -> list[str]:
        """Two texts for each turn that is learned: the chat before it with the generation prompt, and the chat with it. Raises BadRow."""
        texts: list[str] = []
        for turn in choose_turns(messages, trained_turns):
            texts.append(self.render(messages[:turn], add_generation_prompt=True))
            texts.append(self.render(messages[: turn + 1], add_generation_prompt=False))
        return texts

    def find_turn_end(self) -> list[int]:
        """The ids from the one that ends a turn to the end of the chat, e.g. those of `<|im_end|>` and a line break. Raises ConfigError."""
        try:
            texts = [self.render([_QUESTION, answer], add_generation_prompt=False) for answer in _ANSWERS]
        except BadRow as error:
            raise ConfigError(
                f"data.format: {error}, though they are a question and an answer; use another chat template"
            ) from error
        one, other = encode_texts(self._tokenizer, texts)
        length = next((n for n, (a, b) in enumerate(zip(reversed(one), reversed(other), strict=False)) if a != b), 0)
        suffix = one[len(one) - length :]
        tokenizer = self._tokenizer
        # One token may be all of them, as in GPT-2.
        never = {tokenizer.unk_token_id, tokenizer.bos_token_id} - {tokenizer.eos_token_id}
        ends = set(tokenizer.added_tokens_decoder) - never
        start = next((index for index, token in enumerate(suffix) if token in ends), None)
        if start is None:
            raise ConfigError(
                "data.format: the chat template puts no special token behind the assistant's words, so a model would never learn to stop; "
                "use a template that ends a turn with one"
            )
        return suffix[start:]


def chat_stop_ids(tokenizer: PreTrainedTokenizerBase, settings: DataSettings | None) -> tuple[int, ...]:
    """The id that ends the assistant's turn, for `SamplingParams.stop_token_ids`: not always one of the model's own end ids.

    Empty for `format: text`, and for a tokenizer without a chat template.
    """
    if settings is None or settings.format == "text" or not tokenizer.chat_template:
        return ()
    return tuple(ChatTemplate(tokenizer, settings.template_arguments).find_turn_end()[:1])


def mark_turns(renders: Sequence[list[int]], turn_end: list[int]) -> tuple[list[int], list[int]]:
    """Ids of a chat up to the end of its last learned turn, and its loss mask: 1 from where a turn starts to the token that ends it.

    renders: ids of the texts of `ChatTemplate.render_turns`. turn_end: see `find_turn_end`. Each render must begin with the one before it;
    else the tokens of a turn would not be those that a model is asked for and answers with. Raises BadRow.
    """
    for index, (shorter, longer) in enumerate(pairwise(renders)):
        if longer[: len(shorter)] != shorter:
            raise BadRow(_explain_break(index))
    mask = [0] * len(renders[-1])
    for before, after in zip(renders[::2], renders[1::2], strict=True):
        start, stop = len(before), len(after) - len(turn_end)
        if after[stop:] != turn_end or stop < start:
            raise BadRow(
                "the chat template does not end this turn of the assistant as it ends others; "
                "set data.trained_turns=last, or use another template"
            )
        mask[start : stop + 1] = [1] * (stop + 1 - start)
    return renders[-1], mask


def _explain_break(index: int) -> str:
    if index % 2:
        return (
            f"the chat template changes turn {index // 2} of the assistant once more messages follow, so its tokens cannot be told; "
            "set data.trained_turns=last, mark that turn `train: false`, or use a template that leaves earlier turns as they were"
        )
    return (
        f"the ids of turn {index // 2} of the assistant do not go on where its prompt ends, so its tokens cannot be told; "
        "let the words begin without blanks or line breaks, or use a template whose generation prompt is how a turn begins"
    )
