"""PEFT adapter directories: an `adapter_config.json` beside one safetensors file; nothing else is read, nothing is looked up elsewhere."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.config import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_REMEDY = "give a PEFT adapter saved as safetensors"
# What makes an adapter more, or other, than base + scale * B A on linear layers.
_VARIANTS = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "alpha_pattern",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
# Layers that `target_modules` names and that have no adapter all the same.
_EXCEPTIONS = ("layers_to_transform", "exclude_modules")
# Others change the base when they are set up, and their adapter means nothing beside the base that we have.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterForm:
    """What an adapter is beside its weights, e.g. `AdapterForm(8, 16.0, False, ("q_proj", "v_proj"))`; see `LoraSettings`."""

    rank: int
    alpha: float
    rslora: bool
    target_modules: Literal["all-linear"] | tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor on the product of the two low-rank matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def read_form(directory: str | os.PathLike[str], key: str) -> AdapterForm:
    """What the adapter in the directory is; ConfigError, by the key that names the directory, unless it is a plain LoRA adapter."""
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (Path(directory) / file).is_file():
            raise ConfigError(f"{key}: no {file} in '{directory}'; {_REMEDY}")
    config = read_adapter_config(directory, key)
    _check_kind(config, directory, key)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0):
        raise ConfigError(
            f"{key}: {ADAPTER_CONFIG} in '{directory}' has r {json.dumps(rank)} and lora_alpha {json.dumps(alpha)}, which have to be "
            f"numbers; {_REMEDY}"
        )
    return AdapterForm(rank, float(alpha), bool(config.get("use_rslora")), _read_targets(config, directory, key))


def _read_targets(config: Mapping[str, Any], directory: str | os.PathLike[str], key: str) -> tuple[str, ...]:
    """The list that the adapter was made by; where that is a pattern or has exceptions, the layers that have weights."""
    listed = config.get("target_modules")
    if isinstance(listed, list) and not any(config.get(name) for name in _EXCEPTIONS):
        return tuple(sorted(listed))
    return tuple(sorted({name.partition(".lora_")[0] for name in read_adapter(directory, key)}))


def read_adapter_config(directory: str | os.PathLike[str], key: str) -> Mapping[str, Any]:
    """What `adapter_config.json` holds; ConfigError where it is damaged."""
    try:
        config = json.loads((Path(directory) / ADAPTER_CONFIG).read_text())
    except ValueError as error:
        raise ConfigError(f"{key}: {ADAPTER_CONFIG} in '{directory}' is damaged: {error}; {_REMEDY}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{key}: {ADAPTER_CONFIG} in '{directory}' holds no keys; {_REMEDY}")
    return config


def _check_kind(config: Mapping[str, Any], directory: str | os.PathLike[str], key: str) -> None:
    kind = config.get("peft_type")
    odd = [name for name in _VARIANTS if config.get(name)]
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if config.get("init_lora_weights", True) not in _INITS:
        odd.append("init_lora_weights")
    if kind != "LORA" or odd:
        what = f"is of kind {kind}" if kind != "LORA" else f"sets {', '.join(odd)}"
        raise ConfigError(f"{key}: the adapter in '{directory}' {what}; only plain LoRA of linear layers is read")


def read_adapter(directory: str | os.PathLike[str], key: str) -> dict[str, Tensor]:
    """The weights of an adapter directory by their plain names; ConfigError where the file is damaged."""
    try:
        weights = load_file(Path(directory) / ADAPTER_WEIGHTS)
    except SafetensorError as error:
        raise ConfigError(f"{key}: {ADAPTER_WEIGHTS} in '{directory}' is damaged: {error}; {_REMEDY}") from error
    return {name.removeprefix(_PREFIX): weight for name, weight in weights.items()}


def describe_adapter(directory: str | os.PathLike[str], key: str) -> str:
    """What to do with an adapter that was given as `<key>.path`, a model, in a sentence."""
    base = read_adapter_config(directory, f"{key}.path").get("base_model_name_or_path")
    was = f" (it was trained on '{base}')" if base else ""
    return (
        f"{key}.path: '{directory}' is a LoRA adapter, not a model; set {key}.path to its base{was} and {key}.adapter={directory}, or "
        f"train.lora.path={directory} to train it further"
    )


def write_adapter(directory: str | os.PathLike[str], config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes an adapter directory; weights by their plain names, config as of `write_adapter_config`."""
    os.makedirs(directory, exist_ok=True)
    tensors = {_PREFIX + name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(tensors, Path(directory) / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_adapter_config(directory, config)


def describe_form(form: AdapterForm, names: Iterable[str]) -> dict[str, Any]:
    """What `adapter_config.json` holds for a plain LoRA adapter with weights of these plain names."""
    layers = {name.partition(".lora_")[0] for name in names}
    return {
        "peft_type": "LORA",
        "r": form.rank,
        "lora_alpha": form.alpha,
        "use_rslora": form.rslora,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "bias": "none",
    }


def write_adapter_config(directory: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
    """Writes `adapter_config.json` alone; config: PEFT's own, whose sets become sorted lists, or what such a file holds."""
    os.makedirs(directory, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True, default=sorted)
    (Path(directory) / ADAPTER_CONFIG).write_text(text + "\n")
