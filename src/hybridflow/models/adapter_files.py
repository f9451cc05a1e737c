"""PEFT adapter directories: an `adapter_config.json` beside one safetensors file; nothing else is read, nothing is looked up elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.config import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
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
# Others change the base when they are set up, and their adapter means nothing beside the base that we have.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def check_adapter(directory: str | os.PathLike[str], *, rank: int, alpha: float, rslora: bool) -> None:
    """Raises ConfigError unless the directory holds a plain LoRA adapter of this rank and scale."""
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (Path(directory) / file).is_file():
            raise ConfigError(f"train.lora.path: no {file} in '{directory}'; give a PEFT adapter saved as safetensors")
    config = json.loads((Path(directory) / ADAPTER_CONFIG).read_text())
    _check_kind(config, directory)
    wanted = {"rank": rank, "alpha": alpha, "rslora": rslora}
    there = {"rank": config["r"], "alpha": config["lora_alpha"], "rslora": config.get("use_rslora", False)}
    for key, value in wanted.items():
        if there[key] != value:
            theirs = json.dumps(there[key])
            raise ConfigError(
                f"train.lora.{key} is {json.dumps(value)}, but the adapter in '{directory}' has {theirs}; set train.lora.{key}={theirs}"
            )


def _check_kind(config: Mapping[str, Any], directory: str | os.PathLike[str]) -> None:
    kind = config.get("peft_type")
    odd = [name for name in _VARIANTS if config.get(name)]
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if config.get("init_lora_weights", True) not in _INITS:
        odd.append("init_lora_weights")
    if kind != "LORA" or odd:
        what = f"is of kind {kind}" if kind != "LORA" else f"sets {', '.join(odd)}"
        raise ConfigError(
            f"train.lora.path: the adapter in '{directory}' {what}; only plain LoRA of linear layers can be trained on"
        )


def read_adapter(directory: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights of an adapter directory by their plain names."""
    weights = load_file(Path(directory) / ADAPTER_WEIGHTS)
    return {name.removeprefix(_PREFIX): weight for name, weight in weights.items()}


def write_adapter(directory: str | os.PathLike[str], config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes an adapter directory; weights by their plain names, config as of `write_adapter_config`."""
    os.makedirs(directory, exist_ok=True)
    tensors = {_PREFIX + name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(tensors, Path(directory) / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_adapter_config(directory, config)


def write_adapter_config(directory: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
    """Writes `adapter_config.json` alone; config: PEFT's own, whose sets become sorted lists, or what such a file holds."""
    os.makedirs(directory, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True, default=sorted)
    (Path(directory) / ADAPTER_CONFIG).write_text(text + "\n")
