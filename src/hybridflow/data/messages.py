"""Chats as data: what a list of messages must look like, and how a table keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from hybridflow.config import HybridflowError

Use = Literal["sft", "prompt"]
"""What rows are read for: to be learned whole, or to be continued by a rollout."""

TrainedTurns = Literal["all", "last", "marked"]
"""Which turns of the assistant are learned where a message does not say so itself."""

Message = dict[str, Any]
"""E.g. `{"role": "user", "content": "2+2?"}`."""

MARKS = ("train", "weight")
"""Keys by which a message says itself whether it is learned; no template sees them."""
ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRow(ValueError):
    """One row cannot be used; the message says why in a few words, and the reader adds where the row stands."""


class DataError(HybridflowError, ValueError):
    """A row cannot be used. The message is one sentence: where it stands, what is wrong with it, and the remedy."""


def pack_messages(value: Any, use: Use, trained_turns: TrainedTurns = "all") -> str:
    """A row's messages as JSON text, checked. Raises BadRow.

    A table keeps them as text because Arrow's structs would give each message the keys of all others.
    """
    if not isinstance(value, list) or not value:
        raise BadRow(f"its messages are {_kind(value)}, not a list of messages")
    messages = [_drop_nulls(message) for message in value]
    for index, message in enumerate(messages):
        _check_message(index, message)
    roles = [message["role"] for message in messages]
    if use == "sft":
        choose_turns(messages, trained_turns)
    if use == "prompt" and roles[-1] == "assistant":
        raise BadRow("its last message is the assistant's, so there is nothing to answer; take that message out")
    return json.dumps(messages, ensure_ascii=False)


def unpack_messages(text: str) -> list[Message]:
    """The messages that `pack_messages` packed."""
    messages: list[Message] = json.loads(text)
    return messages


def choose_turns(messages: Sequence[Message], trained_turns: TrainedTurns) -> list[int]:
    """Indices of the messages that are learned. Raises BadRow where there is none.

    A chat's first message never is, whoever wrote it: it answers nothing.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
    if not turns:
        raise BadRow("none of its messages is an answer of the assistant, so there is nothing to learn")
    marks = {turn: _read_mark(messages[turn]) for turn in turns}
    others = [turn for turn in turns if marks[turn] is not False]
    unmarked = {"all": others, "last": others[-1:], "marked": []}[trained_turns]
    chosen = [turn for turn in others if marks[turn] or turn in unmarked]
    if not chosen:
        raise BadRow(
            f"none of its {len(turns)} answers is to be learned, by its messages' train or weight and data.trained_turns={trained_turns}"
        )
    return chosen


def _read_mark(message: Message) -> bool | None:
    return next((bool(message[key]) for key in MARKS if key in message), None)


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict):
        raise BadRow(f"message {index} is {_kind(message)}, not an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role is None:
        keys = ", ".join(sorted(message)) or "none"
        raise BadRow(f"message {index} has no role; its keys are {keys} (chats with from and value must be converted)")
    if role not in ROLES:
        raise BadRow(f"message {index} has the role {role!r}; roles are {', '.join(ROLES)}")
    _check_mark(index, message)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise BadRow(f"message {index} has {_kind(content)} for content, not text")


def _check_mark(index: int, message: Message) -> None:
    marks = {key: message[key] for key in MARKS if key in message}
    for key, value in marks.items():
        if value not in (0, 1):
            raise BadRow(
                f"message {index} has {value!r} for {key}; a turn is learned or not, so write 1 or 0, true or false"
            )
    if len(marks) > 1:
        raise BadRow(f"message {index} has both {' and '.join(marks)}; give one of them")
    if _read_mark(message) and not (index and message["role"] == "assistant"):
        raise BadRow(
            f"message {index} is marked to be learned and is no answer of the assistant; take its {', '.join(marks)} out"
        )


def _drop_nulls(value: Any) -> Any:
    # A Parquet file has null for each key that only other messages have, and templates ask whether a key is there.
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    kind = type(value).__name__
    return {"NoneType": "nothing", "str": "text", "dict": "an object"}.get(kind, kind)
