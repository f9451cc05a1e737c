"""A checkpoint's weights as a directory that Hugging Face's `from_pretrained` reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from hybridflow.checkpoint.manifest import CheckpointError
from hybridflow.checkpoint.reader import Checkpoint
from hybridflow.models.adapter_files import ADAPTER_CONFIG, write_adapter

HUGGING_FACE = "huggingface"
"""Directory beside a role's shards that holds its model's config.json and its tokenizer, put there by the role."""
WEIGHTS = "model/"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def export_checkpoint(
    checkpoint: Checkpoint, output: str | os.PathLike[str], dtype: str = "auto", role: str = "actor"
) -> None:
    """Write the role's weights with its configuration and tokenizer; of a run with LoRA, the adapter as a PEFT directory.

    Weights are the tensors named `model/<parameter>`, the optimizer's masters; the checkpoint must hold `<role>/huggingface/config.json`.
    dtype: `auto` rounds to the type of training, which config.json names; `float32` keeps the masters; `bfloat16` rounds.
    """
    source, target = checkpoint.path / role / HUGGING_FACE, Path(output)
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source / 'config.json'} is missing; a checkpoint without it cannot be exported")
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = config["dtype"] if dtype == "auto" else dtype
    numbers = _DTYPES[config["dtype"]]
    masters = checkpoint.load_tensors(role, WEIGHTS)
    weights = {name.removeprefix(WEIGHTS): master.to(numbers) for name, master in masters.items()}
    if (source / ADAPTER_CONFIG).is_file():
        write_adapter(target, json.loads((source / ADAPTER_CONFIG).read_text()), weights)
        return
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json"))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    # Last: a directory with a config.json is a model, and until here this one was not whole.
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
