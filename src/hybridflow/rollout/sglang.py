"""SGLang inside the worker (`sglang.Engine`); it needs a GPU. What of it has been run, and with which release, is in docs/rollout.md."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config import ConfigError, Field, settings
from hybridflow.rollout.base import WatchedWeights, WeightsError, check_prompts
from hybridflow.rollout.buckets import iter_buckets
from hybridflow.rollout.environment import FULL_FLOAT32, environment
from hybridflow.rollout.requests import (
    Request,
    RequestPlan,
    Sample,
    ServedModel,
    build_batch,
    plan_requests,
    read_served_model,
)
from hybridflow.rollout.turns import Turns
from hybridflow.types import Metrics, SamplingParams

_BUCKET_BYTES = 512 * 1024**2
# It ends a row two tokens before its context, and takes no prompt within six of it.
_SPARE_TOKENS = 8
_FLUSH_S, _FLUSH_POLL_S, _ABORT_POLL_S, _END_S = 10.0, 0.02, 0.02, 30.0


@settings
class SglangSettings:
    """SGLang in the worker."""

    mem_fraction_static: float = Field(default=0.4, gt=0.0, le=1.0)
    """Share of the GPU's memory for SGLang's weights and cache together, beside the trainer's."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt and response together, in tokens; null takes the model's context."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one engine is spread over."""


class SglangEngine:
    """Generates with SGLang, whose scheduler runs in processes of its own; implements `RolloutEngine`. Made by `build_sglang_engine`.

    Its log-probabilities are those after temperature and before top-k and top-p. So where sampling sets these, they are not those of the
    distribution sampled from; training with SGLang never sets them. A row's seed counts where SGLang's inference is deterministic
    (`enable_deterministic_inference`), which is therefore on; `check_sglang_sampling` says what is refused. A whole `generate` is one
    call of SGLang.
    A process of its own that fails ends this one too (SIGQUIT): on Ray the worker is replaced, in one process the run is over.
    """

    def __init__(self, engine: Any, model: ServedModel) -> None:
        self.model = model
        self.version = 0
        self._engine = engine
        self._turns = Turns()

    @property
    def longest_row(self) -> int:
        """See `RolloutEngine.longest_row`."""
        return self.model.context

    def generate(self, prompts: Batch, sampling: SamplingParams, *, step: int) -> Batch:
        """See `RolloutEngine.generate`."""
        check_prompts(prompts)
        with self._turns.take("generate", awake=True):
            plan = plan_requests(prompts, sampling, step, self.model)
            if not plan.requests:
                return build_batch(plan, {}, self.version)
            params = [build_params(plan, request) for request in plan.requests]
            watch = self._engine.loop.create_task(self._end_when_aborted())
            try:
                answers = self._engine.generate(
                    input_ids=[request.prompt for request in plan.requests], sampling_params=params, return_logprob=True
                )
            finally:
                watch.cancel()
            rows = [request.row for request in plan.requests]
            samples = {row: read_sample(plan, answer) for row, answer in zip(rows, answers, strict=True)}
            return build_batch(plan, samples, self.version)

    def score(self, rows: Sequence[Sequence[int]]) -> None:
        """See `RolloutEngine.score`; it does not tell."""

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """See `RolloutEngine.load_weights`; there is no shared storage, so weights are always given."""
        if weights is None:
            raise ValueError("SGLang has its own copy of the weights; give them to load_weights")
        with self._turns.take("load_weights", awake=True):
            watched = WatchedWeights(weights, self.model.shapes)
            for bucket in iter_buckets(watched, _BUCKET_BYTES):
                taken, told = self._engine.update_weights_from_tensor(bucket, flush_cache=False)
                if not taken:
                    raise WeightsError(f"SGLang did not take the weights ({told}); set rollout.engine=native")
            watched.check()
            self._drop_prefixes()
            self.version = version

    def load_adapter(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError: it is built without an adapter."""
        raise ValueError("SGLang is given the weights with the adapter merged in; set rollout.lora=merged")

    def sleep(self) -> None:
        """Gives back the cache and moves the weights to the host."""
        with self._turns.take("sleep"):
            if not self._turns.asleep:
                # It gives nothing back, and ends, while it takes anything for running.
                self._drop_prefixes()
                self._engine.release_memory_occupation()
            self._turns.asleep = True

    def wake(self) -> None:
        """Makes `generate` possible again."""
        if self._turns.asleep:
            self._engine.resume_memory_occupation()
        self._turns.asleep = False

    def abort(self) -> None:
        """Ends a running `generate`."""
        self._turns.aborting.set()

    def metrics(self) -> Metrics:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Ends SGLang's processes; its own `shutdown` would end every child of this process."""
        watchdog = self._engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        pids = set(self._engine.get_all_child_pids())
        for process in multiprocessing.active_children():
            if process.pid in pids:
                process.kill()
                process.join(_END_S)
        atexit.unregister(self._engine.shutdown)

    async def _end_when_aborted(self) -> None:
        """Runs in the loop of `generate`, whose thread SGLang's sockets belong to; again and again, since rows may be sent meanwhile."""
        while True:
            await asyncio.sleep(_ABORT_POLL_S)
            if self._turns.aborting.is_set():
                self._engine.tokenizer_manager.abort_request(abort_all=True)

    def _drop_prefixes(self) -> None:
        """What is cached of older weights goes; waits for SGLang to see that its last batch is done."""
        deadline_s = time.monotonic() + _FLUSH_S
        while not self._engine.flush_cache().success:
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"SGLang still has requests under way after {_FLUSH_S:g} s, so its cache cannot be dropped; set rollout.engine=native, "
                    "and report it"
                )
            time.sleep(_FLUSH_POLL_S)


def check_sglang_sampling(sampling: SamplingParams, key: str = "sampling") -> None:
    """Raises ConfigError for what SGLang does otherwise than the other engines, or not at all; key: where these settings stand."""
    if sampling.repetition_penalty != 1.0:
        raise ConfigError(
            f"{key}.repetition_penalty: {sampling.repetition_penalty:g} counts the prompt, and SGLang penalises by the response alone; "
            "set it to 1, or rollout.engine=native"
        )
    if sampling.min_p > 0.0:
        raise ConfigError(
            f"{key}.min_p: {sampling.min_p:g} is what SGLang cannot draw by with a seed for each row; set it to 0, or rollout.engine=native"
        )


def build_params(plan: RequestPlan, request: Request) -> dict[str, Any]:
    """SGLang's sampling parameters of a row. Where it is to ignore the model's own ids it looks at none: see `read_sample`."""
    sampling = plan.sampling
    check_sglang_sampling(sampling)
    return {
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop": list(plan.stops.strings) or None,
        "stop_token_ids": plan.stops.ids,
        "ignore_eos": sampling.ignore_eos,
        "no_stop_trim": True,
        "sampling_seed": request.seed,
    }


def read_sample(plan: RequestPlan, answer: Any) -> Sample:
    """The sample that one of SGLang's answers holds: `output_token_logprobs` is a list of (log-probability, id, text).

    SGLang looks at the length before it looks for what stops a row, and where the model's own ids are ignored it passes over ours too. So
    both are looked for here again, and the row is cut after the first of our ids.
    """
    tokens = [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]
    logprobs = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    reason = (answer["meta_info"]["finish_reason"] or {"type": "abort"})["type"]
    end = next((at + 1 for at, token in enumerate(tokens) if token in plan.stops.ids), None)
    stops = end is not None or any(string in answer["text"] for string in plan.stops.strings)
    return Sample(tokens[:end], logprobs[:end], "stop" if stops else reason)


def build_sglang_engine(
    directory: str | os.PathLike[str], settings: SglangSettings | None = None, *, dtype: torch.dtype = torch.float32
) -> SglangEngine:
    """Starts SGLang on a Hugging Face directory with weights. Raises ConfigError where it is not there or does not start."""
    settings = settings or SglangSettings()
    model = read_served_model(directory, settings.max_model_len)
    arguments = dict(
        model_path=str(directory),
        dtype=str(dtype).removeprefix("torch."),
        mem_fraction_static=settings.mem_fraction_static,
        context_length=model.context + _SPARE_TOKENS,
        tp_size=settings.tensor_parallel_size,
        enable_memory_saver=True,
        enable_weights_cpu_backup=True,
        enable_deterministic_inference=True,
        # FlashAttention 3, its choice, has no float32; without a seed it draws one from Python's generator, which is the trainer's.
        attention_backend="triton" if dtype == torch.float32 else None,
        random_seed=0,
    )
    try:
        import sglang

        with environment(SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1", **FULL_FLOAT32):
            engine = sglang.Engine(**arguments)
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine: SGLang cannot be imported ({error}); pip install sglang, or set rollout.engine=native"
        ) from error
    except (ValueError, RuntimeError) as error:
        told = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(
            f"rollout.engine: SGLang does not start on {directory} ({told}); change rollout.sglang, or set rollout.engine=native"
        ) from error
    _give_termination_back(engine)
    return SglangEngine(engine, model)


def _give_termination_back(engine: Any) -> None:
    """Takes SIGTERM from SGLang, whose first call gives it to a loop that stands still between calls: a run told to end would go on."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)
    engine.flush_cache()
    engine.loop.remove_signal_handler(signal.SIGTERM)
    if before is not None:
        signal.signal(signal.SIGTERM, before)
