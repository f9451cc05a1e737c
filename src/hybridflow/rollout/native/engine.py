"""The native engine: continuous batching over a paged KV cache, on the trainer's own model object.

Letters: T packed tokens of a pass, B sequences of a pass, R rows that draw a token, P prompts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.config import ConfigError, Field, settings
from hybridflow.models import BLOCK_SIZE, LanguageModel, Paged, PagedKVCache, compute_logits
from hybridflow.rollout.base import build_rollout_batch, check_prompts
from hybridflow.rollout.native.draws import compute_keys, compute_uniforms
from hybridflow.rollout.native.sampler import sample_tokens
from hybridflow.rollout.native.scheduler import Scheduler, Step, plan_num_blocks
from hybridflow.rollout.native.sequences import Finish, Sequences
from hybridflow.rollout.native.stopping import StopRules, collect_eos_ids
from hybridflow.types import SamplingParams

_CPU_CACHE_BYTES = 2 * 1024**3
_REASONS: dict[int, str] = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.FAILED: "abort"}


@settings
class NativeSettings:
    """Limits of the native engine. None of them changes what is sampled in exact mode."""

    kv_cache_tokens: int | None = Field(default=None, ge=BLOCK_SIZE)
    """Most tokens whose keys and values are kept, rounded down to blocks of 32; null sizes the cache by memory. No call
    takes more than it can use."""
    kv_memory_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of the GPU's free memory for the cache where `kv_cache_tokens` is null; on a CPU it takes up to 2 GiB."""
    max_sequences: int = Field(default=512, ge=1)
    """Most rows that are decoded at a time."""
    prefill_tokens_per_step: int = Field(default=8192, ge=1)
    """Most prompt tokens of one pass; longer prompts take several. Bounds the memory of activations."""


@dataclass(frozen=True)
class _Job:
    """One `generate` call under way."""

    sequences: Sequences
    scheduler: Scheduler
    stops: StopRules
    sampling: SamplingParams
    keys_R: Tensor
    cache: PagedKVCache


class NativeEngine:
    """Generates with the model it is given, without a copy of its weights; implements `RolloutEngine`.

    A group's prompt is computed once. When blocks run out, the youngest row is preempted and computed again later; a
    draw depends on (seed, step, group, sample, position) alone, so it comes out the same.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: PreTrainedTokenizerBase, settings: NativeSettings | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings or NativeSettings()
        self.version = 0
        self._cache: PagedKVCache | None = None
        self._max_blocks = 0
        self._asleep = False
        self._busy = threading.Lock()
        self._abort = threading.Event()

    def generate(self, prompts: Batch, sampling: SamplingParams, *, step: int) -> Batch:
        """Samples of each prompt; see `RolloutEngine.generate`."""
        check_prompts(prompts)
        with self._occupied("generate"), _evaluating(self.model), torch.inference_mode():
            errors_P = self._find_errors(prompts)
            job = self._start(prompts, errors_P, sampling, step)
            while job.sequences.num_unfinished and not self._abort.is_set():
                self._step(job)
            return self._finish(prompts, errors_P, job)

    def load_weights(self, version: int) -> None:
        """The model's weights are now those of `version`; they are the trainer's own, and no prefix outlives a call."""
        with self._occupied("load_weights"):
            self.version = version

    def sleep(self) -> None:
        """Frees the KV cache."""
        with self._occupied("sleep"):
            self._asleep = True
            self._free_cache()

    def wake(self) -> None:
        """Allows `generate` again; the cache comes with the first call, which knows its size."""
        self._asleep = False

    def abort(self) -> None:
        """Ends a running `generate` after its present step; without one it does nothing."""
        self._abort.set()

    def _step(self, job: _Job) -> None:
        step = job.scheduler.schedule()
        tokens, logprobs = self._run(job, step)
        job.sequences.append(step.rows, tokens, logprobs)
        job.stops.mark_finished(job.sequences, step.rows)
        job.scheduler.postprocess(step)

    def _run(self, job: _Job, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Feeds the step's tokens to the model and draws. returns: (tokens [R], logprobs [R])."""
        if step.copies.size:
            source, target = self._to_device(step.copies.T.copy())
            job.cache.copy_slots(source, target)
        hidden_TD = self.model.hidden_states(*self._packed_input(job, step), self._paged(job, step))
        last_R = self._to_device(np.cumsum(step.counts)[step.sources] - 1)
        greedy = job.sampling.temperature == 0
        logits_RV = compute_logits(hidden_TD[last_R], self.model.head, 1.0 if greedy else job.sampling.temperature)
        rows_R, at_R = self._to_device(np.stack([step.rows, job.sequences.length[step.rows]]))
        uniforms_R = None if greedy else compute_uniforms(job.keys_R[rows_R], at_R)
        tokens_R, logprobs_R = sample_tokens(logits_RV, uniforms_R, top_k=job.sampling.top_k, top_p=job.sampling.top_p)
        # Both numbers are exact in float64, and one copy is one wait for the device.
        drawn_2R = torch.stack([tokens_R.double(), logprobs_R.double()]).cpu().numpy()
        return drawn_2R[0].astype(np.int32), drawn_2R[1].astype(np.float32)

    def _packed_input(self, job: _Job, step: Step) -> tuple[Tensor, Tensor]:
        owners_T = np.repeat(step.sequences, step.counts)
        firsts_T = np.repeat(np.cumsum(step.counts) - step.counts - step.starts, step.counts)
        positions_T = np.arange(len(owners_T)) - firsts_T
        tokens_T = job.sequences.tokens[owners_T, positions_T]
        return torch.from_numpy(tokens_T.astype(np.int64)), torch.from_numpy(positions_T)

    def _paged(self, job: _Job, step: Step) -> Paged:
        lengths = step.starts + step.counts
        width = -(-int(lengths.max()) // BLOCK_SIZE)
        decoding = int(step.counts.max()) == 1
        return Paged(
            job.cache,
            torch.from_numpy(job.scheduler.block_table[step.sequences, :width]),
            torch.from_numpy(lengths),
            None if decoding else torch.from_numpy(np.append(0, np.cumsum(step.counts)).astype(np.int32)),
        )

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.model.device, non_blocking=True)

    def _find_errors(self, prompts: Batch) -> list[str | None]:
        """Why a prompt cannot be served, or None, for each prompt."""
        context = self.model.config.max_position_embeddings
        return [_find_error(tokens, context, self.model.vocab_size) for tokens in prompts.arrays("prompt_tokens")]

    def _start(self, prompts: Batch, errors_P: list[str | None], sampling: SamplingParams, step: int) -> _Job:
        samples = sampling.samples_per_prompt
        nothing = np.zeros(0, np.int32)
        arrays = prompts.arrays("prompt_tokens")
        served = [nothing if error else tokens for tokens, error in zip(arrays, errors_P, strict=True)]
        sequences = Sequences(served, samples, sampling.max_new_tokens, self.model.config.max_position_embeddings)
        sequences.finish[np.repeat(np.array([bool(error) for error in errors_P], np.bool_), samples)] = Finish.FAILED
        keys_R = compute_keys(
            sampling.seed,
            step,
            np.repeat(prompts.numpy("group_id"), samples),
            np.tile(np.arange(samples), len(served)),
        )
        cache = self._fit_cache(sequences)
        scheduler = Scheduler(
            sequences, cache.num_blocks, BLOCK_SIZE, self.settings.max_sequences, self.settings.prefill_tokens_per_step
        )
        eos_ids = collect_eos_ids(self.tokenizer, self.model.module.generation_config)
        stops = StopRules(sampling, eos_ids, self.tokenizer, self.model.vocab_size)
        return _Job(sequences, scheduler, stops, sampling, self._to_device(keys_R), cache)

    def _finish(self, prompts: Batch, errors_P: list[str | None], job: _Job) -> Batch:
        rows = job.sequences
        rows.finish[rows.unfinished()] = Finish.ABORT
        errors = [error for error in errors_P for _ in range(rows.samples)]
        for row in np.flatnonzero(rows.finish == Finish.FAILED):
            at = rows.length[row] - 1
            errors[row] = errors[row] or f"the model's logits for token {at} are not finite; look at the weights"
            rows.length[row] = 0
        ends, starts = rows.length[: rows.num_rows], rows.prompt_length[: rows.num_rows]
        return build_rollout_batch(
            prompts,
            rows.samples,
            tokens=[rows.tokens[i, :end] for i, end in enumerate(ends)],
            logprobs=[rows.logprobs[i, :end] for i, end in enumerate(ends)],
            prompt_lengths=starts,
            responses=job.stops.decode(
                [rows.tokens[i, s:e] for i, (s, e) in enumerate(zip(starts, ends, strict=True))]
            ),
            finish_reasons=[_REASONS[code] for code in rows.finish.tolist()],
            errors=errors,
            version=self.version,
        )

    def _fit_cache(self, sequences: Sequences) -> PagedKVCache:
        """The cache at hand, or a larger one where the call can use more and the limits allow it."""
        if self._asleep:
            raise RuntimeError("the rollout engine is asleep and has no KV cache; call wake() before generate()")
        least, most = plan_num_blocks(sequences, BLOCK_SIZE, self.settings.max_sequences)
        if self._cache is None:
            self._max_blocks = self._compute_max_blocks()
        wanted = min(most, self._max_blocks)
        if wanted < least:
            raise ConfigError(
                f"the KV cache holds {wanted * BLOCK_SIZE} tokens and the longest row may need {least * BLOCK_SIZE}; "
                "raise kv_cache_tokens or kv_memory_fraction, or lower max_new_tokens"
            )
        if self._cache is None or self._cache.num_blocks < wanted:
            self._free_cache()
            self._cache = self.model.new_cache(wanted)
        return self._cache

    def _compute_max_blocks(self) -> int:
        if self.settings.kv_cache_tokens is not None:
            return self.settings.kv_cache_tokens // BLOCK_SIZE
        model = self.model
        block_bytes = 2 * model.num_layers * BLOCK_SIZE * model.num_kv_heads * model.head_dim * model.dtype.itemsize
        if model.device.type != "cuda":
            return _CPU_CACHE_BYTES // block_bytes
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(model.device)
        return int(free_bytes * self.settings.kv_memory_fraction) // block_bytes

    def _free_cache(self) -> None:
        self._cache = None
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _occupied(self, verb: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{verb}() was called while the rollout engine is generating; wait for it or abort() it first"
            )
        self._abort.clear()
        try:
            yield
        finally:
            self._busy.release()


def _find_error(tokens: np.ndarray, context: int, vocab_size: int) -> str | None:
    if not len(tokens):
        return "the prompt has no tokens"
    if len(tokens) >= context:
        return (
            f"the prompt's {len(tokens)} tokens leave no room in the model's context of {context}; shorten the prompt"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"the prompt holds a token outside the model's {vocab_size}; was it made with another tokenizer?"
    return None


@contextlib.contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    """The module in eval mode and cuDNN's attention off, and back afterwards."""
    training, cudnn = model.module.training, torch.backends.cuda.cudnn_sdp_enabled()
    model.module.eval()
    # cuDNN plans every new shape for some 60 ms on an H200, and decoding has a new one each step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        model.module.train(training)
