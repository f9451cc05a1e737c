"""vLLM inside the worker, with its own copy of the weights; all that differs between vLLM's versions is here and in `vllm_worker.py`.

Its documented interface is the same from 0.20 to 0.32 as far as it is used here. `make test-vllm` runs it on a CPU with 0.32.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config import ConfigError, Field, settings
from hybridflow.config.schema import fields
from hybridflow.rollout.adapters import ServedAdapter, written_adapter
from hybridflow.rollout.base import RowScores, WatchedWeights, check_prompts
from hybridflow.rollout.buckets import export_buffer, find_memory_directory, iter_buckets, pack, write_weight_files
from hybridflow.rollout.environment import FULL_FLOAT32, environment
from hybridflow.rollout.requests import (
    FiniteGuard,
    RequestPlan,
    Sample,
    ServedModel,
    build_batch,
    plan_requests,
    read_scores,
    read_served_model,
)
from hybridflow.rollout.turns import Turns
from hybridflow.types import Metrics, SamplingParams

_BUCKET_BYTES = 256 * 1024**2
_CPU_CACHE_BYTES = 1024**3
RECEIVER = "hybridflow.rollout.vllm_worker.WeightReceiver"
"""What vLLM takes as `worker_extension_cls`; by name, since its workers import it themselves."""


@settings
class VllmSettings:
    """vLLM: in the worker, or with `url` a server that already runs."""

    gpu_memory_utilization: float = Field(default=0.4, gt=0.0, le=1.0)
    """Share of the GPU's memory for vLLM's weights and cache together, beside the trainer's; on a CPU its cache takes 1 GiB."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt and response together, in tokens; null takes the model's context. A smaller one lets more rows run at a time."""
    enforce_eager: bool = False
    """Runs without captured CUDA graphs: starts sooner, decodes more slowly."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one engine is spread over; above 1 vLLM takes the first ones that the worker sees."""
    sleep_level: Literal[1, 2] = 1
    """What `sleep` gives back on a GPU: 1 the cache, with the weights moved to the host; 2 the weights too, and they have to be sent anew
    before the next rollout."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/]+/?$")
    """Address of a vLLM server that already runs, e.g. http://127.0.0.1:8000; null runs vLLM in the worker."""
    timeout_s: float = Field(default=1800.0, gt=0.0)
    """Longest wait for one answer of the server."""
    connections: int = Field(default=256, ge=1)
    """Most requests that are with the server at a time."""
    weights_dir: str | None = None
    """Directory that this process and the server both see, for new weights; null takes shared memory, for a server on this machine."""

    def __post_init__(self) -> None:
        idle = _IN_WORKER if self.url is not None else _WITH_SERVER
        declared, values = fields(type(self)), vars(self)
        changed = [name for name in idle if values[name] != declared[name].default]
        if changed and self.url is not None:
            raise ValueError(f"{changed[0]} is the server's own to set where there is a url; leave it out")
        if changed:
            raise ValueError(f"{changed[0]} belongs to a server that already runs; give its url, or leave it out")


_IN_WORKER = ("gpu_memory_utilization", "enforce_eager", "tensor_parallel_size", "sleep_level")
_WITH_SERVER = ("timeout_s", "connections", "weights_dir")


class VllmEngine:
    """Generates with vLLM; implements `RolloutEngine`. Made by `build_vllm_engine`.

    Each row is a request with a seed of its own, so a row's samples depend neither on the company nor on the order, as far as the
    arithmetic does not: vLLM promises a seed and a tolerance, not bits. Stop strings are looked for by vLLM, in text that follows the
    prompt's; our own engine looks at the response's text alone.

    llm:         vLLM's `LLM`.
    own_process: whether its workers run outside this process.
    adapter:     that `load_adapter` gives values to; None: there is none.
    """

    def __init__(
        self,
        llm: Any,
        model: ServedModel,
        settings: VllmSettings,
        *,
        on_gpu: bool,
        own_process: bool,
        adapter: ServedAdapter | None = None,
    ) -> None:
        self.model, self.settings, self.adapter = model, settings, adapter
        self._loaded: Any = None
        self.version = 0
        self._llm, self._on_gpu, self._own_process = llm, on_gpu, own_process
        self._turns = Turns()
        self._calls = 0
        self._guard = FiniteGuard()
        self._saw_nan = False
        self._has_weights = True

    @property
    def longest_row(self) -> int:
        """See `RolloutEngine.longest_row`."""
        return self.model.context

    def generate(self, prompts: Batch, sampling: SamplingParams, *, step: int) -> Batch:
        """See `RolloutEngine.generate`."""
        check_prompts(prompts)
        with self._turns.take("generate", awake=True):
            if not self._has_weights:
                raise RuntimeError(
                    "vLLM gave its weights back (rollout.vllm.sleep_level=2); call load_weights() before generate()"
                )
            plan = plan_requests(prompts, sampling, step, self.model)
            samples = self._guard.fail(plan) or self._run(plan)
            self._saw_nan |= not all(np.all(np.isfinite(sample.logprobs)) for sample in samples.values())
            return build_batch(plan, samples, self.version)

    def score(self, rows: Sequence[Sequence[int]]) -> RowScores:
        """See `RolloutEngine.score`."""
        from vllm import SamplingParams as VllmParams

        with self._turns.take("score", awake=True):
            spoilt = self._guard.fail_scores(rows, self.model.dtype)
            if spoilt is not None:
                return spoilt
            params = VllmParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
            scores = []
            # One by one: with an adapter, vLLM's head on a CPU takes all that it scores at once to be of one request.
            for row in rows:
                prompt = {"prompt_token_ids": list(row)}
                (answer,) = self._llm.generate(prompt, params, lora_request=self._loaded, use_tqdm=False)
                scores.append(read_scores(row, answer.prompt_logprobs))
            return RowScores(scores, self.model.dtype)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """See `RolloutEngine.load_weights`; there is no shared storage, so weights are always given."""
        if weights is None:
            raise ValueError("vLLM has its own copy of the weights; give them to load_weights")
        with self._turns.take("load_weights", awake=True):
            watched = WatchedWeights(weights, self.model.shapes, checks_finite=True)
            self._send(watched)
            self._guard.note("weights", is_finite=watched.is_finite)
            watched.check()
            self._has_weights = True
            self._begin(version)

    def load_adapter(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.load_adapter`."""
        with (
            self._turns.take("load_adapter", awake=True),
            written_adapter(self.adapter, weights) as (directory, is_finite),
        ):
            self._replace_adapter(directory)
            self._guard.note("adapter", is_finite=is_finite)
            self._begin(version)

    def sleep(self) -> None:
        """Gives back the cache, and the weights' place on the GPU. On a CPU vLLM keeps its memory."""
        with self._turns.take("sleep"):
            self._drop_prefixes()
            if self._on_gpu and not self._turns.asleep:
                self._llm.sleep(level=self.settings.sleep_level)
                self._has_weights = self.settings.sleep_level == 1
            self._turns.asleep = True

    def wake(self) -> None:
        """Makes `generate` possible again; after sleep level 2 not before `load_weights`."""
        if self._on_gpu and self._turns.asleep:
            self._llm.wake_up()
        self._turns.asleep = False

    def abort(self) -> None:
        """Ends a running `generate` after vLLM's present step."""
        self._turns.aborting.set()

    def metrics(self) -> Metrics:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Ends vLLM's own processes, where it has any."""
        self._llm.llm_engine.engine_core.shutdown()

    def _run(self, plan: RequestPlan) -> dict[int, Sample]:
        """Steps vLLM until every request is done, or all are to end."""
        engine = self._llm.llm_engine
        self._calls += 1
        rows = {f"{self._calls}-{request.row}": request.row for request in plan.requests}
        answers = {row: _Answer() for row in rows.values()}
        try:
            for name, request in zip(rows, plan.requests, strict=True):
                params = build_params(plan, request.max_tokens, request.seed)
                prompt = {"prompt_token_ids": request.prompt}
                engine.add_request(name, prompt, params, lora_request=self._loaded)
            while engine.has_unfinished_requests() and not self._turns.aborting.is_set():
                for output in engine.step():
                    answers[rows[output.request_id]].add(output.outputs[0])
        finally:
            engine.abort_request([name for name, row in rows.items() if not answers[row].finish_reason])
            while engine.has_unfinished_requests():
                engine.step()
        return {row: answer.sample() for row, answer in answers.items()}

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._own_process and not self._on_gpu:
            self._send_files(weights)
            return
        self._llm.collective_rpc("begin_weights")
        buffer = torch.empty(0, dtype=torch.uint8, device="cuda" if self._own_process else "cpu")
        for bucket in iter_buckets(weights, _BUCKET_BYTES):
            if self._own_process:
                buffer = self._send_buffer(bucket, buffer)
            else:
                self._llm.collective_rpc("take_weights", args=(bucket,))
        self._llm.collective_rpc("end_weights")

    def _send_buffer(self, bucket: list[tuple[str, Tensor]], buffer: Tensor) -> Tensor:
        """Lets vLLM's workers read a bucket from this process's memory, by CUDA IPC; returns the buffer, to be used again."""
        entries, buffer = pack(bucket, buffer)
        torch.cuda.synchronize()
        places = [list(astuple(entry)) for entry in entries]
        self._llm.collective_rpc("take_buffer", args=(places, export_buffer(buffer), buffer.numel()))
        return buffer

    def _send_files(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with tempfile.TemporaryDirectory(prefix="hybridflow-", dir=find_memory_directory()) as directory:
            write_weight_files(weights, directory, _BUCKET_BYTES)
            self._llm.collective_rpc("take_files", args=(directory,))

    def _replace_adapter(self, directory: str) -> None:
        """Each version under an id of its own, so that nothing can be taken for it that vLLM keeps of another."""
        from vllm.lora.request import LoRARequest

        engine, last = self._llm.llm_engine, self._loaded
        number = 1 if last is None else last.lora_int_id + 1
        if last is not None:
            engine.remove_lora(last.lora_int_id)
        self._loaded = LoRARequest(f"adapter-{number}", number, directory)
        if not engine.add_lora(self._loaded):
            raise RuntimeError(f"vLLM did not take the adapter in {directory}; set rollout.lora=merged, and report it")

    def _begin(self, version: int) -> None:
        """What was cached of older weights is dropped; all of it where that may not be finite."""
        if self._saw_nan:
            self._llm.collective_rpc("clear_kv_cache")
            self._saw_nan = False
        self._drop_prefixes()
        self.version = version

    def _drop_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache, so samples could mix old and new weights")


class _Answer:
    """What has come of a request so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason = ""

    def add(self, output: Any) -> None:
        """Takes up a piece of vLLM's answer."""
        self.tokens.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs.extend(output.logprobs.logprobs)
        self.finish_reason = output.finish_reason or ""

    def sample(self) -> Sample:
        """The whole; one without an end was aborted."""
        return Sample(self.tokens, self.logprobs, self.finish_reason or "abort")


def build_params(plan: RequestPlan, max_tokens: int, seed: int) -> Any:
    """vLLM's sampling parameters of one request. Our own ids stop a row, those of the model among them, so vLLM's own do not."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    sampling = plan.sampling
    return VllmParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=list(plan.stops.strings),
        stop_token_ids=plan.stops.ids,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(plan.stops.strings),
        output_kind=RequestOutputKind.DELTA,
    )


def build_vllm_engine(
    directory: str | os.PathLike[str],
    settings: VllmSettings | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    on_gpu: bool = False,
    own_process: bool = False,
    has_weights: bool = True,
    adapter: ServedAdapter | None = None,
) -> VllmEngine:
    """Starts vLLM on a Hugging Face directory.

    own_process: runs vLLM's workers outside this process: where this one is a rank of a process group, which vLLM would take for its own.
    has_weights: False where the directory holds none; the first ones then come by `load_weights`.
    adapter:     that `load_adapter` is to give values to, beside the directory's weights; until it has, there is no adapter.

    Raises ConfigError where vLLM is not there or does not start. The global random state is left as it was.
    """
    settings = settings or VllmSettings()
    arguments = _engine_arguments(directory, settings, dtype, on_gpu=on_gpu, has_weights=has_weights)
    if adapter is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter.max_rank}
    own_process = own_process or settings.tensor_parallel_size > 1
    if on_gpu and dtype == torch.float32 and not own_process:
        # Its kernels are compiled in this process, when they are first met.
        os.environ.update(FULL_FLOAT32)
    with _random_state_kept(), environment(VLLM_ENABLE_V1_MULTIPROCESSING=str(int(own_process)), **FULL_FLOAT32):
        llm = _start(arguments)
    model = read_served_model(directory, settings.max_model_len)
    return VllmEngine(llm, model, settings, on_gpu=on_gpu, own_process=own_process, adapter=adapter)


def _engine_arguments(
    directory: str | os.PathLike[str], settings: VllmSettings, dtype: torch.dtype, *, on_gpu: bool, has_weights: bool
) -> dict[str, Any]:
    # On a CPU its blocks are of 128 tokens otherwise, and no shorter prefix is shared, nor seen by a probe of short prompts.
    own = {"enable_sleep_mode": True} if on_gpu else {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "block_size": 32}
    return own | dict(
        model=str(directory),
        dtype=str(dtype).removeprefix("torch."),
        load_format="auto" if has_weights else "dummy",
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_model_len=settings.max_model_len,
        enforce_eager=settings.enforce_eager or not on_gpu,
        tensor_parallel_size=settings.tensor_parallel_size,
        seed=0,
        # Of the distribution sampled from, with all that sampling does to it.
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        generation_config="vllm",
        disable_log_stats=True,
        worker_extension_cls=RECEIVER,
    )


def _start(arguments: dict[str, Any]) -> Any:
    try:
        from vllm import LLM

        return LLM(**arguments)
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine: vLLM cannot be imported ({error}); pip install vllm, or set rollout.engine=native"
        ) from error
    except (ValueError, RuntimeError, TypeError) as error:
        told = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(
            f"rollout.engine: vLLM {importlib.metadata.version('vllm')} does not start on {arguments['model']} ({told}); "
            "change rollout.vllm, or set rollout.engine=native"
        ) from error


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    # vLLM seeds the generators of Python, numpy and torch, which are the trainer's too.
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
