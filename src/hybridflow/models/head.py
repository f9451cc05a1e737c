"""The language-model head: log-probability and entropy from hidden states, chunk by chunk, with its own backward.

The logits of a whole sequence never exist. The shift by one (hidden state t-1 predicts token t) lives here too.
Dimensions: T packed tokens, M targets, C targets of a chunk, D model, V vocabulary (rows of the head that are here), S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hybridflow.models.exact import matmul_rows
from hybridflow.models.head_passes import can_compile, read_statistics, run_pass, scale_logits, write_gradient_

# Logits of a chunk: 64 MiB of float32 on the CPU; 512 MiB on a GPU, where each chunk also passes over the whole weight gradient; 1 GiB of
# bfloat16 there where the passes are compiled and no float32 logits exist.
_CHUNK_LOGITS = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
_CHUNK_LOGITS_COMPILED = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
_MIN_CHUNK_TOKENS = 64
_KEPT_SHARE = 4

Passes = Literal["softmax", "fused", "compiled"]


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
    exact:       a row's result is bit-equal whatever rows are beside it (CPU, float32).
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
    _check_temperature(temperature)
    if head.vocabulary is not None:
        raise ValueError(
            "the head's vocabulary is split over ranks, and logits are not gathered; sample from a whole model"
        )
    with torch.no_grad():
        return _scale_logits(_product(hidden_TD, head.weight.t(), head), head, temperature)


def compute_log_softmax(logits_TV: Tensor) -> Tensor:
    """Log-probabilities over the vocabulary, [T, V].

    The one function of rollout and trainer, so that both agree bit for bit; each row is reduced by itself.
    """
    return torch.log_softmax(logits_TV, dim=-1)


def compute_logprobs(
    hidden_TD: Tensor,
    targets_M: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    rows: Tensor | None = None,
    passes: Passes | None = None,
    keep_logits_bytes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under the head, and the entropy of the distribution if asked for.

    hidden_TD:    [M, D] hidden states, already shifted (row i predicts targets_M[i]); with `rows` [T, D].
    targets_M:    [M] int64.
    chunk_tokens: targets whose logits exist at once; None takes 64 MiB of logits, on a GPU 512 MiB (compiled: 1 GiB).
    rows:         [M] int64, no index twice: hidden state rows[i] predicts target i. Cheaper than `hidden_TD[rows]`, whose backward is a
                  slow scatter on the CPU.
    passes:       how a chunk's logits are read. "softmax": by `compute_log_softmax`, bit-equal to what a rollout samples from;
                  "fused": from sums that shards of the vocabulary can add up; "compiled": the same, by torch.compile. None takes
                  softmax on the CPU, compiled on a GPU (fused without Triton), fused for a shard on the CPU. They differ by rounding.
    keep_logits_bytes: raw logits that may stay for the backward pass, which computes those of the other chunks again, bit-equal.
                  None takes a quarter of the GPU's free memory, and 0 on the CPU. Needs passes other than softmax.
    returns:      (logprobs [M] float32, entropy [M] float32 or None), in nats, at the given temperature; float64 for a float64 head.

    Gradient reaches hidden_TD and head.weight; the weight's is summed in float32 and returned in its dtype. Over a split vocabulary
    every rank gets the same log-probabilities, entropies and gradient at hidden_TD, summed over ranks, and that of its own rows.
    """
    _check_temperature(temperature)
    passes = _select_passes(head) if passes is None else passes
    _check_passes(head, passes, keep_logits_bytes)
    if chunk_tokens is None:
        logits = _CHUNK_LOGITS_COMPILED if passes == "compiled" else _CHUNK_LOGITS
        fitting = logits[head.weight.device.type] // head.weight.shape[0]
        chunk_tokens = max(_MIN_CHUNK_TOKENS, fitting // _MIN_CHUNK_TOKENS * _MIN_CHUNK_TOKENS)
    has_backward = torch.is_grad_enabled() and (hidden_TD.requires_grad or head.weight.requires_grad)
    if keep_logits_bytes is None:
        keep_logits_bytes = _kept_bytes(head.weight.device) if has_backward and passes != "softmax" else 0
    settings = _Settings(
        head, temperature, chunk_tokens, with_entropy, passes == "compiled", keep_logits_bytes if has_backward else 0
    )
    function = _SoftmaxFunction if passes == "softmax" else _FusedFunction
    logprobs, entropy = function.apply(hidden_TD, head.weight, targets_M, rows, settings)
    return logprobs, entropy if with_entropy else None


def _select_passes(head: Head) -> Passes:
    if head.weight.device.type == "cpu":
        return "softmax" if head.vocabulary is None else "fused"
    return "compiled" if can_compile(head.weight.device) else "fused"


def _check_passes(head: Head, passes: Passes, keep_logits_bytes: int | None) -> None:
    if head.weight.shape[0] == 0:
        raise ValueError("no row of the head is on this rank; lower the tensor parallel degree, so that each has some")
    if passes == "softmax" and head.vocabulary is not None:
        raise ValueError('passes "softmax" needs the whole vocabulary, but it is split over ranks; leave passes out')
    if passes == "softmax" and keep_logits_bytes:
        raise ValueError(
            f'keep_logits_bytes is {keep_logits_bytes}, but passes "softmax" keep none; give 0 or other passes'
        )


def _kept_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    # What the allocator holds unused is free too.
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + idle) // _KEPT_SHARE


def _check_temperature(temperature: float) -> None:
    if not temperature > 0.0:
        raise ValueError(
            f"temperature is {temperature}, but logits are divided by it: give a number above 0 (greedy: 1)"
        )


@dataclass(frozen=True)
class _Settings:
    head: Head
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    compiled: bool
    keep_logits_bytes: int

    @property
    def scale(self) -> tuple[float, float | None, float]:
        return self.head.logit_scale, self.head.softcap, self.temperature

    def iter_chunks(self, count: int) -> Iterator[slice]:
        """Slices of the targets, in order."""
        for start in range(0, count, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, count))


def _product(rows_TD: Tensor, matrix: Tensor, head: Head) -> Tensor:
    return matmul_rows(rows_TD, matrix) if head.exact else rows_TD @ matrix


def _scale_logits(raw_TV: Tensor, head: Head, temperature: float) -> Tensor:
    return scale_logits(raw_TV, head.logit_scale, head.softcap, temperature)


def _scale_gradient(grad_TV: Tensor, logits_TV: Tensor, head: Head, temperature: float) -> Tensor:
    """Gradient at the raw product from the gradient at the scaled logits; `grad_TV` is overwritten."""
    if temperature != 1.0:
        grad_TV.div_(temperature)
    if head.softcap is not None:
        capped = logits_TV * (temperature / head.softcap)
        grad_TV.mul_(1.0 - capped * capped)
    return grad_TV if head.logit_scale == 1.0 else grad_TV.mul_(head.logit_scale)


def _chunk_logits(hidden_CD: Tensor, weight_VD: Tensor, settings: _Settings) -> Tensor:
    return _scale_logits(_product(hidden_CD, weight_VD.t(), settings.head), settings.head, settings.temperature)


def _take(hidden_TD: Tensor, rows: Tensor | None, chunk: slice) -> Tensor:
    return hidden_TD[chunk] if rows is None else hidden_TD.index_select(0, rows[chunk])


class _Gradients:
    """Gradients at hidden states and weight, from those at the raw logits of one chunk after another."""

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, rows: Tensor | None, needs: tuple[bool, ...], head: Head
    ) -> None:
        self._weight_VD = weight_VD
        self._rows = rows
        self._head = head
        total_dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        self.hidden_TD = torch.zeros_like(hidden_TD) if needs[0] else None
        self._total_VD = torch.zeros_like(weight_VD, dtype=total_dtype) if needs[1] else None

    @property
    def weight_VD(self) -> Tensor | None:
        return None if self._total_VD is None else self._total_VD.to(self._weight_VD.dtype)

    def add(self, chunk: slice, hidden_CD: Tensor, grad_CV: Tensor) -> None:
        """grad_CV is in the weight's dtype."""
        if self.hidden_TD is not None:
            grad_CD = _product(grad_CV, self._weight_VD, self._head)
            if self._rows is None:
                self.hidden_TD[chunk] = grad_CD
            else:
                self.hidden_TD.index_copy_(0, self._rows[chunk], grad_CD)
        if self._total_VD is not None:
            _add_product(self._total_VD, grad_CV.t(), hidden_CD)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


class _SoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_M: Tensor, rows: Tensor | None, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        logprobs = torch.empty(targets_M.shape, dtype=dtype, device=hidden_TD.device)
        entropy = torch.empty_like(logprobs) if settings.with_entropy else logprobs.new_empty(0)
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            logits_CV = _chunk_logits(_take(hidden_TD, rows, chunk), weight_VD, settings)
            logp_CV = compute_log_softmax(logits_CV)
            logprobs[chunk] = logp_CV.gather(1, targets_M[chunk, None]).squeeze(1)
            if settings.with_entropy:
                entropy[chunk] = _entropy(logp_CV, torch.exp(logp_CV))
        ctx.save_for_backward(hidden_TD, weight_VD, targets_M, rows)
        ctx.settings = settings
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_VD, targets_M, rows = ctx.saved_tensors
        settings: _Settings = ctx.settings
        grad_logprob, grad_entropy = grads
        gradients = _Gradients(hidden_TD, weight_VD, rows, ctx.needs_input_grad, settings.head)
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            hidden_CD = _take(hidden_TD, rows, chunk)
            entropy_part = grad_entropy[chunk, None] if settings.with_entropy else None
            grad_CV = _logits_gradient(
                hidden_CD, weight_VD, targets_M[chunk, None], grad_logprob[chunk, None], entropy_part, settings
            )
            gradients.add(chunk, hidden_CD, grad_CV.to(weight_VD.dtype))
        return gradients.hidden_TD, gradients.weight_VD, None, None, None


def _entropy(logp_CV: Tensor, p_CV: Tensor) -> Tensor:
    # A token of probability 0 has log-probability -inf at worst; its part is 0.
    return -(p_CV * logp_CV.clamp(min=torch.finfo(logp_CV.dtype).min)).sum(-1)


def _logits_gradient(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C1: Tensor,
    grad_logprob_C1: Tensor,
    grad_entropy_C1: Tensor | None,
    settings: _Settings,
) -> Tensor:
    """Gradient at the raw logits of a chunk: g (onehot - p) for the log-probability, -g p (log p + H) for the entropy."""
    head, temperature = settings.head, settings.temperature
    logits_CV = _chunk_logits(hidden_CD, weight_VD, settings)
    logp_CV = compute_log_softmax(logits_CV)
    p_CV = torch.exp(logp_CV)
    grad_CV = p_CV * -grad_logprob_C1
    if grad_entropy_C1 is not None:
        entropy_C1 = _entropy(logp_CV, p_CV).unsqueeze(1)
        surprise_CV = logp_CV.clamp_(min=torch.finfo(logp_CV.dtype).min).add_(entropy_C1)
        grad_CV.sub_(surprise_CV.mul_(p_CV).mul_(grad_entropy_C1))
    grad_CV.scatter_add_(1, targets_C1, grad_logprob_C1.to(grad_CV.dtype))
    return _scale_gradient(grad_CV, logits_CV, head, temperature)


class _FusedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_M: Tensor, rows: Tensor | None, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        vocabulary = settings.head.vocabulary
        local_M = targets_M if vocabulary is None else targets_M - vocabulary.offset
        dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        statistics_4M = torch.empty((4, *targets_M.shape), dtype=dtype, device=hidden_TD.device)
        kept: dict[int, Tensor] = {}
        room = settings.keep_logits_bytes
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            raw_CV = _product(_take(hidden_TD, rows, chunk), weight_VD.t(), settings.head)
            statistics_4M[:, chunk] = run_pass(
                read_statistics, settings.compiled, raw_CV, local_M[chunk], *settings.scale, settings.with_entropy
            )
            if raw_CV.nbytes <= room:
                kept[chunk.start] = raw_CV
                room -= raw_CV.nbytes
        if vocabulary is not None and targets_M.shape[0]:
            statistics_4M = _combine(statistics_4M, vocabulary.axis)
        peak_M, total_M, target_M, weighted_M = statistics_4M
        log_total_M = torch.log(total_M)
        entropy = log_total_M - weighted_M / total_M if settings.with_entropy else total_M.new_empty(0)
        ctx.save_for_backward(hidden_TD, weight_VD, local_M, rows, peak_M, log_total_M, entropy)
        ctx.settings = settings
        ctx.kept = kept
        return (target_M - peak_M) - log_total_M, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_VD, local_M, rows, peak_M, log_total_M, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        head = settings.head
        gradients = _Gradients(hidden_TD, weight_VD, rows, ctx.needs_input_grad, head)
        for chunk in settings.iter_chunks(local_M.shape[0]):
            hidden_CD = _take(hidden_TD, rows, chunk)
            # Taken out: the gradient overwrites them, and a second backward computes them again.
            raw_CV = ctx.kept.pop(chunk.start, None)
            raw_CV = _product(hidden_CD, weight_VD.t(), head) if raw_CV is None else raw_CV
            parts = [None if not settings.with_entropy else part[chunk] for part in (entropy, grads[1])]
            run_pass(
                write_gradient_, settings.compiled, raw_CV, local_M[chunk],
                peak_M[chunk], log_total_M[chunk], grads[0][chunk], *parts, *settings.scale,
            )  # fmt: skip
            gradients.add(chunk, hidden_CD, raw_CV)
            del raw_CV
        if head.vocabulary is not None and gradients.hidden_TD is not None and local_M.shape[0]:
            head.vocabulary.axis.sum_(gradients.hidden_TD)
        return gradients.hidden_TD, gradients.weight_VD, None, None, None


def _combine(statistics_4M: Tensor, axis: VocabularyAxis) -> Tensor:
    """Statistics of the whole vocabulary from those of every rank's shard."""
    own_M, total_M, target_M, weighted_M = statistics_4M
    peak_M = own_M.clone()
    axis.max_(peak_M)
    below_M = own_M - peak_M
    factor_M = torch.exp(below_M)
    sums_3M = torch.stack([factor_M * total_M, target_M, factor_M * (weighted_M + below_M * total_M)])
    axis.sum_(sums_3M)
    return torch.cat([peak_M[None], sums_3M])
