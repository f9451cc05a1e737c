"""Which rows are read, and how they become tokens."""

from __future__ import annotations

from typing import Any, Literal

from hybridflow.config import Field, settings
from hybridflow.data.messages import TrainedTurns


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
    trained_turns: TrainedTurns = "all"
    """Which of the assistant's turns in a chat are learned: all, the last, or those alone that are marked. A message's own mark, `train:
    true | false` or `weight: 1 | 0`, comes before this."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest row, prompt and response together, or longest prompt of a rollout; null sets no limit."""
    on_long_row: Literal["drop", "truncate", "error"] = "drop"
    """Beyond `max_tokens`: leave the row out, cut it at `truncation_side`, or stop. Counted."""
    truncation_side: Literal["auto", "left", "right"] = "auto"
    """Where a row is cut: `left` takes its beginning, but for a beginning-of-sequence token, `right` its end; `auto` is `right` for a row
    that is learned and `left` for a prompt."""
    min_tokens: int | None = Field(default=None, ge=1)
    """Shortest row, or prompt of a rollout; shorter ones are left out and counted. Null sets no limit."""
    keep_where: dict[str, Any] = Field(default_factory=dict)
    """Keeps the rows whose columns have these values, e.g. `{split: train, level: [4, 5]}`; a list takes any of its values. Counted."""
    keep_function: str | None = None
    """Keeps the rows that a function gives true for: `pkg.mod:fn` or `path/to/file.py:fn`, called with the columns that its parameters
    name, before the run starts. Counted."""
    deduplicate_by: tuple[str, ...] = ()
    """Keeps the first of the rows that are equal in all of these columns, e.g. `[prompt]`; empty keeps all. Counted."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read: stop, naming file and line, or leave it out and count it."""
    shuffle: bool = True
    """A new order in each epoch, from the run's seed; false keeps that of the files."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows, after which there are no more; null never ends."""
