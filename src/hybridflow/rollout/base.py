"""What every rollout engine does, and the batch it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hybridflow.batch import Batch
from hybridflow.config import ConfigError, HybridflowError
from hybridflow.types import Metrics, RowState, SamplingParams

ROLLOUT_COLUMNS = (
    "sample_id", "tokens", "loss_mask", "rollout_logprobs", "response", "policy_version_min", "policy_version_max",
    "finish_reason", "state", "rollout_error",
)  # fmt: skip
"""Columns that `generate` adds. `rollout_error` says why a row FAILED, null elsewhere."""


class WeightsError(HybridflowError, ValueError):
    """Weights that were given to an engine do not fit its model."""


@dataclass(frozen=True)
class RowScores:
    """Of each token of given rows its log-probability at temperature 1, 0 of a row's first.

    dtype: in which the engine computed them; the values are float32.
    """

    logprobs: list[NDArray[np.float32]]
    dtype: torch.dtype


class RolloutEngine(Protocol):
    """Generates samples of prompts. All engines answer the same contract tests."""

    @property
    def version(self) -> int:
        """Of the weights that samples come from."""
        ...

    @property
    def longest_row(self) -> int:
        """Most tokens of a row, its prompt included, that the engine has room for."""
        ...

    def generate(self, prompts: Batch, sampling: SamplingParams, *, step: int) -> Batch:
        """`samples_per_prompt` rows for each prompt, a group's rows side by side, in the order of the prompts.

        prompts: columns `prompt_tokens` and `group_id` (no id twice); the others pass through to each row of the group.
        returns: the rows with `ROLLOUT_COLUMNS`, chunked as the prompts are. `tokens` are the ids as fed and sampled, a
                 sampled stop id included; `rollout_logprobs` are those of the distribution sampled from (repetition
                 penalty, temperature, min-p, top-k and top-p applied, in this order; greedy: of the whole distribution at temperature 1,
                 penalised). Where sampling cuts, the native engine adds `kept_counts`: among how many tokens of the vocabulary each
                 was drawn, 0 on the prompt, from which a trainer knows the distribution whatever its rounding.

        A prompt that cannot be served becomes FAILED rows without tokens, with a reason in `rollout_error`; nothing is
        raised for it.
        """
        ...

    def score(self, rows: Sequence[Sequence[int]]) -> RowScores | None:
        """What the weights make of given rows, one at least, each shorter than `longest_row`; None from an engine that does not tell."""
        ...

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Samples from here on come from the weights of this version; what was cached of older ones is dropped.

        weights: every parameter of the model, whole, by its Hugging Face name, a tied one once, in any order, dtype and on any device.
                 A tensor may be the trainer's live one; it is copied before this returns, and has to stay as it is until then.
                 None: they are there already, in storage that the engine shares or that was written to for it; an engine that has no
                 such storage raises ValueError.

        Raises WeightsError for a name or a shape that is not the model's, or one left out; the weights are then in parts old and new
        until a later call gives all.
        """
        ...

    def load_adapter(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Samples from here on come from the base weights that are there with this adapter; what was cached of older ones is dropped.

        weights: every tensor of the adapter, whole, by its plain name (`...q_proj.lora_A.weight`); as of `load_weights` in all else.

        Raises ValueError where the engine was not built with an adapter, WeightsError as `load_weights` does.
        """
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

    def metrics(self) -> Metrics:
        """What the last `generate` cost, for the run's log; nothing where the engine does not say."""
        ...

    def close(self) -> None:
        """Ends what the engine runs outside this process; it is of no use afterwards."""
        ...


def check_prompts(prompts: Batch) -> None:
    """Refuses a batch that no engine could take: ConfigError for a column in the way, ValueError for a group twice."""
    taken = [name for name in (*ROLLOUT_COLUMNS, "kept_counts") if name in prompts.column_names]
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


def find_prompt_error(tokens: np.ndarray, context: int, vocab_size: int) -> str | None:
    """Why a prompt cannot be served by a model with this context and vocabulary, or None."""
    if not len(tokens):
        return "the prompt has no tokens"
    if len(tokens) >= context:
        return (
            f"the prompt's {len(tokens)} tokens leave no room in the model's context of {context}; shorten the prompt"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"the prompt holds a token outside the model's {vocab_size}; was it made with another tokenizer?"
    return None


def copy_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Takes up weights by name, rounded to the module's own type; the addresses stay. Raises WeightsError, see `load_weights`."""
    copy_named(dict(module.named_parameters()), weights)


@torch.no_grad()
def copy_named(own: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """As `copy_weights`, into these tensors."""
    watched = WatchedWeights(weights, {name: parameter.shape for name, parameter in own.items()})
    for name, weight in watched:
        own[name].copy_(weight)
    watched.check()


class WatchedWeights:
    """Passes on those weights that the model has, in its shapes; `check` then tells of all that was odd or did not come.

    Engines differ in what they do with a name too many or too few, down to a line in a log, so none of them sees one.

    checks_finite: whether `is_finite` is to tell, for which every value is read once.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], *, checks_finite: bool = False
    ) -> None:
        self._weights, self._shapes = weights, shapes
        self._checks_finite = checks_finite
        self._finite = torch.ones((), dtype=torch.bool)
        self._came: set[str] = set()
        self._misshapen: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights:
            self._came.add(name)
            expected = self._shapes.get(name)
            if expected is None:
                continue
            if weight.shape == expected:
                if self._checks_finite:
                    # Both ends tell of every value, NaN among them, without a copy of the weight.
                    ends = torch.stack(torch.aminmax(weight.detach()))
                    self._finite = torch.isfinite(ends).all() & self._finite.to(weight.device)
                yield name, weight.detach()
            else:
                self._misshapen.append(
                    f"weight '{name}' has the shape {tuple(weight.shape)} and the engine's model {tuple(expected)}"
                )

    @property
    def is_finite(self) -> bool:
        """Whether all that came is; with `checks_finite` alone."""
        assert self._checks_finite
        return bool(self._finite)

    def check(self) -> None:
        """Raises WeightsError unless each of the model's weights has come and no other."""
        if self._misshapen:
            raise WeightsError(f"{self._misshapen[0]}; give actor and rollout one model")
        odd = sorted(self._came ^ self._shapes.keys())
        if odd:
            raise WeightsError(
                f"weight '{odd[0]}' is not on both sides ({len(odd)} such); give actor and rollout one model"
            )


def build_rollout_batch(
    prompts: Batch,
    samples: int,
    *,
    tokens: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    kept_counts: Sequence[np.ndarray] | None = None,
    prompt_lengths: np.ndarray,
    responses: Sequence[str],
    finish_reasons: Sequence[str],
    errors: Sequence[str | None],
    version: int,
) -> Batch:
    """The rows of a rollout, group by group, each with its prompt's columns.

    tokens, logprobs: one array a row, prompt and response, of equal lengths; both empty for a row with an error.
    kept_counts:      the same, of the column; None from an engine that does not tell, and where sampling cuts none.
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
    if kept_counts is not None:
        rows = rows.merge(Batch.from_columns(kept_counts=_list_array(offsets, _join(kept_counts, np.int32))))
    return prompts.drop(["prompt_tokens"]).repeat(samples).merge(rows)


def _join(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _list_array(offsets: pa.Array, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(offsets, pa.array(values))
