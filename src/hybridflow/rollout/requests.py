"""What engines with a model of their own are asked, row by row, and the batch that their answers make."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.models import load_tokenizer
from hybridflow.rollout.base import RowScores, build_rollout_batch, find_prompt_error
from hybridflow.rollout.native.draws import compute_keys
from hybridflow.rollout.native.stopping import StopRules, collect_eos_ids
from hybridflow.types import SamplingParams

_SEED_BITS = (1 << 63) - 1
_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class ServedModel:
    """What is known of a model whose weights an engine keeps: `ServedModel(tokenizer, {2}, context=512, vocab_size=512, shapes={...})`.

    shapes: of every parameter by its Hugging Face name, a tied one once.
    dtype:  in which it computes, as far as its directory says.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    context: int
    vocab_size: int
    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Request:
    """What an engine is asked for one row: `Request(row=3, prompt=[1, 403, 407], max_tokens=128, seed=8817264546332525)`."""

    row: int
    prompt: list[int]
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """What came of a request. tokens: those sampled; logprobs: one each; finish_reason: the engine's own word; error: why it failed."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: str = "abort"
    error: str | None = None


@dataclass(frozen=True)
class RequestPlan:
    """All requests of a `generate` call, and what its batch is made of.

    errors: of each prompt that cannot be served, else None; such a prompt has no requests.
    stops:  which ids and strings end a row; all that an engine needs to know of stops.
    """

    prompts: Batch
    sampling: SamplingParams
    stops: StopRules
    requests: list[Request]
    errors: list[str | None]


class FiniteGuard:
    """Keeps weights that are not finite from vLLM's sampling, which on a GPU ends the process that meets such a distribution."""

    def __init__(self) -> None:
        self._spoilt: set[str] = set()

    def note(self, part: Literal["weights", "adapter"], *, is_finite: bool) -> None:
        """What has come of a part."""
        (self._spoilt.discard if is_finite else self._spoilt.add)(part)

    @property
    def is_on(self) -> bool:
        """Whether a part is not finite."""
        return bool(self._spoilt)

    def fail(self, plan: RequestPlan) -> dict[int, Sample]:
        """Why each row fails, by row; nothing where all is finite."""
        told = "the model's weights are not finite; look at the training's gradients and losses"
        return {request.row: Sample(error=told) for request in plan.requests} if self.is_on else {}

    def fail_scores(self, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> RowScores | None:
        """Scores that are not finite either; None where all is finite."""
        return RowScores([np.full(len(row), np.nan, np.float32) for row in rows], dtype) if self.is_on else None


def read_served_model(directory: str | os.PathLike[str], max_model_len: int | None = None) -> ServedModel:
    """What a Hugging Face directory says of its model; weights are not read, nor need there be any.

    max_model_len: context of the engine where that is less than the model's own.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    tokenizer = load_tokenizer(directory)
    generation = None
    if (Path(directory) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
    context = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    eos_ids = frozenset(collect_eos_ids(tokenizer, generation))
    dtype = config.dtype or torch.float32
    return ServedModel(tokenizer, eos_ids, context, config.vocab_size, read_shapes(config), dtype)


def read_shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """Shapes of a model's parameters by name, a tied one once, without the model."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def plan_requests(prompts: Batch, sampling: SamplingParams, step: int, model: ServedModel) -> RequestPlan:
    """One request a row, in the order of the batch. A row's seed is its key of the native engine's draws, without its sign.

    So no row's samples depend on which others are asked for, on which replica, or in which order.
    """
    samples = sampling.samples_per_prompt
    arrays = prompts.arrays("prompt_tokens")
    errors = [find_prompt_error(tokens, model.context, model.vocab_size) for tokens in arrays]
    group_ids, sample_ids = np.repeat(prompts.numpy("group_id"), samples), np.tile(np.arange(samples), len(arrays))
    seeds = compute_keys(sampling.seed, step, group_ids, sample_ids) & _SEED_BITS
    requests = [
        Request(row, arrays[row // samples].tolist(), _room(arrays[row // samples], sampling, model), int(seed))
        for row, seed in enumerate(seeds)
        if errors[row // samples] is None
    ]
    stops = StopRules(sampling, set(model.eos_ids), model.tokenizer, model.vocab_size)
    return RequestPlan(prompts, sampling, stops, requests, errors)


def build_batch(plan: RequestPlan, samples: Mapping[int, Sample], version: int) -> Batch:
    """The rows of `generate` from what came of the requests, by row; a request without an answer counts as aborted."""
    count = plan.sampling.samples_per_prompt
    prompts = [prompt for prompt in plan.prompts.arrays("prompt_tokens") for _ in range(count)]
    refused = [error for error in plan.errors for _ in range(count)]
    rows = [samples.get(row, Sample()) for row in range(len(prompts))]
    errors = [error or find_sample_error(sample) for error, sample in zip(refused, rows, strict=True)]
    nothing = np.zeros(0, np.int32)
    starts = [nothing if error else prompt for prompt, error in zip(prompts, errors, strict=True)]
    responses = [
        nothing if error else np.array(sample.tokens, np.int32) for sample, error in zip(rows, errors, strict=True)
    ]
    return build_rollout_batch(
        plan.prompts,
        count,
        tokens=[np.concatenate(pair) for pair in zip(starts, responses, strict=True)],
        logprobs=[
            _join_logprobs(len(start), sample, error) for start, sample, error in zip(starts, rows, errors, strict=True)
        ],
        prompt_lengths=np.array([len(start) for start in starts], np.int64),
        responses=plan.stops.decode(responses),
        finish_reasons=["abort" if error else sample.finish_reason for sample, error in zip(rows, errors, strict=True)],
        errors=errors,
        version=version,
    )


def read_scores(row: Sequence[int], answer: Sequence[Mapping[Any, Any] | None]) -> NDArray[np.float32]:
    """Of each token of a row its log-probability, 0 of the first, from vLLM's answer: by position the token's id to what is said of it."""
    found = [0.0]
    for token, said in zip(row[1:], answer[1:], strict=True):
        assert said is not None
        # Over HTTP ids are text, and what is said of them is no object.
        found.append(said[str(token)]["logprob"] if str(token) in said else said[token].logprob)
    return np.array(found, np.float32)


def find_sample_error(sample: Sample) -> str | None:
    """Why a row that was asked for counts as FAILED, or None."""
    if sample.error is not None:
        return sample.error
    if not np.all(np.isfinite(sample.logprobs)):
        return "the model's logits are not finite; look at the weights"
    if len(sample.tokens) != len(sample.logprobs):
        return f"the engine gave {len(sample.tokens)} tokens and {len(sample.logprobs)} log-probabilities"
    if sample.finish_reason not in _REASONS:
        return f"the engine ended the row with '{sample.finish_reason}', which is none of {', '.join(_REASONS)}"
    return None


def _room(prompt: np.ndarray, sampling: SamplingParams, model: ServedModel) -> int:
    return min(sampling.max_new_tokens, model.context - len(prompt))


def _join_logprobs(prompt_length: int, sample: Sample, error: str | None) -> np.ndarray:
    sampled = () if error else sample.logprobs
    return np.concatenate([np.zeros(prompt_length, np.float32), np.array(sampled, np.float32)])
