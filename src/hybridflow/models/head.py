"""The language-model head: what turns hidden states into logits. The shift by one (hidden state t-1 predicts token t) lives here too.

Dimensions: T packed tokens, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.models.exact import log_softmax_rows, matmul_rows
from hybridflow.models.head_passes import scale_logits


class VocabularyAxis(Protocol):
    """The ranks that hold the other rows of the head."""

    def sum_(self, tensor: Tensor) -> None:
        """Replaces the tensor by its sum over ranks, in place."""
        ...

    def max_(self, tensor: Tensor) -> None:
        """Replaces the tensor by its elementwise maximum over ranks, in place."""
        ...


def _whole(weight: Tensor) -> Tensor:
    return weight


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of a head that is split over ranks are here: `VocabularyShard(offset=75968, axis=mesh.tensor, local=to_local)`.

    offset: vocabulary index of the first row here; the ranks' rows follow one another without a gap, and each rank has some.
    axis:   the ranks; all of them hold the same hidden states and targets, and call together.
    local:  from the module's weight to the rows that are here.
    """

    offset: int
    axis: VocabularyAxis
    local: Callable[[Tensor], Tensor] = _whole


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: `softcap * tanh(logit_scale * (hidden @ weight.T) / softcap)`.

    weight:      [V, D], the module's own parameter (shared with the embedding where tied), or the rows of it that are here.
    softcap:     None for families without one.
    logit_scale: factor on the raw logits, 1.0 for families without one.
    exact:       a row's result is bit-equal whatever rows are beside it.
    vocabulary:  None where the weight is whole.
    """

    weight: Tensor
    softcap: float | None = None
    logit_scale: float = 1.0
    exact: bool = False
    vocabulary: VocabularyShard | None = None


def predicted_positions(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """For packed rows: which hidden state predicts which token, `(hidden_index, token_index)`, each int64 [T - rows with a token].

    Token t > 0 of a row is predicted by the hidden state at t - 1 of that row; the first token of a row by none.
    """
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    is_first = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bool, device=cu_seqlens.device)
    is_first[starts[starts < ends]] = True
    token_index = torch.nonzero(~is_first).squeeze(1)
    return token_index - 1, token_index


def compute_logits(hidden_TD: Tensor, head: Head, temperature: float = 1.0) -> Tensor:
    """Logits divided by the temperature, [T, V] float32 (float64 for a float64 head). For sampling, where T is small.

    Without gradient. Greedy decoding takes the arg max at temperature 1; a temperature of 0 is an error, and so is a head whose
    vocabulary is split: nothing gathers logits.
    """
    check_temperature(temperature)
    if head.vocabulary is not None:
        raise ValueError(
            "the head's vocabulary is split over ranks, and logits are not gathered; sample from a whole model"
        )
    with torch.no_grad():
        raw_TV = compute_product(hidden_TD, head.weight.t(), head)
        return scale_logits(raw_TV, head.logit_scale, head.softcap, temperature)


def compute_log_softmax(logits_TV: Tensor, *, exact: bool = False) -> Tensor:
    """Log-probabilities over the vocabulary, [T, V].

    The one function of rollout and trainer, so that both agree bit for bit in exact mode (`exact`), where a row is reduced in one order
    in any company; on a GPU torch's own order depends on where the row lies.
    """
    return log_softmax_rows(logits_TV) if exact else torch.log_softmax(logits_TV, dim=-1)


def compute_product(rows_TD: Tensor, matrix: Tensor, head: Head) -> Tensor:
    """Rows times a matrix, in this head's numerics: rounded to the rows' dtype in fast ones, to no less than float32 in exact ones."""
    if head.exact:
        return matmul_rows(rows_TD, matrix, dtype=torch.promote_types(rows_TD.dtype, torch.float32))
    return rows_TD @ matrix


def check_temperature(temperature: float) -> None:
    """Raises ValueError unless logits can be divided by it."""
    if not temperature > 0.0:
        raise ValueError(
            f"temperature is {temperature}, but logits are divided by it: give a number above 0 (greedy: 1)"
        )
