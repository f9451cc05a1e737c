"""The tutorial's GRPO is the framework's: from one start, on the same data and draws, it sees the same rewards step by step."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from hybridflow.config import load_config
from hybridflow.flow.commands import run_rl, run_sft
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial_grpo.py"
sys.path.insert(0, str(TUTORIAL.parent))
import tutorial_grpo as tutorial  # noqa: E402

STEPS = 10


def test_it_is_short_and_stands_alone() -> None:
    text = TUTORIAL.read_text()
    assert len(text.splitlines()) < 300
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {name.split(".")[0] for name in names}
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch", "transformers"}


@pytest.mark.timeout(300)
def test_its_curve_is_the_frameworks(tmp_path: Path) -> None:
    files = write_sums(tmp_path / "sums", seed=3)
    train, held_out = tutorial.make_sums(3)
    rows = [json.loads(line) for line in Path(files["train"]).read_text().splitlines()]
    assert [(row["prompt"], row["answer"]) for row in rows] == [(each.prompt, each.answer) for each in train]
    common = ["evaluation.data=null", "evaluation.stop_at=null", "seed=3", f"data.files=[{files['train']}]"]
    run = f"run={{directory: {tmp_path}, name: %s, tensorboard: false, progress: false, report: false}}"
    start = run_sft(
        load_config(
            SFTConfig,
            config_name="quickstart_sft",
            overrides=[*common, f"model.tokenizer={tmp_path}/sums/tokenizer", "steps=70", run % "start"],
        )
    )
    config = load_config(
        RLConfig,
        config_name="quickstart_rl",
        overrides=[*common, f"model.path={start['run']}", f"steps={STEPS}", run % "rl"],
    )
    theirs = [json.loads(line) for line in (Path(run_rl(config)["run"]) / "metrics.jsonl").read_text().splitlines()]

    model = LlamaForCausalLM.from_pretrained(start["model"])
    settings = tutorial.Settings(steps=STEPS, seed=3)
    assert tutorial.measure_accuracy(model, held_out) < 0.5
    ours = list(tutorial.train_grpo(model, train, settings))

    # Draws are keyed alike, so a token differs only where its uniform lies within rounding (1e-6) of a border between two tokens;
    # the losses are sums of the same float32 numbers in another order.
    assert [seen["reward"] for seen in ours] == [line["reward/mean"] for line in theirs]
    assert [seen["rows"] for seen in ours] == [line["train/rows"] for line in theirs]
    assert [seen["loss"] for seen in ours] == pytest.approx([line["policy/loss"] for line in theirs], abs=2e-5)
    trained = LlamaForCausalLM.from_pretrained(config.run.directory + "/quickstart/rl/model")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, trained.state_dict()[name], rtol=0, atol=2e-4, msg=name)
    assert max(seen["reward"] for seen in ours) > 0.01


def test_it_learns() -> None:
    """Without any start from the framework: its own SFT, and then rewards that rise."""
    train, held_out = tutorial.make_sums(0)
    model = tutorial.build_model(0)
    tutorial.train_sft(model, train, held_out, until=0.3, seed=0)
    before = tutorial.measure_accuracy(model, held_out)
    seen = list(tutorial.train_grpo(model, train, tutorial.Settings(steps=30, warmup=2)))
    assert sum(each["reward"] for each in seen[-5:]) > 1.2 * sum(each["reward"] for each in seen[:5])
    assert tutorial.measure_accuracy(model, held_out) > before + 0.1
