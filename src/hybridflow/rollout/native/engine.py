"""The native engine: continuous batching over a paged KV cache, on the trainer's own model object.

Dimensions: T packed tokens of a pass, R rows that draw a token, P prompts, D model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.config import AliasChoices, ConfigError, Field, settings
from hybridflow.models import BLOCK_SIZE, LanguageModel, Paged, PagedKVCache, adapter_weights
from hybridflow.models.attention import AttentionForm
from hybridflow.rollout.base import (
    RowScores,
    build_rollout_batch,
    check_prompts,
    copy_named,
    copy_weights,
    find_prompt_error,
)
from hybridflow.rollout.native.decoding import Decoding
from hybridflow.rollout.native.draws import compute_keys
from hybridflow.rollout.native.graphs import GraphDecoder, can_capture, draw_on_device
from hybridflow.rollout.native.layers import FusedLayers, serves
from hybridflow.rollout.native.parallel import TensorGroup, copy_shards
from hybridflow.rollout.native.report import RolloutReport
from hybridflow.rollout.native.scheduler import Scheduler, Step, plan_num_blocks
from hybridflow.rollout.native.scoring import compute_row_logprobs
from hybridflow.rollout.native.seats import Decoder, StepDecoder, draw, mark_seen, to_host
from hybridflow.rollout.native.sequences import Draws, Finish, Sequences
from hybridflow.rollout.native.stopping import StopRules, collect_eos_ids
from hybridflow.rollout.turns import Turns
from hybridflow.types import Metrics, SamplingParams

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
    max_sequences: int = Field(default=1024, ge=1)
    """Most rows that are decoded at a time."""
    cuda_graphs: bool = True
    """Decodes on a GPU by captured graphs and fused kernels, where Triton is there; false goes step by step through the
    model's own forward, many times slower and open to a debugger."""
    prefill_tokens_per_step: int = Field(default=8192, ge=1)
    """Most tokens of one pass over prompts, with those of rows that decode beside them; longer prompts take several. Bounds the memory of
    activations."""
    tp: int = Field(default=1, ge=1, validation_alias=AliasChoices("tp", "tensor_parallel_size"))
    """Workers that generate with one model between them, each with a part of every matrix and of the cache; more than one have a copy of
    the weights of their own. All that generate / tp replicas share the prompts. 1: each has the whole model."""


@dataclass(frozen=True)
class _Job:
    """One `generate` call under way."""

    sequences: Sequences
    scheduler: Scheduler
    stops: StopRules
    sampling: SamplingParams
    keys: np.ndarray
    cache: PagedKVCache
    decoding: Decoding
    report: RolloutReport


class NativeEngine:
    """Generates with the model it is given, without a copy of its weights; implements `RolloutEngine`.

    A group's prompt is computed once, and so is what prompts of a call begin with alike. When blocks run out, the youngest
    row is preempted and computed again later; a draw depends on (seed, step, group, sample, position) alone, so it comes
    out the same. On a GPU decoding runs by graphs (`GraphDecoder`), elsewhere step by step (`StepDecoder`).

    group: the ranks that the model is split over (`build_shard`), each with an engine like this one; None: it is whole.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: NativeSettings | None = None,
        group: TensorGroup | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings or NativeSettings()
        self.group = group
        self.version = 0
        self._cache: PagedKVCache | None = None
        self._max_blocks = 0
        self._fused: FusedLayers | None = None
        self._graphs: GraphDecoder | None = None
        self._is_prepared = False
        self.report = RolloutReport(0)
        self._turns = Turns()

    @property
    def longest_row(self) -> int:
        """See `RolloutEngine.longest_row`. A row may take a block more than its tokens fill, for what it does not share with its prompt."""
        context: int = self.model.config.max_position_embeddings
        if self.settings.kv_cache_tokens is None:
            return context
        return min(
            context, max(self.settings.kv_cache_tokens // BLOCK_SIZE - 1 - self._num_idle_blocks, 1) * BLOCK_SIZE
        )

    def prepare(self) -> None:
        """Lays the weights where they stay from here on; the first `generate` does so where nobody has.

        Not in the constructor, since a trainer may still put an adapter into the model. Whoever keeps addresses of weights calls it first.
        """
        if self._is_prepared:
            return
        self._is_prepared = True
        if self.settings.cuda_graphs and can_capture(self.model):
            tokens = None if self.group is None else self.group.tokens
            self._fused = FusedLayers(self.model, tokens) if serves(self.model) else None
            self._graphs = GraphDecoder(self.model, self._fused, self.group)

    def generate(self, prompts: Batch, sampling: SamplingParams, *, step: int) -> Batch:
        """Samples of each prompt; see `RolloutEngine.generate`."""
        check_prompts(prompts)
        with self._turns.take("generate", awake=True), _evaluating(self.model), torch.inference_mode():
            self.prepare()
            errors_P = self._find_errors(prompts)
            job = self._start(prompts, errors_P, sampling, step)
            while job.sequences.num_unfinished and not self._is_ended(job):
                prefill = job.scheduler.schedule_prefill()
                copies = job.scheduler.take_copies()
                if copies.size:
                    job.cache.copy_slots(*self._to_device(copies.T.copy()))
                if prefill is not None:
                    self._prefill(job, prefill)
                else:
                    job.decoding.run(lambda: self._is_ended(job))
            job.report.end(job.scheduler.num_preemptions)
            self.report = job.report
            return self._finish(prompts, errors_P, job)

    def score(self, rows: Sequence[Sequence[int]]) -> RowScores:
        """See `RolloutEngine.score`; by the model's own forward, as the trainer scores."""
        with self._turns.take("score", awake=True), _evaluating(self.model):
            return RowScores(compute_row_logprobs(self.model, rows), self.model.dtype)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """See `RolloutEngine.load_weights`. None: the model is the trainer's own, or was written to. No prefix outlives a call."""
        with self._turns.take("load_weights"):
            if weights is not None and self.group is not None:
                copy_shards(self.model.module, self.group, weights)
            elif weights is not None:
                copy_weights(self.model.module, weights)
            self.version = version

    def load_adapter(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.load_adapter`; into the adapter that the model has."""
        with self._turns.take("load_adapter"):
            own = adapter_weights(self.model)
            if not own:
                raise ValueError("the model has no adapter; send the weights, merged")
            copy_named(own, weights)
            self.version = version

    def sleep(self) -> None:
        """Frees the KV cache."""
        with self._turns.take("sleep"):
            self._turns.asleep = True
            self._free_cache()

    def wake(self) -> None:
        """Allows `generate` again; the cache comes with the first call, which knows its size."""
        self._turns.asleep = False

    def abort(self) -> None:
        """Ends a running `generate` after its present step; without one it does nothing."""
        self._turns.aborting.set()

    def metrics(self) -> Metrics:
        """See `RolloutEngine.metrics`; of a group one rank tells."""
        return {} if self.group is not None and self.group.ranks.rank else self.report.metrics()

    def close(self) -> None:
        """Frees cache and graphs; before the ranks of a group part, since nccl waits for graphs that hold its collectives."""
        self._free_cache()

    def _is_ended(self, job: _Job) -> bool:
        """Whether the call is to end before its rows do; ranks that generate together come to it at the same step."""
        is_aborting = self._turns.aborting.is_set()
        return is_aborting if self.group is None else self.group.is_ended(is_aborting, job.sequences.checksum)

    def _prefill(self, job: _Job, step: Step) -> None:
        """Feeds prompts, and rows that lost their blocks, to the model, and rows that decode beside them; a complete prompt's rows draw
        their first token."""
        job.report.prefill_tokens += int(step.counts.sum()) - step.num_beside
        job.report.beside_tokens += step.num_beside
        hidden_TD = self._compute_states(job, step)
        last_R = self._to_device(np.cumsum(step.counts)[step.sources] - 1)
        job.sequences.append(step.rows, self._draw(job, hidden_TD[last_R], step.rows))
        job.stops.mark_finished(job.sequences, step.rows)
        job.report.watch(job.sequences.num_unfinished)
        job.scheduler.postprocess(step.sequences, step.counts, step.rows)

    def _compute_states(self, job: _Job, step: Step) -> Tensor:
        """Hidden states [T, D] of all tokens that the step feeds."""
        if self.group is None:
            return self._run_pass(job, step)
        with self.group.tokens.splitting(int(step.counts.sum())):
            return self._run_pass(job, step)

    def _run_pass(self, job: _Job, step: Step) -> Tensor:
        tokens_T, positions_T = self._packed_input(job, step)
        paged = self._paged(job, step)
        if self._fused is None:
            return self.model.hidden_states(tokens_T, positions_T, paged)
        plan = self.model.plan_attention(paged)

        def attend(
            layer: int, module: nn.Module, query: Tensor, key: Tensor | None, value: Tensor | None, form: AttentionForm
        ) -> Tensor:
            assert key is not None and value is not None
            return plan.attend(module, query, key, value, form)

        nowhere_T = self._to_device(np.full(len(tokens_T), -1))
        tokens_T, positions_T = (part.to(self.model.device, non_blocking=True) for part in (tokens_T, positions_T))
        self._fused.reach(int(job.sequences.max_length.max()))
        return self._fused.hidden_states(tokens_T, positions_T, nowhere_T, job.cache, attend, with_kv=True)

    def _draw(self, job: _Job, hidden_RD: Tensor, rows: np.ndarray) -> Draws:
        positions, sampling = job.sequences.length[rows], job.sampling
        known = job.sequences.histories(rows) if sampling.repetition_penalty != 1.0 else None
        seen_RV = mark_seen(self.model, known)
        if self._graphs is None:
            return draw(self.model, hidden_RD, job.keys[rows], positions, sampling, seen_RV)
        keys_R, positions_R = self._to_device(np.stack([job.keys[rows], positions]))
        return to_host(
            draw_on_device(self.model, hidden_RD, keys_R, positions_R, sampling.temperature, sampling.shaping, seen_RV)
        )

    def _packed_input(self, job: _Job, step: Step) -> tuple[Tensor, Tensor]:
        owners_T = np.repeat(step.sequences, step.counts)
        firsts_T = np.repeat(np.cumsum(step.counts) - step.counts - step.starts, step.counts)
        positions_T = np.arange(len(owners_T)) - firsts_T
        tokens_T = job.sequences.tokens[owners_T, positions_T]
        return torch.from_numpy(tokens_T.astype(np.int64)), torch.from_numpy(positions_T)

    def _paged(self, job: _Job, step: Step) -> Paged:
        lengths = step.starts + step.counts
        width = -(-int(lengths.max()) // BLOCK_SIZE)
        return Paged(
            job.cache,
            torch.from_numpy(job.scheduler.block_table[step.sequences, :width]),
            torch.from_numpy(lengths),
            torch.from_numpy(np.append(0, np.cumsum(step.counts)).astype(np.int32)),
        )

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.model.device, non_blocking=True)

    def _find_errors(self, prompts: Batch) -> list[str | None]:
        """Why a prompt cannot be served, or None, for each prompt."""
        context = self.model.config.max_position_embeddings
        return [find_prompt_error(tokens, context, self.model.vocab_size) for tokens in prompts.arrays("prompt_tokens")]

    def _start(self, prompts: Batch, errors_P: list[str | None], sampling: SamplingParams, step: int) -> _Job:
        samples = sampling.samples_per_prompt
        nothing = np.zeros(0, np.int32)
        arrays = prompts.arrays("prompt_tokens")
        served = [nothing if error else tokens for tokens, error in zip(arrays, errors_P, strict=True)]
        sequences = Sequences(
            served,
            samples,
            sampling.max_new_tokens,
            self.model.config.max_position_embeddings,
            cuts=sampling.cuts,
        )
        sequences.finish[np.repeat(np.array([bool(error) for error in errors_P], np.bool_), samples)] = Finish.FAILED
        keys_R = compute_keys(
            sampling.seed,
            step,
            np.repeat(prompts.numpy("group_id"), samples),
            np.tile(np.arange(samples), len(served)),
        )
        cache = self._fit_cache(sequences)
        num_blocks = cache.num_blocks - self._num_idle_blocks
        limits = (self.settings.max_sequences, self.settings.prefill_tokens_per_step, self._compute_max_held_beside())
        scheduler = Scheduler(sequences, num_blocks, BLOCK_SIZE, *limits)
        eos_ids = collect_eos_ids(self.tokenizer, self.model.module.generation_config)
        stops = StopRules(sampling, eos_ids, self.tokenizer, self.model.vocab_size)
        decoder = self._build_decoder(cache, sampling, stops, sequences)
        report = RolloutReport(sequences.num_unfinished)
        decoding = Decoding(scheduler, stops, decoder, keys_R, report)
        return _Job(sequences, scheduler, stops, sampling, keys_R, cache, decoding, report)

    def _build_decoder(
        self, cache: PagedKVCache, sampling: SamplingParams, stops: StopRules, sequences: Sequences
    ) -> Decoder:
        if self._graphs is None:
            return StepDecoder(self.model, cache, sampling)
        self._graphs.prepare(
            cache,
            (cache.num_blocks - 1) * BLOCK_SIZE,
            sampling,
            np.array(stops.ids, np.int64),
            most_seats=min(self.settings.max_sequences, sequences.num_rows),
            longest=int(sequences.max_length.max(initial=1)),
        )
        return self._graphs

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
            kept_counts=None if rows.num_kept is None else [rows.num_kept[i, :end] for i, end in enumerate(ends)],
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
        least, most = plan_num_blocks(sequences, BLOCK_SIZE, self.settings.max_sequences)
        if self._is_cache_missing():
            self._free_cache()
            self._max_blocks = self._compute_max_blocks()
        wanted = min(most + self._num_idle_blocks, self._max_blocks)
        if wanted < least + self._num_idle_blocks:
            raise ConfigError(
                f"the KV cache holds {wanted * BLOCK_SIZE} tokens and the longest row may need {least * BLOCK_SIZE}; "
                "raise rollout.native.kv_cache_tokens or rollout.native.kv_memory_fraction, or lower sampling.max_new_tokens"
            )
        if self._cache is None or self._cache.num_blocks < wanted:
            self._free_cache()
            self._cache = self.model.new_cache(wanted)
        return self._cache

    def _is_cache_missing(self) -> bool:
        """Whether this rank, or one that generates with it, has given its cache back: graphs are captured by all or by none."""
        is_missing = self._cache is None
        return is_missing if self.group is None else self.group.least(not is_missing) == 0

    def _compute_max_blocks(self) -> int:
        own = self._compute_own_max_blocks()
        return own if self.group is None else self.group.least(own)

    def _compute_own_max_blocks(self) -> int:
        if self.settings.kv_cache_tokens is not None:
            return self.settings.kv_cache_tokens // BLOCK_SIZE
        block_bytes = BLOCK_SIZE * self._kv_bytes_per_token
        if self.model.device.type != "cuda":
            return _CPU_CACHE_BYTES // block_bytes
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self.model.device)
        return int(free_bytes * self.settings.kv_memory_fraction) // block_bytes

    @property
    def _kv_bytes_per_token(self) -> int:
        """Keys and values of a token, all layers."""
        model = self.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize

    def _compute_max_held_beside(self) -> int:
        """Tokens that rows may hold and still decode in passes over prompts, see `Scheduler`; the same on ranks that generate together.

        Such a pass gathers keys and values, which writes them and reads them again, and saves one reading of the weights. Steps without
        graphs gather them as well.
        """
        if self._graphs is None:
            return sys.maxsize
        own = sum(weight.nbytes for weight in self.model.module.parameters()) // (2 * self._kv_bytes_per_token)
        return own if self.group is None else self.group.least(own)

    @property
    def _num_idle_blocks(self) -> int:
        """Blocks of the cache that no row gets: idle seats of a graph write there."""
        return 0 if self._graphs is None else 1

    def _free_cache(self) -> None:
        self._cache = None
        if self._graphs is not None:
            self._graphs.release()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()


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
