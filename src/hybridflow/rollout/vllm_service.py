"""vLLM as a server that already runs, over HTTP. How it has to be started, and kept from others, is in docs/rollout.md."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.rollout.adapters import ServedAdapter, written_adapter
from hybridflow.rollout.base import RowScores, WatchedWeights, check_prompts
from hybridflow.rollout.buckets import find_memory_directory, write_weight_files
from hybridflow.rollout.requests import (
    FiniteGuard,
    Request,
    RequestPlan,
    Sample,
    ServedModel,
    build_batch,
    find_sample_error,
    plan_requests,
    read_scores,
    read_served_model,
)
from hybridflow.rollout.service import RefusedError, Service, ServiceError
from hybridflow.rollout.turns import Turns
from hybridflow.rollout.vllm import RECEIVER, VllmSettings
from hybridflow.types import Metrics, SamplingParams

_log = logging.getLogger(__name__)

_FILE_BYTES = 1024**3
_READY_S = 120.0


class VllmServiceEngine:
    """Generates with a vLLM server; implements `RolloutEngine`. Made by `connect_vllm_service`.

    A row is a request: token ids to /v1/completions, and token ids back. Rows that are under way when `abort` comes are EMPTY, since the
    server tells of a row when it is done. New weights go through files, which the server reads (`reload_weights`): from memory where
    both are on one machine. Nobody else should use the server meanwhile.
    """

    def __init__(
        self, service: Service, model: ServedModel, settings: VllmSettings, adapter: ServedAdapter | None = None
    ) -> None:
        self.model, self.settings, self.adapter = model, settings, adapter
        self._loaded: str | None = None
        self.version = 0
        self._service = service
        self._turns = Turns()
        self._guard = FiniteGuard()
        self._saw_nan = False

    @property
    def longest_row(self) -> int:
        """See `RolloutEngine.longest_row`."""
        return self.model.context

    def generate(self, prompts: Batch, sampling: SamplingParams, *, step: int) -> Batch:
        """See `RolloutEngine.generate`."""
        check_prompts(prompts)
        with self._take("generate", awake=True):
            plan = plan_requests(prompts, sampling, step, self.model)
            samples = self._guard.fail(plan) or self._run(plan)
            failed = any(find_sample_error(sample) is not None for sample in samples.values())
            self._saw_nan |= failed and not self._guard.is_on
            return build_batch(plan, samples, self.version)

    def score(self, rows: Sequence[Sequence[int]]) -> RowScores:
        """See `RolloutEngine.score`."""
        with self._take("score", awake=True):
            spoilt = self._guard.fail_scores(rows, self.model.dtype)
            return spoilt or RowScores([self._score(row) for row in rows], self.model.dtype)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """See `RolloutEngine.load_weights`; there is no shared storage, so weights are always given."""
        if weights is None:
            raise ValueError("a vLLM server has its own copy of the weights; give them to load_weights")
        with self._take("load_weights", awake=True):
            watched = WatchedWeights(weights, self.model.shapes, checks_finite=True)
            place = self.settings.weights_dir or find_memory_directory()
            with tempfile.TemporaryDirectory(prefix="hybridflow-", dir=place) as directory:
                write_weight_files(watched, directory, _FILE_BYTES)
                watched.check()
                # The server forgets its adapters with its weights.
                self._drop_adapter()
                self._develop("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}})
            self._guard.note("weights", is_finite=watched.is_finite)
            self._begin(version)

    def load_adapter(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.load_adapter`. The server has to be started with `--enable-lora`, see docs/rollout.md."""
        with (
            self._take("load_adapter", awake=True),
            written_adapter(self.adapter, weights, self.settings.weights_dir) as (directory, is_finite),
        ):
            self._replace_adapter(directory)
            self._guard.note("adapter", is_finite=is_finite)
            self._begin(version)

    def sleep(self) -> None:
        """Lets the server give back its cache and move its weights to the host, as far as it can (`--enable-sleep-mode`, a GPU)."""
        with self._take("sleep"):
            if not self._turns.asleep:
                self._develop("/sleep", level=1)
            self._turns.asleep = True

    def wake(self) -> None:
        """Makes `generate` possible again."""
        self._service.resume()
        if self._turns.asleep:
            self._develop("/wake_up")
        self._turns.asleep = False

    def abort(self) -> None:
        """Ends a running `generate`: its requests are broken off, upon which the server drops them."""
        self._turns.aborting.set()
        self._service.interrupt()

    def metrics(self) -> Metrics:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing: the server is not ours to end."""

    @contextlib.contextmanager
    def _take(self, verb: str, *, awake: bool = False) -> Iterator[None]:
        with self._turns.take(verb, awake=awake):
            self._service.resume()
            yield

    def _score(self, row: Sequence[int]) -> NDArray[np.float32]:
        body = {"prompt": list(row), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        (choice,) = self._service.post("/v1/completions", name_model(body, self._loaded))["choices"]
        return read_scores(row, choice["prompt_logprobs"])

    def _run(self, plan: RequestPlan) -> dict[int, Sample]:
        """Asks for all rows, as many at a time as there may be connections."""
        with ThreadPoolExecutor(min(self.settings.connections, max(len(plan.requests), 1))) as threads:
            samples = threads.map(lambda request: self._ask(plan, request), plan.requests)
            return {request.row: sample for request, sample in zip(plan.requests, samples, strict=True)}

    def _ask(self, plan: RequestPlan, request: Request) -> Sample:
        if self._turns.aborting.is_set():
            return Sample()
        try:
            return read_sample(self._service.post("/v1/completions", build_body(plan, request, self._loaded)))
        except RefusedError as error:
            return Sample(error=str(error))
        except ServiceError:
            if self._turns.aborting.is_set():
                return Sample()
            raise

    def _replace_adapter(self, directory: str) -> None:
        """Each under a name of its own, that of its directory: the server numbers adapters by their names, and keys its cache by them."""
        name = os.path.basename(directory)
        self._give_adapter(name, directory)
        self._drop_adapter()
        self._loaded = name

    def _give_adapter(self, name: str, directory: str) -> None:
        try:
            self._service.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": directory})
        except RefusedError as error:
            # Where its first answer was lost and it is asked again, it has it.
            if name not in (model["id"] for model in self._service.get("/v1/models")["data"]):
                max_rank = self.adapter.max_rank if self.adapter else 1
                raise ConfigError(
                    f"rollout.lora: {self._service.url} takes no adapter ({error}); start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "
                    f"and --enable-lora --max-lora-rank {max_rank}, or set rollout.lora=merged"
                ) from None

    def _drop_adapter(self) -> None:
        if self._loaded is None:
            return
        try:
            self._service.post("/v1/unload_lora_adapter", {"lora_name": self._loaded})
        except RefusedError as error:
            # It is gone already where this is asked again.
            if error.status != 404:
                raise
        self._loaded = None

    def _begin(self, version: int) -> None:
        if self._saw_nan:
            self._clear_cache()
        self._drop_prefixes()
        self.version = version

    def _clear_cache(self) -> None:
        """Where rows have failed, the cache may hold what is not finite, which reaches other rows on some devices."""
        try:
            self._develop("/collective_rpc", {"method": "clear_kv_cache"})
        except RefusedError:
            _log.warning(
                "rows failed on %s, which cannot clear its cache without --worker-extension-cls %s; restart it if they go on failing",
                self._service.url,
                RECEIVER,
            )
        self._saw_nan = False

    def _drop_prefixes(self) -> None:
        answer = self._develop("/reset_prefix_cache")
        if answer is not None and not answer["success"]:
            raise ServiceError(
                f"{self._service.url} did not drop its prefix cache: it has requests of others under way"
            )

    def _develop(self, path: str, body: Any = None, **query: int) -> Any:
        try:
            return self._service.post(path, body, **query)
        except RefusedError as error:
            if error.status != 404:
                raise
            raise ConfigError(f"{self._service.url} has no {path}; start it with VLLM_SERVER_DEV_MODE=1") from None


def connect_vllm_service(
    directory: str | os.PathLike[str], settings: VllmSettings, adapter: ServedAdapter | None = None
) -> VllmServiceEngine:
    """The engine for the server at `settings.url`, which serves the model of this directory; with an adapter for `load_adapter`.

    Waits up to two minutes for the server. Raises ConfigError for one whose answers could not be used.
    """
    if settings.url is None:
        raise ConfigError("rollout.vllm.url: there is none; give the address of a vLLM server")
    service = Service(settings.url, settings.timeout_s)
    service.wait_until_ready("/health", _READY_S)
    (served, *_) = service.get("/v1/models")["data"]
    limits = [limit for limit in (settings.max_model_len, served["max_model_len"]) if limit is not None]
    _check_answers(service)
    return VllmServiceEngine(service, read_served_model(directory, min(limits)), settings, adapter)


def build_body(plan: RequestPlan, request: Request, adapter: str | None = None) -> dict[str, Any]:
    """A row as /v1/completions takes it, from the base, or with an adapter that the server has.

    Our own ids stop a row, those of the model among them, so vLLM's own do not.
    """
    sampling = plan.sampling
    body = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(plan.stops.strings),
        "stop_token_ids": plan.stops.ids,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    return name_model(body, adapter)


def name_model(body: dict[str, Any], adapter: str | None) -> dict[str, Any]:
    """The request, to the base or to one of the server's adapters."""
    return body if adapter is None else body | {"model": adapter}


def read_sample(answer: Any) -> Sample:
    """The sample that an answer of /v1/completions holds."""
    (choice,) = answer["choices"]
    return Sample(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"] or "abort")


def _check_answers(service: Service) -> None:
    """Asks for one token of one: its log-probability is 0 in the distribution sampled from, and in no other."""
    body = {"prompt": [0], "max_tokens": 1, "top_k": 1, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
    (choice,) = service.post("/v1/completions", body)["choices"]
    if not choice.get("token_ids"):
        raise ConfigError(f"rollout.vllm.url: {service.url} gives no token ids; it needs vLLM 0.20 or newer")
    if abs(choice["logprobs"]["token_logprobs"][0]) > 1e-6:
        raise ConfigError(
            f"rollout.vllm.url: {service.url} gives log-probabilities before temperature, top-k and top-p; start it with "
            "--logprobs-mode processed_logprobs"
        )
