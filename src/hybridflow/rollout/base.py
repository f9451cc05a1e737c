"""What every rollout engine does, and the batch it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.types import RowState, SamplingParams

ROLLOUT_COLUMNS = (
    "sample_id", "tokens", "loss_mask", "rollout_logprobs", "response", "policy_version_min", "policy_version_max",
    "finish_reason", "state", "rollout_error",
)  # fmt: skip
"""Columns that `generate` adds. `rollout_error` says why a row FAILED, null elsewhere."""


class RolloutEngine(Protocol):
    """Generates samples of prompts. All engines answer the same contract tests."""

    def generate(self, prompts: Batch, sampling: SamplingParams, *, step: int) -> Batch:
        """`samples_per_prompt` rows for each prompt, a group's rows side by side, in the order of the prompts.

        prompts: columns `prompt_tokens` and `group_id` (no id twice); the others pass through to each row of the group.
        returns: the rows with `ROLLOUT_COLUMNS`, chunked as the prompts are. `tokens` are the ids as fed and sampled, a
                 sampled stop id included; `rollout_logprobs` are those of the distribution sampled from (temperature,
                 top-k and top-p applied; greedy: of the whole distribution at temperature 1).

        A prompt that cannot be served becomes FAILED rows without tokens, with a reason in `rollout_error`; nothing is
        raised for it.
        """
        ...

    def load_weights(self, version: int) -> None:
        """Samples from here on come from the weights of this version; what was cached of older ones is dropped."""
        ...

    def sleep(self) -> None:
        """Gives back the memory that only generation needs."""
        ...

    def wake(self) -> None:
        """Makes `generate` possible again after `sleep`."""
        ...

    def abort(self) -> None:
        """Ends the generation that runs now, from another thread: rows come back as far as they are, marked 'abort'."""
        ...


def check_prompts(prompts: Batch) -> None:
    """Refuses a batch that no engine could take: ConfigError for a column in the way, ValueError for a group twice."""
    taken = [name for name in ROLLOUT_COLUMNS if name in prompts.column_names]
    if taken:
        raise ConfigError(
            f"the prompts have columns {taken}, which the rollout writes; rename or drop them in the data"
        )
    groups, counts = np.unique(prompts.numpy("group_id"), return_counts=True)
    if np.any(counts > 1):
        raise ValueError(
            f"group_id {groups[counts > 1][0]} comes twice in the prompts and its samples would be drawn alike; "
            "number each prompt anew"
        )


def build_rollout_batch(
    prompts: Batch,
    samples: int,
    *,
    tokens: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    prompt_lengths: np.ndarray,
    responses: Sequence[str],
    finish_reasons: Sequence[str],
    errors: Sequence[str | None],
    version: int,
) -> Batch:
    """The rows of a rollout, group by group, each with its prompt's columns.

    tokens, logprobs: one array a row, prompt and response, of equal lengths; both empty for a row with an error.
    prompt_lengths:   [rows], tokens of each row that were not sampled.
    """
    lengths = np.array([len(row) for row in tokens], np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    failed = np.array([error is not None for error in errors], np.bool_)
    states = np.where(failed, RowState.FAILED, np.where(lengths > prompt_lengths, RowState.OK, RowState.EMPTY))
    num_rows = len(lengths)
    rows = Batch.from_columns(
        sample_id=np.arange(num_rows, dtype=np.int64) % samples,
        tokens=_list_array(offsets, _join(tokens, np.int32)),
        loss_mask=_list_array(offsets, (within >= np.repeat(prompt_lengths, lengths)).astype(np.uint8)),
        rollout_logprobs=_list_array(offsets, _join(logprobs, np.float32)),
        response=pa.array(responses, pa.string()),
        policy_version_min=np.full(num_rows, version, np.int64),
        policy_version_max=np.full(num_rows, version, np.int64),
        finish_reason=pa.array(finish_reasons, pa.string()),
        state=states.astype(np.int8),
        rollout_error=pa.array(errors, pa.string()),
    )
    return prompts.drop(["prompt_tokens"]).repeat(samples).merge(rows)


def _join(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _list_array(offsets: pa.Array, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(offsets, pa.array(values))
