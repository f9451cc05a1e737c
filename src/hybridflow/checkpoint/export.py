"""A checkpoint's weights as a directory that Hugging Face's `from_pretrained` reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.checkpoint.manifest import CheckpointError
from hybridflow.checkpoint.reader import DTYPES, Checkpoint
from hybridflow.models import compute_base_checksum, iter_merged_onto, load_model
from hybridflow.models.adapter_files import ADAPTER_CONFIG, write_adapter

HUGGING_FACE = "huggingface"
"""Directory beside a role's shards that holds its model's config.json and its tokenizer, put there by the role."""
WEIGHTS = "model/"
_MODEL_FILES = ("config.json", "generation_config.json", ADAPTER_CONFIG)


def export_checkpoint(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    dtype: str = "auto",
    role: str = "actor",
    *,
    merge: bool = False,
    base: str | None = None,
) -> None:
    """Write the role's weights with its configuration and tokenizer; of a run with LoRA, its adapter as PEFT has it, and the tokenizer.

    Weights are the tensors named `model/<parameter>`, the optimizer's masters; the checkpoint must hold `<role>/huggingface/config.json`.
    dtype: `auto` rounds to the type of training, which config.json names; `float32` keeps the masters; `bfloat16` rounds.
    merge: of a run with LoRA, writes the whole model with the adapter merged in instead.
    base:  directory of the model that the adapter was trained on, where `merge` shall not take the one that the checkpoint names.
    """
    source, target = checkpoint.path / role / HUGGING_FACE, Path(output)
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source / 'config.json'} is missing; a checkpoint without it cannot be exported")
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = config["dtype"] if dtype == "auto" else dtype
    numbers = DTYPES[config["dtype"]]
    masters = checkpoint.load_tensors(role, WEIGHTS)
    weights = {name.removeprefix(WEIGHTS): master for name, master in masters.items()}
    adapted = (source / ADAPTER_CONFIG).is_file()
    if merge and not adapted:
        raise CheckpointError(
            f"{checkpoint.path} holds a whole model and no adapter to merge; export it without merge=true"
        )
    if merge:
        weights = _merge(weights, _find_base(source, base), checkpoint.role_state(role).get("adapter"), numbers)
    weights = {name: weight.to(numbers) for name, weight in weights.items()}
    try:
        _write(source, target, weights, None if adapted and not merge else config)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"output: '{target}' cannot be written ({' '.join(str(error).split())}); make room, or name a directory in one that can be"
        ) from None


def _write(source: Path, target: Path, weights: dict[str, Tensor], config: dict[str, Any] | None) -> None:
    """The directory of a model with this configuration, or of an adapter where it is None."""
    left_out = _MODEL_FILES if config is None else (ADAPTER_CONFIG, "config.json")
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*left_out))
    if config is None:
        write_adapter(target, json.loads((source / ADAPTER_CONFIG).read_text()), weights)
        return
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    # Last: a directory with a config.json is a model, and until here this one was not whole.
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _find_base(source: Path, given: str | None) -> str:
    """The directory of the model that the adapter was trained on."""
    base: str | None = given or json.loads((source / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    if base is None:
        raise CheckpointError(
            "merge: the checkpoint does not name the adapter's base model; give its directory as base=..."
        )
    if not (Path(base) / "config.json").is_file():
        named = "" if given else ", which the checkpoint names as the adapter's base"
        raise CheckpointError(f"merge: '{base}'{named}, holds no model; give the base model's directory as base=...")
    return base


@torch.no_grad()
def _merge(adapter: Mapping[str, Tensor], base: str, trained: Any, numbers: torch.dtype) -> dict[str, Tensor]:
    """The base's weights with the adapter's update, in numbers at least as wide as `numbers`.

    trained: scale of the adapter and checksum of its base, as the checkpoint has them.
    """
    if trained is None:
        raise CheckpointError(
            "merge: the checkpoint is of an older version of hybridflow, which did not note what its adapter was trained on; export it "
            "without merge=true and merge it by PEFT's merge_and_unload"
        )
    scale, checksum = trained
    dtype = DTYPES[checksum.partition(":")[0]]
    model = load_model(base, dtype=dtype)
    if compute_base_checksum(model) != checksum:
        raise CheckpointError(
            f"merge: the adapter was trained on other weights than '{base}' holds; give the base model's directory as base=..."
        )
    for weight in model.module.parameters():
        weight.data = weight.data.to(torch.promote_types(dtype, numbers))
    merged = dict(iter_merged_onto(model, adapter, scale, "merge: the adapter of the checkpoint"))
    return {name: weight.detach() for name, weight in model.module.named_parameters()} | merged
