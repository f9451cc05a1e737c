"""A trainer and SGLang on one GPU: whole runs, whose probe holds SGLang's log-probabilities to the trainer's after each update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_stories import MISSING, STORIES, write_stories

from hybridflow.batch import Batch
from hybridflow.config import load_config
from hybridflow.flow.commands import run_rl
from hybridflow.flow.rl_job import RLConfig
from hybridflow.models import load_model

pytest.importorskip("sglang", reason="sglang is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not STORIES.is_dir(), reason=MISSING),
]


def test_a_run_generates_with_sglang_and_ends_none_but_its_processes(tmp_path):
    directory = write_stories(tmp_path / "tied")
    lines = [{"prompt": text, "answer": "a"} for text in ("Once upon a time", "The dog", "Tom had a red ball", "Lily")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config(
        RLConfig,
        config_name="rl",
        overrides=[
            *(f"model.path={directory}", "model.dtype=float32", f"data.files=[{tmp_path / 'prompts.jsonl'}]"),
            *("rollout.engine=sglang", "rollout.sglang.mem_fraction_static=0.1", "numerics=fast", "steps=3"),
            *("prompts_per_step=4", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=16"),
            *("algorithm.drop_constant_groups=false", "train.optimizer.lr=1e-3"),
            f"run={{directory: {tmp_path}, tensorboard: false, progress: false, save_rollouts_every: 1}}",
        ],
    )
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        run = Path(run_rl(config, reward_function=count_spaces)["run"])
        assert other.poll() is None
    finally:
        other.kill()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["policy/logprob_gap_max"] for line in metrics if "policy/logprob_gap_max" in line]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    weights = sum(weight.numel() for weight in load_model(directory).module.parameters())
    assert {line["hybrid/bytes_moved"] for line in metrics if "hybrid/bytes_moved" in line} == {4 * weights}
    rollouts = sorted((run / "rollouts").glob("*.parquet"))
    assert [set(Batch.from_parquet(path).pylist("policy_version_min")) for path in rollouts] == [{0}, {1}, {2}]


def count_spaces(response: str, **_: object) -> float:
    """A reward that differs between samples."""
    return response.count(" ") / 10
