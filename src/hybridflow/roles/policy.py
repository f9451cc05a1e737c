"""A language model as a role holds it: which one, on which device, in which numbers."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from hybridflow.checkpoint.manifest import MANIFEST
from hybridflow.config import ConfigError, Field, settings
from hybridflow.models import (
    ADAPTER_CONFIG,
    AdapterForm,
    LanguageModel,
    LoraSettings,
    apply_lora,
    describe_adapter,
    fresh_model,
    has_adapter,
    load_model,
    load_tokenizer,
    merge_adapter,
    read_form,
    resolve_lora,
    save_adapter_config,
    save_description,
)
from hybridflow.models.exact import why_not_exact
from hybridflow.models.families import UnsupportedModelError, check_family
from hybridflow.models.loading import build_config, check_weight_files, read_model_config
from hybridflow.runtime.api import Seat
from hybridflow.runtime.placement import DEVICE_TYPES, Kind
from hybridflow.types import Numerics

_PARTS, _PART_BYTES = 64, 65536
"""What is read of a file to tell it from others."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@settings
class ModelSettings:
    """Which model, from where, on what."""

    path: str | None = None
    """Hugging Face directory, or a finished run's directory, whose result is taken."""
    config: dict[str, Any] | None = None
    """Builds a new model with random weights from these Hugging Face config values (`model_type` first) instead of loading one."""
    adapter: str | None = None
    """PEFT adapter directory whose update is added to the weights of `path` when they are loaded; null adds none."""
    tokenizer: str | None = None
    """Directory of the tokenizer; null takes the model's."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto` takes the GPU where there is one; else cpu, cuda or cuda:1, cuda:2 and so on."""
    dtype: str = Field(default="auto", pattern="^(auto|float32|bfloat16|float64)$")
    """Numbers of the live weights; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    trust_remote_code: bool = False
    """Runs Python code that comes with the model directory. Only for models whose code you have read."""


@dataclass(frozen=True)
class ModelSpec:
    """What a worker needs to build its model.

    seed:    draws the weights of a new one, and of a new adapter.
    adapter: is put beside the weights, which then stay as they are: values of the adapter alone come from its trainer. None: there is none
             but the one that a trainer puts there itself.
    """

    settings: ModelSettings
    numerics: Numerics
    seed: int
    threads: int
    adapter: LoraSettings | None = None


@dataclass
class Policy:
    """A model and the tokenizer that goes with it. adapter: of the model, as `ModelSpec.adapter` put it there."""

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    adapter: AdapterForm | None = None


def check_model(
    settings: ModelSettings, numerics: Numerics, key: str = "model", kind: Kind | None = None, dtype: str | None = None
) -> None:
    """Raises ConfigError for what can be seen to be wrong without loading the model.

    kind, dtype: what the placement says of its devices, which may be on other machines; None leaves it to the settings.
    """
    if (settings.path is None) == (settings.config is None):
        raise ConfigError(f"{key}.path and {key}.config: exactly one is needed; give {key}.path=<directory of a model>")
    if settings.path is not None:
        model_directory(settings.path, key)
    if settings.adapter is not None:
        if settings.path is None:
            raise ConfigError(f"{key}.adapter: an adapter belongs to a trained model; give that as {key}.path")
        read_form(settings.adapter, f"{key}.adapter")
    if settings.config is not None and settings.tokenizer is None:
        raise ConfigError(f"{key}.tokenizer: a new model needs one; give the directory of a tokenizer")
    if settings.tokenizer is not None and not Path(settings.tokenizer).is_dir():
        raise ConfigError(f"{key}.tokenizer: '{settings.tokenizer}' is no directory; give one that holds a tokenizer")
    _check_files(settings, key)
    device = DEVICE_TYPES[kind] if kind else resolve_device(settings.device)
    number = int(device.removeprefix("cuda").removeprefix(":") or 0) if device != "cpu" else -1
    if kind is None and number >= torch.cuda.device_count():
        raise ConfigError(
            f"{key}.device: '{settings.device}' is not here, there are {torch.cuda.device_count()} GPUs; set {key}.device=auto or cpu"
        )
    chosen = dtype or settings.dtype
    if numerics == "exact":
        fault = why_not_exact(read_config(settings).model_type, *resolve_numbers(settings, kind, dtype))
        if fault is not None:
            raise ConfigError(
                f"numerics: 'exact' {fault}; change {key}.dtype ({chosen}) or {key}.device ({settings.device}), or set numerics=fast"
            )


def _check_files(settings: ModelSettings, key: str) -> None:
    """Raises ConfigError for a configuration or weights that cannot be read, by what is small of them."""
    try:
        config = read_config(settings)
        check_family(config)
        if settings.path is not None:
            check_weight_files(model_directory(settings.path, key))
        elif config.vocab_size < (tokens := len(read_tokenizer(settings))):
            raise UnsupportedModelError(
                f"vocab_size is {config.vocab_size}, and the tokenizer has {tokens} tokens; leave it out"
            )
    except UnsupportedModelError as error:
        raise ConfigError(f"{key}.{'config' if settings.path is None else 'path'}: {error}") from None


def resolve_numbers(settings: ModelSettings, kind: Kind | None, dtype: str | None) -> tuple[str, str]:
    """Where and in which numbers a model computes, `("cuda", "bfloat16")`; kind, dtype: as `check_model`."""
    device = torch.device(DEVICE_TYPES[kind] if kind else resolve_device(settings.device))
    return device.type, str(resolve_dtype(dtype or settings.dtype, device)).removeprefix("torch.")


def model_directory(path: str, key: str = "model") -> Path:
    """The Hugging Face directory that `path` means: itself, or the result inside a run's directory."""
    if (Path(path) / ADAPTER_CONFIG).is_file():
        raise ConfigError(describe_adapter(path, key))
    candidates = [Path(path), Path(path) / "model"]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    if not Path(path).exists():
        raise ConfigError(
            f"{key}.path: '{path}' does not exist; give a Hugging Face model directory or a run's directory"
        )
    if (Path(path) / MANIFEST).is_file():
        raise ConfigError(f"{key}.path: '{path}' is a checkpoint; hybridflow export checkpoint={path} output=DIR first")
    raise ConfigError(
        f"{key}.path: '{path}' holds no config.json and no finished run; give a Hugging Face model directory or a run's directory"
    )


def read_tokenizer(settings: ModelSettings, key: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer that goes with a model, without the model."""
    return load_tokenizer(settings.tokenizer or model_directory(settings.path or "", key), key)


def identify_weights(settings: ModelSettings) -> str | None:
    """Tells a model's files of weights, an adapter's included, from others of the same shapes; None of a new model, which its seed makes.

    Reads parts of each file all over it: training leaves few of them as they were.
    """
    if settings.path is None:
        return None
    digest = hashlib.sha256()
    directories = [model_directory(settings.path), *([Path(settings.adapter)] if settings.adapter else [])]
    for directory in directories:
        for path in sorted(directory.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for part in range(_PARTS):
                    file.seek(size * part // _PARTS)
                    digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()


def read_config(settings: ModelSettings) -> PretrainedConfig:
    """The model's configuration, without the model: its shape says what a row costs and how it can be split over trainers."""
    if settings.config is None:
        directory = model_directory(settings.path or "")
        return read_model_config(directory, trust_remote_code=settings.trust_remote_code)
    return build_config(_config_from(read_tokenizer(settings)) | settings.config)


def build_policy(spec: ModelSpec, seat: Seat) -> Policy:
    """Loads or makes the model, on its device, in its numbers; what the placement says of these comes first."""
    policy = _build_plain(spec, seat)
    if spec.adapter is None:
        return policy
    apply_lora(policy.model, spec.adapter, spec.seed)
    return replace(policy, adapter=resolve_lora(spec.adapter))


def _build_plain(spec: ModelSpec, seat: Seat) -> Policy:
    pin_numerics(spec.numerics, spec.threads)
    logging.disable_progress_bar()  # the run has a bar of its own
    chosen = spec.settings
    device = torch.device(seat.device or resolve_device(chosen.device))
    dtype = resolve_dtype(seat.dtype or chosen.dtype, device)
    if chosen.config is not None:
        tokenizer = read_tokenizer(chosen)
        values = _config_from(tokenizer) | chosen.config
        model = fresh_model(values, seed=spec.seed, device=device, dtype=dtype, numerics=spec.numerics)
        return Policy(model, tokenizer)
    directory = model_directory(chosen.path or "")
    model = load_model(
        directory, device=device, dtype=dtype, numerics=spec.numerics, trust_remote_code=chosen.trust_remote_code
    )
    if chosen.adapter is not None:
        merge_adapter(model, chosen.adapter, "model.adapter")
    return Policy(model, read_tokenizer(chosen))


def describe_policy(policy: Policy) -> dict[str, bytes]:
    """What an export needs beside the weights, by file name: configuration, tokenizer, and of an adapter its own configuration."""
    with tempfile.TemporaryDirectory() as directory:
        save_description(policy.model, policy.tokenizer, directory)
        if has_adapter(policy.model):
            save_adapter_config(policy.model, directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def _config_from(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a new model's config takes from its tokenizer where the user does not say otherwise."""
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def resolve_device(device: str) -> str:
    """`auto` by what is there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` by the device."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[dtype]


def pin_numerics(numerics: Numerics, threads: int) -> None:
    """Fixes what could change a sum's order: threads, and in exact mode the choice of algorithms and cuBLAS's workspaces."""
    if threads:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(numerics == "exact")
    if numerics == "exact":
        # cuBLAS computes nothing of the model's, but without this torch refuses whatever else a run multiplies.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # A pass over each new tensor, against reads of what was never written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
