"""The model of the engines' tests: stories260K with heads of 32, which vLLM's attention on a CPU serves; those of 8 it does not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DATA = Path(os.environ.get("HYBRIDFLOW_DATA", Path(__file__).parents[3] / "shared" / "data"))
STORIES = DATA / "stories260K"
MISSING = f"needs the model in {STORIES}"
HEAD_DIM = 32


def write_stories(directory: Path, *, tied: bool = True) -> Path:
    """A directory with the same function of tokens as stories260K; with `tied=False` its head has weights of its own, equal ones.

    Each rotated pair of a head goes to the pair of the wider head that turns as fast, all else is zero, and queries are scaled so that
    scores stay what they were.
    """
    shutil.copytree(STORIES, directory)
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    weights |= {name: _widen(name, weight, config["head_dim"]) for name, weight in weights.items() if "_proj" in name}
    if not tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"head_dim": HEAD_DIM, "tie_word_embeddings": tied}))
    return directory


def _widen(name: str, weight: torch.Tensor, width: int) -> torch.Tensor:
    step = HEAD_DIM // width
    pairs = torch.arange(width // 2) * step
    places = torch.cat([pairs, HEAD_DIM // 2 + pairs])
    if ".o_proj." in name:
        wide = torch.zeros(weight.shape[0], weight.shape[1] // width, HEAD_DIM)
        wide[:, :, places] = weight.unflatten(1, (-1, width))
        return wide.flatten(1)
    if ".q_proj." in name or ".k_proj." in name or ".v_proj." in name:
        wide = torch.zeros(weight.shape[0] // width, HEAD_DIM, weight.shape[1])
        wide[:, places] = weight.unflatten(0, (-1, width))
        return (wide * step**0.5 if ".q_proj." in name else wide).flatten(0, 1)
    return weight
