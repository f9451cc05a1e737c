"""Which rows are read, and how they become tokens."""

from __future__ import annotations

from typing import Any, Literal

from hybridflow.config import Field, settings


@settings
class DataSettings:
    """Rows from files, e.g. `DataSettings(files=("gsm8k/*.jsonl",), prompt_column="question", response_column="answer")`."""

    files: tuple[str, ...] = Field(min_length=1)
    """Paths or globs of .jsonl, .ndjson, .json (lines, or one list) and .parquet files; JSON also with .gz behind."""
    format: Literal["auto", "text", "chat"] = "auto"
    """`text` takes prompt and response as they are; `chat` puts messages, or else prompt and response, through the tokenizer's chat
    template; `auto` is `chat` where there is a column of messages."""
    prompt_column: str = "prompt"
    """Column with the text that is continued, or the user's message."""
    response_column: str = "response"
    """Column with the text that is learned."""
    messages_column: str = "messages"
    """Column with a list of messages, each with `role` and `content`."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Columns to call differently from the start, old name to new."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further values for the chat template, e.g. `{enable_thinking: false}`."""
    trained_turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns in a chat are learned."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest row, prompt and response together, or longest prompt of a rollout; null sets no limit."""
    on_long_row: Literal["drop", "truncate", "error"] = "drop"
    """Beyond `max_tokens`: leave the row out, cut the end of a row that is learned or the beginning of a prompt, or stop. Counted."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read: stop, naming file and line, or leave it out and count it."""
    shuffle: bool = True
    """A new order in each epoch, from the run's seed; false keeps that of the files."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows, after which there are no more; null never ends."""
