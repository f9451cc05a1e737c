"""Which engine generates: pure, from what is installed, what is measured, and what was asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from hybridflow.config import ConfigError
from hybridflow.types import Numerics

EngineName = Literal["native", "vllm", "sglang"]
INSTALL = {"vllm": "pip install vllm", "sglang": "pip install sglang"}
"""Remedies; a package has the name of its engine."""


@dataclass(frozen=True)
class Choice:
    """An engine and why: `Choice("native", "vLLM is not installed")`."""

    name: EngineName
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Measured:
    """Two lines that one call of benchmarks/decode.py printed, `side=hybridflow` and `side=vllm`, log-probabilities on.

    `Measured("qwen3-0.6b", 0.6e9, native_tokens_per_s=30e3, vllm_tokens_per_s=15e3, device="H200")`.
    """

    shape: str
    parameters: float
    native_tokens_per_s: float
    vllm_tokens_per_s: float
    device: str


MEASURED: tuple[Measured, ...] = (
    Measured("qwen3-0.6b", 0.6e9, 26_790, 22_206, device="H200"),
    Measured("qwen2.5-1.5b", 1.5e9, 75_429, 25_369, device="H200"),
    Measured("qwen2.5-7b", 7.6e9, 26_285, 22_916, device="H200"),
)
"""What `auto` goes by on a GPU: for each shape 256 rows of docs/performance.md, both sides from one machine: of 100 to 1,024 tokens, or of
128 + 512 where that is not so of the former. Without rows `auto` is native."""


def find_installed() -> frozenset[str]:
    """Those engines beside the native one whose package is installed here."""
    return frozenset(name for name in INSTALL if importlib.util.find_spec(name) is not None)


def choose_engine(
    wanted: str,
    *,
    installed: Collection[str],
    on_gpu: bool,
    parameters: float | None = None,
    url: str | None = None,
    numerics: Numerics = "fast",
    cuts: bool = False,
    measured: Sequence[Measured] = MEASURED,
) -> Choice:
    """The engine that `rollout.engine` means. Raises ConfigError for one that cannot be had.

    installed:  what of vllm and sglang is there.
    parameters: of the model, to find the measurement nearest in size (by ratio); None where that is not known.
    url:        of a vLLM server, which needs no vLLM here; `auto` takes it.
    cuts:       samples that are trained on are drawn by `min_p`, `top_k` or `top_p`.
    """
    if wanted == "auto" and url is None:
        if cuts:
            return Choice("native", "since it tells the trainer what min_p, top_k and top_p left to draw from")
        return _choose(installed, on_gpu, parameters, numerics, measured)
    if wanted == "native" and url is None:
        return Choice("native", "as rollout.engine says")
    if wanted in ("native", "sglang") and url is not None:
        raise ConfigError(
            f"rollout.vllm.url: '{url}' is a vLLM server, and rollout.engine is {wanted}; set rollout.engine=vllm, or take the url out"
        )
    wanted = "vllm" if wanted == "auto" else wanted
    if wanted not in INSTALL:
        raise ConfigError(f"rollout.engine: '{wanted}' is no engine; set auto, native, vllm or sglang")
    remote = wanted == "vllm" and url is not None
    if numerics == "exact":
        raise ConfigError(
            f"rollout.engine: '{wanted}' makes no row independent of its company, which numerics=exact asks for; set rollout.engine=native"
        )
    if cuts:
        raise ConfigError(
            f"rollout.engine: '{wanted}' does not tell among how many tokens each was drawn, which training on samples cut by min_p, top_k "
            f"or top_p needs to know; set rollout.engine=native{'' if url is None else ' without rollout.vllm.url'}, or leave them out"
        )
    if not remote and wanted not in installed:
        raise ConfigError(
            f"rollout.engine: '{wanted}' is not installed; {INSTALL[wanted]}, or set rollout.engine=native"
        )
    if wanted == "sglang" and not on_gpu:
        raise ConfigError("rollout.engine: 'sglang' needs a GPU; set rollout.engine=native")
    where = f"the server at {url}" if remote else "as rollout.engine says"
    return Choice("vllm" if wanted == "vllm" else "sglang", where)


def _choose(
    installed: Collection[str], on_gpu: bool, parameters: float | None, numerics: Numerics, measured: Sequence[Measured]
) -> Choice:
    if numerics == "exact":
        return Choice("native", "numerics=exact asks for rows that are independent of their company")
    if not on_gpu:
        return Choice("native", "on a CPU it uses the trainer's own weights, and nothing else is faster")
    if "vllm" not in installed:
        return Choice("native", "vLLM is not installed")
    if parameters is None or not measured:
        return Choice("native", "nothing measured for this model is faster, and it needs no second copy of the weights")
    nearest = min(measured, key=lambda row: max(row.parameters / parameters, parameters / row.parameters))
    native, vllm = nearest.native_tokens_per_s, nearest.vllm_tokens_per_s
    told = f"measured for {nearest.shape} on one {nearest.device}, native {native:,.0f} and vLLM {vllm:,.0f} tokens/s"
    return Choice("vllm" if vllm > native else "native", told)
