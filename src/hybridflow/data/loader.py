"""What a run takes its rows from: examples to learn, and prompts to continue."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import pyarrow as pa

from hybridflow.batch import Batch
from hybridflow.columns import COLUMN_TYPES
from hybridflow.config import ConfigError
from hybridflow.data.encode import Example, ExampleEncoder, Prompt, PromptEncoder
from hybridflow.data.settings import DataSettings
from hybridflow.data.sources import Rows, read_rows
from hybridflow.data.stream import Item, RowStream
from hybridflow.data.tokenizers import encode_prompts
from hybridflow.types import Metrics, RowState, last

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


class _Source(Generic[Item]):
    """Rows in a new order each epoch, and the place that has been reached in them."""

    def __init__(self, stream: RowStream[Item], settings: DataSettings) -> None:
        self._stream: RowStream[Item] = stream
        self._settings = settings

    @property
    def epoch(self) -> int:
        """Whole passes over the rows so far."""
        return self._stream.order.epoch

    @property
    def exhausted(self) -> bool:
        """Whether the last of `epochs` passes is done, so that `take` gives no more."""
        return self._stream.order.epoch == self._stream.order.epochs

    @property
    def num_rows(self) -> int:
        """Rows of the data, also those that cannot be used."""
        return self._stream.rows.num_rows

    def metrics(self) -> Metrics:
        """Where the run is in its data, and which rows it could not use: those of the files once, the others each time they came."""
        order = self._stream.order
        read: dict[str, int] = self._stream.rows.left_out
        seen: dict[str, int] = self._stream.counts
        counts = {kind: read.get(kind, 0) + seen.get(kind, 0) for kind in (*seen, *read)}
        return {
            "data/epoch": last(order.epoch + order.position / self.num_rows),
            **{f"data/rows_{kind}": last(count) for kind, count in counts.items()},
        }

    def describe(self) -> str:
        """How many rows there are, and what becomes of those that are too long or short, e.g. `7473 rows; over 512 tokens: drop`."""
        settings = self._settings
        limits: list[str] = [
            f"over {settings.max_tokens} tokens: {settings.on_long_row}" if settings.max_tokens is not None else "",
            f"under {settings.min_tokens}: drop" if settings.min_tokens is not None else "",
        ]
        return "; ".join([self._stream.rows.describe(), *filter(None, limits)])

    def tell_counts(self) -> str:
        """See `RowStream.tell_counts`."""
        return self._stream.tell_counts()

    def state(self) -> dict[str, Any]:
        """The place in the data, as JSON values."""
        return self._stream.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a place. Raises ConfigError if the data has changed since."""
        self._stream.load_state(state)


class SFTLoader(_Source[Example]):
    """Examples in batches of any size, in a new order each epoch; `epoch` counts the passes that are done.

    A batch: `tokens`, `loss_mask` (1 for what is learned, the end-of-sequence or end-of-turn token with it), `group_id` (examples given
    before it, so it never repeats in a run), `state`.
    """

    def __init__(self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> None:
        rows = read_rows(settings, "sft")
        super().__init__(RowStream(rows, ExampleEncoder(tokenizer, settings, rows.layout), settings, seed), settings)

    def take(self, num_rows: int) -> Batch:
        """The next examples; with `epochs` set, fewer at the end of the last one and then none."""
        first = self._stream.num_taken
        _, examples = self._stream.take(num_rows)
        return Batch.from_columns(
            tokens=[example.tokens for example in examples],
            loss_mask=[example.loss_mask for example in examples],
            group_id=np.arange(first, first + len(examples)),
            state=np.full(len(examples), RowState.OK, np.int8),
        )


class PromptPool(_Source[Prompt]):
    """Prompts in batches of any size, in a new order each epoch; `epoch` counts the passes that are done.

    A batch: `prompt_id` (number of the data row), `group_id` (prompts given before it, so it never repeats in a run), `prompt_tokens`,
    `prompt` (their text) and the data's own columns.
    """

    def __init__(self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> None:
        rows = read_rows(settings, "prompt")
        self._kept = _choose_kept(rows)
        super().__init__(RowStream(rows, PromptEncoder(tokenizer, settings, rows.layout), settings, seed), settings)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The data's own columns, which go along with a prompt to its samples and their reward."""
        return tuple(self._kept)

    def list_values(self, column: str | None) -> list[str]:
        """What the rows have in this one of the data's own columns, as text, each value once; nothing where there is no such column."""
        values = self._stream.rows.table.column(column).to_pylist() if column in self._kept else []
        return list(dict.fromkeys(map(str, values)))

    def take(self, num_prompts: int) -> Batch:
        """The next prompts; with `epochs` set, fewer at the end of the last one and then none."""
        first = self._stream.num_taken
        numbers, prompts = self._stream.take(num_prompts)
        own = self._stream.rows.take(numbers, self._kept) if self._kept else pa.table({})
        return Batch.from_columns(
            prompt_id=np.array(numbers, np.int64),
            group_id=np.arange(first, first + len(prompts)),
            prompt=[prompt.text for prompt in prompts],
            prompt_tokens=[prompt.tokens for prompt in prompts],
            **{name: own.column(name) for name in self._kept},
        )


def read_prompts(
    settings: DataSettings | None, tokenizer: PreTrainedTokenizerBase, *, texts: Sequence[str] = (), max_rows: int = 0
) -> Batch:
    """Every prompt once: `texts` as they are, and then the rows of the files in their order.

    max_rows: stops after this many rows of the files; 0 reads all. The data's own columns are null for `texts`.
    """
    given = _encode_given(texts, tokenizer)
    if settings is None:
        return given
    if settings.epochs is not None:
        raise ConfigError(
            f"data.epochs: {settings.epochs} would not be read, since prompts are taken once here; leave it out (null)"
        )
    pool = PromptPool(replace(settings, shuffle=False, epochs=1), tokenizer)
    rows = pool.take(max_rows or pool.num_rows)
    if told := pool.tell_counts():
        _log.warning("data: of the prompts of %s, %s; %d are left", ", ".join(settings.files), told, rows.num_rows)
    for name in pool.column_names:
        given = given.with_column(name, pa.nulls(len(texts), rows.schema.field(name).type))
    whole = Batch.concat([given, rows]) if texts else rows
    return whole.with_column("group_id", np.arange(whole.num_rows))


def _encode_given(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Batch:
    tokens = encode_prompts(tokenizer, texts)
    empty = [index for index, ids in enumerate(tokens) if not ids]
    if empty:
        raise ConfigError(
            f"prompts: number {empty[0]} has no token, so there is nothing to go on from; write something in it"
        )
    numbers = np.arange(len(texts))
    return Batch.from_columns(prompt_id=numbers, group_id=numbers, prompt=list(texts), prompt_tokens=tokens)


def _choose_kept(rows: Rows) -> list[str]:
    """The columns that go along. Raises ConfigError for one whose name a rollout uses for something else."""
    names = [name for name in rows.table.column_names if not (name == "prompt" and name in rows.needed)]
    for name in names:
        if name in COLUMN_TYPES:
            raise ConfigError(
                f"data.rename: the rows have a column '{name}', which is what a rollout calls a column of its own; "
                f"set data.rename.{name} to another name, e.g. data_{name}"
            )
    return names
