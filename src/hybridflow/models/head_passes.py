"""Passes over a chunk's raw logits: what forward reads from them, and the gradient that backward writes over them.

Each is one function, run as it stands or compiled. Compiled, nothing of the logits' size exists beside them.
Dimensions: C targets of a chunk, V rows of the head that are here (all of the vocabulary, or a shard of it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def scale_logits(raw: Tensor, logit_scale: float, softcap: float | None, temperature: float) -> Tensor:
    """Logits that the distribution is made of, float32 (float64 of float64), from raw products of any shape."""
    # Families cap in the weight's dtype; float32 here is the same function with less rounding.
    logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if temperature == 1.0 else logits / temperature


def read_statistics(
    raw_CV: Tensor, rows_C: Tensor, logit_scale: float, softcap: float | None, temperature: float, with_entropy: bool
) -> Tensor:
    """What log-probability and entropy follow from, [4, C]: greatest logit, sum of e = exp(logit - greatest), the target's logit, sum of
    e (logit - greatest); the last 0 where no entropy is asked for.

    rows_C: [C] int64 row of each target; one that is not here (below 0, or V and above) has a target's logit of 0.
    """
    logits_CV = scale_logits(raw_CV, logit_scale, softcap, temperature)
    peak_C = logits_CV.amax(1)
    below_CV = (logits_CV - peak_C[:, None]).clamp(min=torch.finfo(logits_CV.dtype).min)
    exponentials_CV = torch.exp(below_CV)
    total_C = exponentials_CV.sum(1)
    weighted_C = (exponentials_CV * below_CV).sum(1) if with_entropy else torch.zeros_like(total_C)
    is_here_C = (rows_C >= 0) & (rows_C < raw_CV.shape[1])
    raw_C = raw_CV.gather(1, rows_C.clamp(0, raw_CV.shape[1] - 1)[:, None]).squeeze(1)
    target_C = scale_logits(raw_C, logit_scale, softcap, temperature)
    return torch.stack([peak_C, total_C, torch.where(is_here_C, target_C, 0.0), weighted_C])


def write_gradient_(
    raw_CV: Tensor,
    rows_C: Tensor,
    peak_C: Tensor,
    log_total_C: Tensor,
    grad_logprob_C: Tensor,
    entropy_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
) -> None:
    """Overwrites raw logits by the gradient at them, in their dtype: g (onehot - p) of the log-probability, and
    -g p (log p + H) of the entropy.

    peak_C, log_total_C: log p = (logit - peak) - log_total, over the whole vocabulary.
    """
    logits_CV = scale_logits(raw_CV, logit_scale, softcap, temperature)
    logp_CV = (logits_CV - peak_C[:, None]) - log_total_C[:, None]
    p_CV = torch.exp(logp_CV)
    grad_CV = p_CV * -grad_logprob_C[:, None]
    if entropy_C is not None and grad_entropy_C is not None:
        surprise_CV = logp_CV.clamp(min=torch.finfo(logp_CV.dtype).min) + entropy_C[:, None]
        grad_CV = grad_CV - surprise_CV * p_CV * grad_entropy_C[:, None]
    is_target_CV = torch.arange(raw_CV.shape[1], device=raw_CV.device)[None, :] == rows_C[:, None]
    grad_CV = torch.where(is_target_CV, grad_CV + grad_logprob_C[:, None], grad_CV)
    if temperature != 1.0:
        grad_CV = grad_CV / temperature
    if softcap is not None:
        capped_CV = logits_CV * (temperature / softcap)
        grad_CV = grad_CV * (1.0 - capped_CV * capped_CV)
    raw_CV.copy_(grad_CV if logit_scale == 1.0 else grad_CV * logit_scale)


def can_compile(device: torch.device) -> bool:
    """Whether the passes are worth compiling here: on a GPU with Triton."""
    return device.type == "cuda" and find_spec("triton") is not None


def run_pass(function: Callable[..., Any], compiled: bool, raw_CV: Tensor, rows_C: Tensor, *args: Any) -> Any:
    """The pass over these logits, compiled once for any number of targets."""
    if not compiled:
        return function(raw_CV, rows_C, *args)
    for tensor in (raw_CV, rows_C, *(arg for arg in args if isinstance(arg, Tensor))):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compile(function)(raw_CV, rows_C, *args)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
