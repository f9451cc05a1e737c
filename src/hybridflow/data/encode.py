"""Rows as tokens, with a mask that follows from how they were put together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hybridflow.config import ConfigError
from hybridflow.data.chat import ChatTemplate, mark_turns
from hybridflow.data.messages import BadRow, Message, unpack_messages
from hybridflow.data.settings import DataSettings
from hybridflow.data.sources import Layout
from hybridflow.data.tokenizers import encode_prompts, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Side = Literal["auto", "left", "right"]
"""Where a row that is too long is cut; `auto` is the end of an example and the beginning of a prompt."""


@dataclass(frozen=True)
class Example:
    """A row that is learned. tokens: [row] int32. loss_mask: [row] uint8, 1 counts; 0 at position 0, which nothing predicts."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    bos_id: int | None = None

    def cut(self, max_tokens: int, side: Side) -> Example | BadRow:
        """Without its end, or its beginning."""
        kept = plan_cut(self.tokens, max_tokens, "right" if side == "auto" else side, self.bos_id)
        return _build_example(self.tokens[kept], self.loss_mask[kept], self.bos_id)


@dataclass(frozen=True)
class Prompt:
    """A row that is continued. tokens: [row] int32. text: what they were made from, also where they were cut."""

    tokens: np.ndarray
    text: str
    bos_id: int | None = None

    def cut(self, max_tokens: int, side: Side) -> Prompt:
        """Without its beginning, or its end."""
        kept = plan_cut(self.tokens, max_tokens, "left" if side == "auto" else side, self.bos_id)
        return Prompt(self.tokens[kept], self.text, self.bos_id)


def plan_cut(tokens: np.ndarray, max_tokens: int, side: Literal["left", "right"], bos_id: int | None) -> np.ndarray:
    """Positions that are kept of a row of more than `max_tokens`: its beginning, or its end after its beginning-of-sequence token."""
    if side == "right":
        return np.arange(max_tokens)
    kept = np.arange(len(tokens) - max_tokens, len(tokens))
    if tokens[0] == bos_id:
        kept[0] = 0
    return kept


class ExampleEncoder:
    """Prompt, response and end-of-sequence token, of which the latter two are learned; or a chat, of which the assistant's turns are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: DataSettings, layout: Layout) -> None:
        self._tokenizer, self._settings, self._layout = tokenizer, settings, layout
        self._bos_id: int | None = tokenizer.bos_token_id
        if layout == "text":
            self._eos_id = _find_eos(tokenizer)
        else:
            self._template = ChatTemplate(tokenizer, settings.template_arguments)
            self._turn_end = self._template.find_turn_end()

    def encode(self, rows: Sequence[Row]) -> list[Example | BadRow]:
        """One result a row, in order."""
        return self._encode_texts(rows) if self._layout == "text" else self._encode_chats(rows)

    def _encode_texts(self, rows: Sequence[Row]) -> list[Example | BadRow]:
        prompts = encode_prompts(self._tokenizer, [row[self._settings.prompt_column] for row in rows])
        responses = encode_texts(self._tokenizer, [row[self._settings.response_column] for row in rows])
        # A response that brings its own end gets no second one.
        responses = [ids if ids[-1:] == [self._eos_id] else [*ids, self._eos_id] for ids in responses]
        return [
            _build_example(prompt + response, [0] * len(prompt) + [1] * len(response), self._bos_id)
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def _encode_chats(self, rows: Sequence[Row]) -> list[Example | BadRow]:
        rendered: list[list[str] | BadRow] = []
        for row in rows:
            try:
                rendered.append(self._template.render_turns(self._read_messages(row), self._settings.trained_turns))
            except BadRow as error:
                rendered.append(error)
        ids = iter(
            encode_texts(
                self._tokenizer, [text for texts in rendered if not isinstance(texts, BadRow) for text in texts]
            )
        )
        return [texts if isinstance(texts, BadRow) else self._mark([next(ids) for _ in texts]) for texts in rendered]

    def _mark(self, renders: list[list[int]]) -> Example | BadRow:
        try:
            return _build_example(*mark_turns(renders, self._turn_end), self._bos_id)
        except BadRow as error:
            return error

    def _read_messages(self, row: Row) -> list[Message]:
        if self._layout == "messages":
            return unpack_messages(row[self._settings.messages_column])
        return [
            {"role": "user", "content": row[self._settings.prompt_column]},
            {"role": "assistant", "content": row[self._settings.response_column]},
        ]


class PromptEncoder:
    """A text as it is, or a chat with the words that ask the assistant to go on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: DataSettings, layout: Layout) -> None:
        self._tokenizer, self._settings, self._layout = tokenizer, settings, layout
        self._bos_id: int | None = tokenizer.bos_token_id
        if layout != "text":
            self._template = ChatTemplate(tokenizer, settings.template_arguments)
        elif settings.format == "auto" and tokenizer.chat_template:
            _log.warning(
                "column '%s' of %s is taken as it is, and the tokenizer has a chat template; beside these files, format=chat takes it "
                "and format=text ends this line",
                *(settings.prompt_column, ", ".join(map(str, settings.files))),
            )

    def encode(self, rows: Sequence[Row]) -> list[Prompt | BadRow]:
        """One result a row, in order."""
        if self._layout == "text":
            texts: list[str | BadRow] = [row[self._settings.prompt_column] for row in rows]
        else:
            texts = [self._render(row) for row in rows]
        good = [text for text in texts if not isinstance(text, BadRow)]
        # A template writes its own beginning-of-sequence token, or means that there is none.
        ids = iter((encode_prompts if self._layout == "text" else encode_texts)(self._tokenizer, good))
        return [text if isinstance(text, BadRow) else self._build_prompt(next(ids), text) for text in texts]

    def _render(self, row: Row) -> str | BadRow:
        if self._layout == "messages":
            messages = unpack_messages(row[self._settings.messages_column])
        else:
            messages = [{"role": "user", "content": row[self._settings.prompt_column]}]
        try:
            return self._template.render(messages, add_generation_prompt=True)
        except BadRow as error:
            return error

    def _build_prompt(self, ids: list[int], text: str) -> Prompt | BadRow:
        if not ids:
            return BadRow("its prompt has no token, so there is nothing to go on from")
        return Prompt(np.array(ids, np.int32), text, self._bos_id)


def _build_example(
    tokens: Sequence[int] | np.ndarray, loss_mask: Sequence[int] | np.ndarray, bos_id: int | None
) -> Example | BadRow:
    mask = np.array(loss_mask, np.uint8)
    mask[:1] = 0
    if not mask.any():
        return BadRow("it has no token that is learned")
    return Example(np.array(tokens, np.int32), mask, bos_id)


def _find_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    eos_id: int | None = tokenizer.eos_token_id
    if eos_id is None:
        raise ConfigError(
            "data.format: the tokenizer has no end-of-sequence token, so a model would never learn to stop; give one that has"
        )
    return eos_id
