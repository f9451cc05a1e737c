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

HUGGING_FACE = "huggingface"
"""Directory beside a role's shards that holds its model's config.json and its tokenizer, put there by the role."""
WEIGHTS, MASTERS = "model/", "optimizer/master/"


def export_checkpoint(
    checkpoint: Checkpoint, output: str | os.PathLike[str], dtype: str = "auto", role: str = "actor"
) -> None:
    """Write the role's weights with its configuration and tokenizer.

    Weights are the tensors named `model/<parameter>`; the checkpoint must hold `<role>/huggingface/config.json`.
    dtype: `auto` keeps the types of training; `float32` takes the optimizer's float32 masters where there are any; `bfloat16` rounds.
    """
    source, target = checkpoint.path / role / HUGGING_FACE, Path(output)
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source / 'config.json'} is missing; a checkpoint without it cannot be exported")
    weights = {name.removeprefix(WEIGHTS): t for name, t in checkpoint.load_tensors(role, WEIGHTS).items()}
    if dtype == "float32":
        masters = checkpoint.load_tensors(role, MASTERS)
        weights |= {name.removeprefix(MASTERS): tensor for name, tensor in masters.items()}
    if dtype != "auto":
        weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json"))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    # Last: a directory with a config.json is a model, and until here this one was not whole.
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
