"""The engine that generates for a role: chosen from the settings, and built beside its policy."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from typing import Literal

import torch

from hybridflow.config import ConfigError, Field, settings
from hybridflow.models import (
    LoraSettings,
    adapter_weights,
    iter_base_weights,
    resolve_lora,
    save_description,
    save_model,
)
from hybridflow.roles.policy import (
    DTYPES,
    ModelSettings,
    ModelSpec,
    Policy,
    build_policy,
    read_config,
    resolve_device,
    resolve_dtype,
    resolve_numbers,
)
from hybridflow.rollout import NativeEngine, NativeSettings, RolloutEngine
from hybridflow.rollout.adapters import MAX_RANKS, ServedAdapter
from hybridflow.rollout.choice import Choice, choose_engine, find_installed
from hybridflow.rollout.native.parallel import build_shard, check_tensor_rollout
from hybridflow.rollout.requests import read_shapes
from hybridflow.rollout.sglang import SglangSettings, build_sglang_engine, check_sglang_sampling
from hybridflow.rollout.vllm import VllmSettings, build_vllm_engine
from hybridflow.rollout.vllm_service import connect_vllm_service
from hybridflow.runtime.api import Seat
from hybridflow.runtime.placement import DEVICE_TYPES, Kind
from hybridflow.train_engine import Layout, Ranks, join_ranks
from hybridflow.train_engine.ranks import ALONE
from hybridflow.types import Numerics, SamplingParams

_log = logging.getLogger(__name__)


@settings
class RolloutSettings:
    """How samples are generated."""

    engine: str = Field(default="auto", pattern="^(auto|native|vllm|sglang)$")
    """Who generates: `native` on the trainer's own weights; `vllm` or `sglang`, which have to be installed, on a copy of their own;
    `auto` takes native on a CPU, and on a GPU what is installed and measured faster. `hybridflow plan` says which and why."""
    native: NativeSettings = Field(default_factory=NativeSettings)
    """Limits of the native engine."""
    vllm: VllmSettings = Field(default_factory=VllmSettings)
    """vLLM, where it is the engine."""
    sglang: SglangSettings = Field(default_factory=SglangSettings)
    """SGLang, where it is the engine."""
    lora: Literal["merged", "adapter"] = "merged"
    """What is sent of a policy with `train.lora` to where it is generated from other weights than the trainer's own: `merged` the whole
    weights with the adapter added, from which every engine decodes as fast as without one; `adapter` its two small matrices a layer, a
    hundredth of the bytes or less, added again for every token. On the trainer's own weights nothing is sent, and it stays beside them."""
    chunks: int = Field(default=1, ge=1)
    """Calls that each generating worker's part of a step is split into, or that of each replica of several (`native.tp`); with more than
    one, scoring starts while later ones still generate, and who is done early takes from the others (Ray)."""

    def check_sampling(self, sampling: SamplingParams, key: str) -> None:
        """Raises ConfigError for ways of sampling that the engine does not know; key: where they stand in the config."""
        if self.engine == "sglang":
            check_sglang_sampling(sampling, key)

    @property
    def keeps_weights(self) -> bool:
        """Whether the engine has weights of its own, which have to be sent to it. `auto`, where nobody has resolved it, is native."""
        return self.engine not in ("auto", "native")

    @property
    def is_remote(self) -> bool:
        """Whether the engine is a server that already runs, on devices of its own."""
        return self.engine == "vllm" and self.vllm.url is not None


def resolve_rollout(
    model: ModelSettings,
    rollout: RolloutSettings,
    numerics: Numerics,
    num_workers: int | None,
    kind: Kind | None,
    *,
    assume_installed: bool = False,
    cuts: bool = False,
) -> tuple[RolloutSettings, Choice]:
    """The settings with an engine in place of `auto`, and why this one. Raises ConfigError for an engine that cannot be had.

    num_workers:      that generate; None where the cluster will tell.
    kind:             what the placement says of the devices that generate; None leaves it to the model's settings.
    assume_installed: an engine that the settings name counts as installed: it will generate on other machines.
    cuts:             see `choose_engine`.
    """
    on_gpu = (DEVICE_TYPES[kind] if kind else resolve_device(model.device)) != "cpu"
    installed = find_installed() | ({rollout.engine} if assume_installed else set())
    sized = on_gpu and rollout.engine == "auto" and "vllm" in installed
    if rollout.native.tp > 1:
        _check_tensor(model, rollout, numerics, num_workers)
    wanted = "native" if rollout.native.tp > 1 else rollout.engine
    choice = choose_engine(
        wanted,
        installed=installed,
        on_gpu=on_gpu,
        parameters=sum(shape.numel() for shape in read_shapes(read_config(model)).values()) if sized else None,
        url=rollout.vllm.url,
        numerics=numerics,
        cuts=cuts,
    )
    if rollout.native.tp > 1 and num_workers is not None:
        split = plan_replicas(rollout, num_workers)
        choice = Choice("native", f"in {_count_replicas(split)}, as rollout.native.tp says")
    resolved = replace(rollout, engine=choice.name)
    if resolved.is_remote and num_workers not in (None, 1):
        raise ConfigError(
            f"rollout.vllm.url: one server takes its weights from one worker, and {num_workers} would generate with it; place one, or "
            "leave the url out"
        )
    if on_gpu and resolved.engine == "vllm" and not resolved.is_remote:
        _check_adapter_numbers(resolved, resolve_numbers(model, kind, None)[1])
    _log.info("rollout engine %s", choice)
    return resolved, choice


def check_lora_sync(rollout: RolloutSettings, lora: LoraSettings | None) -> None:
    """Raises ConfigError where `rollout.lora=adapter` cannot be had. lora: of the policy that is trained; None where there is none."""
    if rollout.lora != "adapter":
        return
    if lora is None:
        raise ConfigError(
            "rollout.lora: 'adapter' sends the adapter of train.lora, which is not set; set it, or leave rollout.lora out"
        )
    why = ""
    if rollout.engine == "sglang":
        why = "rollout.engine is sglang, which is given whole weights"
    elif rollout.native.tp > 1:
        why = f"rollout.native.tp is {rollout.native.tp}, and an adapter is not split over matrices"
    elif rollout.vllm.sleep_level == 2:
        why = "rollout.vllm.sleep_level is 2, which drops the base that the adapter belongs to; set it to 1"
    elif resolve_lora(lora).rank > MAX_RANKS[-1]:
        why = f"its rank is {resolve_lora(lora).rank}, and engines take {MAX_RANKS[-1]} at most"
    if why:
        raise ConfigError(f"rollout.lora: 'adapter' cannot be sent: {why}, or set rollout.lora=merged")


def _check_adapter_numbers(rollout: RolloutSettings, dtype: str) -> None:
    """Refuses what vLLM would end at when it starts on a GPU."""
    if rollout.lora == "adapter" and dtype == "float32":
        raise ConfigError(
            "rollout.lora: 'adapter' is multiplied by vLLM's kernels, which have no float32 on a GPU; set model.dtype=bfloat16, or "
            "rollout.lora=merged"
        )


def _check_tensor(model: ModelSettings, rollout: RolloutSettings, numerics: Numerics, num_workers: int | None) -> None:
    """Raises ConfigError for what can be seen to be wrong with `rollout.native.tp` before anything starts."""
    degree = rollout.native.tp
    if rollout.keeps_weights:
        raise ConfigError(
            f"rollout.native.tp: {degree} is for the native engine, and rollout.engine is {rollout.engine}; set rollout.engine=native, or "
            "leave it out"
        )
    if numerics == "exact":
        raise ConfigError(
            f"rollout.native.tp: {degree} parts change the order of sums, which numerics=exact fixes; set it to 1, or numerics=fast"
        )
    check_tensor_rollout(read_config(model), degree)
    if num_workers is not None:
        plan_replicas(rollout, num_workers)


def _count_replicas(split: Layout) -> str:
    return f"{split.data} replica{'' if split.data == 1 else 's'} of {split.tensor} workers each"


def plan_replicas(rollout: RolloutSettings, num_workers: int) -> Layout:
    """How so many workers generate: `data` replicas of the model, each split over `tensor` neighbours; ConfigError if they do not fit."""
    degree = rollout.native.tp
    if num_workers % degree:
        count = (
            f"{num_workers} generate" if num_workers > 1 else "1 generates; more need runtime.kind=ray and a placement"
        )
        raise ConfigError(
            f"rollout.native.tp: {degree} takes {degree} workers or a multiple, and {count}; set it to a divisor of their number"
        )
    return Layout(data=num_workers // degree, tensor=degree)


def build_tensor_engine(
    policy: Policy, rollout: RolloutSettings, ranks: Ranks, device: torch.device, dtype: torch.dtype, timeout_s: float
) -> tuple[NativeEngine, Ranks]:
    """The native engine on this rank's part of the model, whose weights are yet to come, and the ranks of its group. A collective.

    policy: of the whole model, whose weights are not read. ranks: all that generate.
    """
    group = ranks.split(plan_replicas(rollout, ranks.size).partition("tensor"))
    model, shared = build_shard(policy.model, group, device=device, dtype=dtype, timeout_s=timeout_s)
    engine = NativeEngine(model, policy.tokenizer, rollout.native, shared)
    # It may lay weights side by side, and from then on they stay where they are.
    engine.prepare()
    return engine, group


def build_generator(spec: ModelSpec, rollout: RolloutSettings, seat: Seat) -> tuple[RolloutEngine, Ranks]:
    """The engine of a worker that only generates, with its weights, and the ranks that generate with it."""
    if rollout.native.tp == 1:
        return build_engine(build_policy(spec, seat), rollout, seat), ALONE
    device = torch.device(seat.device or resolve_device(spec.settings.device))
    dtype = resolve_dtype(seat.dtype or spec.settings.dtype, device)
    name = next(name for name, known in DTYPES.items() if known == dtype)
    # The whole model passes through the host's memory: it may be too large for the device.
    policy = build_policy(spec, replace(seat, device="cpu", dtype=name))
    ranks = join_ranks(
        rank=seat.rank, size=seat.size, rendezvous=seat.rendezvous, device=device, timeout_s=seat.timeout_s
    )
    with ranks.leaving_on_error():
        engine, group = build_tensor_engine(policy, rollout, ranks, device, dtype, seat.timeout_s)
        engine.load_weights(0, policy.model.module.named_parameters())
    return engine, group


def build_engine(policy: Policy, rollout: RolloutSettings, seat: Seat) -> RolloutEngine:
    """The engine on the policy's weights: on the very same ones where it is native, else on a copy; of a policy with an adapter on those
    beside it."""
    if not rollout.keeps_weights:
        return NativeEngine(policy.model, policy.tokenizer, rollout.native)
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as directory:
        engine = _start(policy, rollout, seat, directory)
    if rollout.is_remote or (rollout.engine == "vllm" and policy.adapter is None):
        engine.load_weights(0, iter_base_weights(policy.model))
    return engine


def _start(policy: Policy, rollout: RolloutSettings, seat: Seat, directory: str) -> RolloutEngine:
    on_gpu, dtype = policy.model.device.type == "cuda", policy.model.dtype
    if rollout.engine == "sglang":
        save_model(policy.model, policy.tokenizer, directory)
        return build_sglang_engine(directory, rollout.sglang, dtype=dtype)
    adapter = None
    if policy.adapter is not None:
        shapes = {name: weight.shape for name, weight in adapter_weights(policy.model).items()}
        adapter = ServedAdapter(policy.adapter, shapes)
    if rollout.is_remote:
        save_description(policy.model, policy.tokenizer, directory)
        return connect_vllm_service(directory, rollout.vllm, adapter)
    # Layers that are ready for an adapter do not load weights in place in every version of vLLM.
    if adapter is not None:
        save_model(policy.model, policy.tokenizer, directory, dict(iter_base_weights(policy.model)))
    else:
        save_description(policy.model, policy.tokenizer, directory)
    return build_vllm_engine(
        directory,
        rollout.vllm,
        dtype=dtype,
        on_gpu=on_gpu,
        own_process=seat.size > 1,
        has_weights=adapter is not None,
        adapter=adapter,
    )
