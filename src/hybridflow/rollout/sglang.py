"""SGLang inside the worker, written to its documented interface (`sglang.Engine`, 0.5.12 to 0.5.17).

It needs a GPU and has not been run: neither these lines nor the contract tests, which are there for it and are skipped without SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config import ConfigError, Field, settings
from hybridflow.rollout.base import WatchedWeights, check_prompts
from hybridflow.rollout.buckets import iter_buckets
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


@settings
class SglangSettings:
    """SGLang in the worker. Not tested; see docs/rollout.md."""

    mem_fraction_static: float = Field(default=0.4, gt=0.0, le=1.0)
    """Share of the GPU's memory for SGLang's weights and cache together, beside the trainer's."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt and response together, in tokens; null takes the model's context."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one engine is spread over."""


class SglangEngine:
    """Generates with SGLang, whose scheduler runs in processes of its own; implements `RolloutEngine`. Made by `build_sglang_engine`.

    Its log-probabilities are those after temperature and before top-k, top-p and min-p. So where sampling sets these, they are not those
    of the distribution sampled from; training with SGLang never sets them. Its min-p comes last, where ours comes first. It penalises
    repetition of the response alone, where Transformers and vLLM count the prompt too, so a penalty is refused. A row's seed counts where
    SGLang's inference is deterministic (`enable_deterministic_inference`), which is therefore on. A whole `generate` is one call of SGLang.
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
            answers = self._engine.generate(
                input_ids=[request.prompt for request in plan.requests],
                sampling_params=[build_params(plan, request) for request in plan.requests],
                return_logprob=True,
            )
            samples = {request.row: read_sample(answer) for request, answer in zip(plan.requests, answers, strict=True)}
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
                self._engine.update_weights_from_tensor(bucket, flush_cache=False)
            watched.check()
            self._engine.flush_cache()
            self.version = version

    def load_adapter(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError: it is built without an adapter."""
        raise ValueError("SGLang is given the weights with the adapter merged in; set rollout.lora=merged")

    def sleep(self) -> None:
        """Gives back the cache and moves the weights to the host."""
        with self._turns.take("sleep"):
            if not self._turns.asleep:
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
        self._engine.tokenizer_manager.abort_request(abort_all=True)

    def metrics(self) -> Metrics:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Ends SGLang's processes."""
        self._engine.shutdown()


def build_params(plan: RequestPlan, request: Request) -> dict[str, Any]:
    """SGLang's sampling parameters of a row. Our own ids stop it, those of the model among them, so SGLang's own do not."""
    sampling = plan.sampling
    if sampling.repetition_penalty != 1.0:
        raise ConfigError(
            f"repetition_penalty is {sampling.repetition_penalty:g}, and SGLang penalises by the response alone, where the prompt counts "
            "too; set it to 1, or rollout.engine=native"
        )
    return {
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop": list(plan.stops.strings) or None,
        "stop_token_ids": plan.stops.ids,
        "ignore_eos": True,
        "no_stop_trim": True,
        "sampling_seed": request.seed,
    }


def read_sample(answer: Any) -> Sample:
    """The sample that one of SGLang's answers holds: `output_token_logprobs` is a list of (log-probability, id, text)."""
    sampled = answer["meta_info"]["output_token_logprobs"]
    reason = answer["meta_info"]["finish_reason"] or {"type": "abort"}
    return Sample([token for _, token, *_ in sampled], [logprob for logprob, *_ in sampled], reason["type"])


def build_sglang_engine(
    directory: str | os.PathLike[str], settings: SglangSettings | None = None, *, dtype: torch.dtype = torch.float32
) -> SglangEngine:
    """Starts SGLang on a Hugging Face directory with weights. Raises ConfigError where it is not there or does not start."""
    settings = settings or SglangSettings()
    try:
        import sglang

        engine = sglang.Engine(
            model_path=str(directory),
            dtype=str(dtype).removeprefix("torch."),
            mem_fraction_static=settings.mem_fraction_static,
            context_length=settings.max_model_len,
            tp_size=settings.tensor_parallel_size,
            enable_memory_saver=True,
            enable_deterministic_inference=True,
        )
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine: SGLang cannot be imported ({error}); pip install sglang, or set rollout.engine=native"
        ) from error
    except (ValueError, RuntimeError) as error:
        told = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(
            f"rollout.engine: SGLang does not start on {directory} ({told}); change rollout.sglang, or set rollout.engine=native"
        ) from error
    return SglangEngine(engine, read_served_model(directory, settings.max_model_len))
