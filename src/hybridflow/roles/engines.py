"""The engine that generates for a role: chosen from the settings, and built beside its policy."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace

from hybridflow.config import ConfigError, Field, settings
from hybridflow.models import iter_merged_weights, save_description, save_model
from hybridflow.roles.policy import ModelSettings, Policy, read_config, resolve_device
from hybridflow.rollout import NativeEngine, NativeSettings, RolloutEngine
from hybridflow.rollout.choice import Choice, choose_engine, find_installed
from hybridflow.rollout.requests import read_shapes
from hybridflow.rollout.sglang import SglangSettings, build_sglang_engine
from hybridflow.rollout.vllm import VllmSettings, build_vllm_engine
from hybridflow.rollout.vllm_service import connect_vllm_service
from hybridflow.runtime.api import Seat
from hybridflow.runtime.placement import DEVICE_TYPES, Kind
from hybridflow.types import Numerics

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
    chunks: int = Field(default=1, ge=1)
    """Calls that each generating worker's part of a step is split into; with more than one, scoring starts while later ones still
    generate, and a worker that is done early takes from the others (Ray)."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the engine has weights of its own, which have to be sent to it. `auto`, where nobody has resolved it, is native."""
        return self.engine not in ("auto", "native")

    @property
    def is_remote(self) -> bool:
        """Whether the engine is a server that already runs, on devices of its own."""
        return self.engine == "vllm" and self.vllm.url is not None


def resolve_rollout(
    model: ModelSettings, rollout: RolloutSettings, numerics: Numerics, num_workers: int | None, kind: Kind | None
) -> tuple[RolloutSettings, Choice]:
    """The settings with an engine in place of `auto`, and why this one. Raises ConfigError for an engine that cannot be had.

    num_workers: that generate; None where the cluster will tell.
    kind:        what the placement says of the devices that generate; None leaves it to the model's settings.
    """
    on_gpu = (DEVICE_TYPES[kind] if kind else resolve_device(model.device)) != "cpu"
    installed = find_installed()
    sized = on_gpu and rollout.engine == "auto" and "vllm" in installed
    choice = choose_engine(
        rollout.engine,
        installed=installed,
        on_gpu=on_gpu,
        parameters=sum(shape.numel() for shape in read_shapes(read_config(model)).values()) if sized else None,
        url=rollout.vllm.url,
        numerics=numerics,
    )
    resolved = replace(rollout, engine=choice.name)
    if resolved.is_remote and num_workers not in (None, 1):
        raise ConfigError(
            f"rollout.vllm.url: one server takes its weights from one worker, and {num_workers} would generate with it; place one, or "
            "leave the url out"
        )
    _log.info("rollout engine %s", choice)
    return resolved, choice


def build_engine(policy: Policy, rollout: RolloutSettings, seat: Seat) -> RolloutEngine:
    """The engine on the policy's weights: on the very same ones where it is native, else on a copy."""
    if not rollout.keeps_weights:
        return NativeEngine(policy.model, policy.tokenizer, rollout.native)
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as directory:
        engine = _start(policy, rollout, seat, directory)
    if rollout.engine != "sglang":
        engine.load_weights(0, iter_merged_weights(policy.model))
    return engine


def _start(policy: Policy, rollout: RolloutSettings, seat: Seat, directory: str) -> RolloutEngine:
    on_gpu, dtype = policy.model.device.type == "cuda", policy.model.dtype
    if rollout.engine == "sglang":
        save_model(policy.model, policy.tokenizer, directory)
        return build_sglang_engine(directory, rollout.sglang, dtype=dtype)
    save_description(policy.model, policy.tokenizer, directory)
    if rollout.is_remote:
        return connect_vllm_service(directory, rollout.vllm)
    return build_vllm_engine(
        directory, rollout.vllm, dtype=dtype, on_gpu=on_gpu, own_process=seat.size > 1, has_weights=False
    )
