"""Chats as data: what a list of messages must look like, and how a table keeps it."""

from __future__ import annotations

import json
from typing import Any, Literal

Use = Literal["sft", "prompt"]
"""What rows are read for: to be learned whole, or to be continued by a rollout."""

Message = dict[str, Any]
"""E.g. `{"role": "user", "content": "2+2?"}`."""

ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRow(ValueError):
    """One row cannot be used; the message says why in a few words, and the reader adds where the row stands."""


def pack_messages(value: Any, use: Use) -> str:
    """A row's messages as JSON text, checked. Raises BadRow.

    A table keeps them as text because Arrow's structs would give each message the keys of all others.
    """
    if not isinstance(value, list) or not value:
        raise BadRow(f"its messages are {_kind(value)}, not a list of messages")
    messages = [_drop_nulls(message) for message in value]
    for index, message in enumerate(messages):
        _check_message(index, message)
    roles = [message["role"] for message in messages]
    if use == "sft" and "assistant" not in roles[1:]:
        raise BadRow("none of its messages is an answer of the assistant, so there is nothing to learn")
    if use == "prompt" and roles[-1] == "assistant":
        raise BadRow("its last message is the assistant's, so there is nothing to answer; take that message out")
    return json.dumps(messages, ensure_ascii=False)


def unpack_messages(text: str) -> list[Message]:
    """The messages that `pack_messages` packed."""
    messages: list[Message] = json.loads(text)
    return messages


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict):
        raise BadRow(f"message {index} is {_kind(message)}, not an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role is None:
        keys = ", ".join(sorted(message)) or "none"
        raise BadRow(f"message {index} has no role; its keys are {keys} (chats with from and value must be converted)")
    if role not in ROLES:
        raise BadRow(f"message {index} has the role {role!r}; roles are {', '.join(ROLES)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise BadRow(f"message {index} has {_kind(content)} for content, not text")


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
