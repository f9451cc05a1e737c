"""Whole runs of a tiny model in exact mode: their settings, what they left, and how two are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hybridflow.batch import Batch
from hybridflow.config import load_config
from hybridflow.flow.commands import run_sft
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig

TINY = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}"
)


NOT_REPEATED = ("time/", "memory/", "speed/", "controller/", "recovery/", "hybrid/", "probe/")
"""Metrics that differ from run to run."""


def write_task(directory: Path) -> dict[str, str]:
    """Sums to learn and a tokenizer for them."""
    files = write_sums(directory, seed=0)
    few = directory / "few.jsonl"
    few.write_text("".join(Path(files["train"]).read_text().splitlines(keepends=True)[:40]))
    return {"tokenizer": str(directory / "tokenizer"), "few": str(few), "valid": files["valid"]}


def train_start(task: dict[str, str], root: Path) -> str:
    """A model that SFT left, as a run's directory."""
    return str(run_sft(sft_config(task, root, "steps=3", "evaluation.data=null"))["run"])


def sft_config(task: dict[str, str], root: Path, *overrides: str) -> SFTConfig:
    return load_config(
        SFTConfig,
        config_name="quickstart_sft",
        overrides=[
            f"model.config={TINY}",
            f"model.tokenizer={task['tokenizer']}",
            f"data.files=[{task['few']}]",
            f"evaluation.data.files=[{task['valid']}]",
            "evaluation.every_steps=5",
            "evaluation.max_prompts=8",
            "evaluation.stop_at=null",
            f"run={{directory: {root}, name: run, tensorboard: false, progress: false}}",
            "rows_per_step=16",
            "train.micro_batch_tokens=100",
            "numerics=exact",
            *overrides,
        ],
    )


def rl_config(task: dict[str, str], root: Path, model: str, *overrides: str) -> RLConfig:
    return load_config(
        RLConfig,
        config_name="quickstart_rl",
        overrides=[
            f"model.path={model}",
            f"data.files=[{task['few']}]",
            f"evaluation.data.files=[{task['valid']}]",
            "evaluation.every_steps=1",
            "evaluation.max_prompts=8",
            "evaluation.stop_at=null",
            f"run={{directory: {root}, name: run, tensorboard: false, progress: false, save_rollouts_every: 1}}",
            "prompts_per_step=6",
            "updates_per_step=1",
            "sampling.samples_per_prompt=4",
            "train.micro_batch_tokens=100",
            "algorithm.drop_constant_groups=false",
            "algorithm.kl_coefficient=0.01",
            "algorithm.report_kl=true",
            "train.schedule={kind: linear, warmup_steps: 2, total_steps: 40, min_lr_ratio: 0.1}",
            f"reward.function={Path(__file__).parent / 'near_miss.py'}:near_miss",
            "numerics=exact",
            *overrides,
        ],
    )


def metrics_of(run: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what clocks, memory and the runtime decide."""
    lines = read_lines(Path(run) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(NOT_REPEATED)} for line in lines]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of one JSON record a line, as far as its lines are whole; none where there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def weights_of(run: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "model" / "model.safetensors")


def rollouts_of(run: str | Path) -> list[Batch]:
    """The samples of every step, in order."""
    return [Batch.from_parquet(path) for path in sorted((Path(run) / "rollouts").glob("step_*.parquet"))]


def assert_same_run(left: str | Path, right: str | Path) -> None:
    """Bit for bit the same metrics and weights."""
    for ours, theirs in zip(metrics_of(left), metrics_of(right), strict=True):
        assert ours == theirs
    ours_w, theirs_w = weights_of(left), weights_of(right)
    assert ours_w.keys() == theirs_w.keys()
    for name, weight in ours_w.items():
        assert torch.equal(weight, theirs_w[name]), name


def assert_same_rollouts(left: str | Path, right: str | Path) -> None:
    """Bit for bit the same samples in the same order."""
    ours, theirs = rollouts_of(left), rollouts_of(right)
    assert len(ours) == len(theirs) > 0
    for step, (batch, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert batch.equals(other), f"the samples of step {step} differ"
