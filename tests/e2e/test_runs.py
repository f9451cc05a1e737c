"""Whole runs on a tiny model, in exact mode: what is promised bit for bit is compared bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import assert_same_run, metrics_of, read_lines, rl_config, sft_config, weights_of

from hybridflow.batch import Batch
from hybridflow.config import ConfigError, to_yaml
from hybridflow.flow.commands import ExportConfig, GenerateConfig, run_export, run_generate, run_rl, run_sft
from hybridflow.flow.rl_job import RLConfig
from hybridflow.roles.policy import ModelSettings
from hybridflow.types import SamplingParams


def test_sft_stopped_and_resumed_equals_undisturbed(task: dict[str, str], tmp_path: Path) -> None:
    # 40 rows and 16 a step: the stop after 5 steps lies on an epoch's border (80 rows), the one after 7 inside an epoch.
    whole = run_sft(sft_config(task, tmp_path / "whole", "steps=20"))["run"]
    for stop in (5, 7):
        root = tmp_path / f"stopped_{stop}"
        run_sft(sft_config(task, root, f"steps={stop}", "evaluation.every_steps=5"))
        resumed = run_sft(sft_config(task, root, "steps=20"))["run"]
        assert [line["step"] for line in metrics_of(resumed)] == list(range(1, 21))
        assert weights_of(whole).keys() == weights_of(resumed).keys()
        for name, weight in weights_of(whole).items():
            assert torch.equal(weight, weights_of(resumed)[name]), (stop, name)


def test_rl_stopped_and_resumed_equals_undisturbed(task: dict[str, str], start: str, tmp_path: Path) -> None:
    # 40 prompts and 6 a step: the run crosses an epoch's border inside a step.
    whole = run_rl(rl_config(task, tmp_path / "whole", start, "steps=20", "updates_per_step=2"))["run"]
    run_rl(rl_config(task, tmp_path / "stopped", start, "steps=7", "updates_per_step=2"))
    resumed = run_rl(rl_config(task, tmp_path / "stopped", start, "steps=20", "updates_per_step=2"))["run"]
    assert_same_run(whole, resumed)
    rollouts = [(Path(run) / "rollouts" / "step_00000020.parquet").read_bytes() for run in (whole, resumed)]
    assert rollouts[0] == rollouts[1]


@pytest.mark.timeout(300)
def test_ray_writes_the_numbers_of_one_process(
    task: dict[str, str], start: str, tmp_path: Path, ray_cluster: None
) -> None:
    # What sampling cuts has a column of its own, which has to come along.
    cut = ("steps=4", "sampling.top_p=0.95", "algorithm.kl_coefficient=0.05")
    local = run_rl(rl_config(task, tmp_path / "local", start, *cut))["run"]
    for chunks in (1, 3):
        overrides = (*cut, "runtime.kind=ray", f"rollout.chunks={chunks}")
        assert_same_run(local, run_rl(rl_config(task, tmp_path / f"ray_{chunks}", start, *overrides))["run"])


def test_first_update_starts_at_ratio_one_and_lr_zero_stays_there(
    task: dict[str, str], start: str, tmp_path: Path
) -> None:
    run = run_rl(rl_config(task, tmp_path, start, "steps=10", "train.optimizer.lr=0.0"))["run"]
    for line in metrics_of(run):
        assert (line["policy/ratio_mean"], line["policy/ratio_max"]) == (1.0, 1.0)
        assert (line["policy/clip_fraction_low"], line["policy/clip_fraction_high"]) == (0.0, 0.0)
        assert (line["policy/kl_to_rollout"], line["policy/kl_to_reference"]) == (0.0, 0.0)
    assert any(line["reward/std"] > 0 for line in metrics_of(run)), (
        "some groups differ, so a gradient was there to ignore"
    )
    for name, weight in weights_of(run).items():
        assert torch.equal(weight, weights_of(start)[name])


def test_kill_in_the_middle_of_a_save_loses_nothing(task: dict[str, str], start: str, tmp_path: Path) -> None:
    whole = run_rl(rl_config(task, tmp_path / "whole", start, "steps=6", "checkpoint.every_steps=1"))["run"]
    root = tmp_path / "killed"
    script = (
        "import sys, yaml, os, signal, hybridflow.checkpoint.writer as w\n"
        "from hybridflow.config import check_config\n"
        "from hybridflow.flow.commands import run_rl\nfrom hybridflow.flow.rl_job import RLConfig\n"
        "commit = w.CheckpointWriter.commit\n"
        "def dying(self, *a, **k):\n"
        "    if self._step == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return commit(self, *a, **k)\n"
        "w.CheckpointWriter.commit = dying\n"
        "run_rl(check_config(RLConfig, yaml.safe_load(sys.argv[1])))\n"
    )
    config = rl_config(task, root, start, "steps=6", "checkpoint.every_steps=1")
    killed = subprocess.run([sys.executable, "-c", script, to_yaml(config)], timeout=100, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    assert any(path.name.startswith(".writing") for path in (root / "quickstart" / "run" / "checkpoints").iterdir())
    assert_same_run(whole, run_rl(config)["run"])
    assert not any(path.name.startswith(".writing") for path in (root / "quickstart" / "run" / "checkpoints").iterdir())


def test_kill_at_random_moments_loses_nothing(task: dict[str, str], start: str, tmp_path: Path) -> None:
    whole = run_rl(rl_config(task, tmp_path / "whole", start, "steps=8", "checkpoint.every_steps=1"))["run"]
    config = rl_config(task, tmp_path / "killed", start, "steps=8", "checkpoint.every_steps=1")
    script = (
        "import sys, yaml\nfrom hybridflow.config import check_config\n"
        "from hybridflow.flow.commands import run_rl\nfrom hybridflow.flow.rl_job import RLConfig\n"
        "run_rl(check_config(RLConfig, yaml.safe_load(sys.argv[1])))\n"
    )
    metrics = tmp_path / "killed" / "quickstart" / "run" / "metrics.jsonl"
    for after_step in (2, 5):
        process = subprocess.Popen([sys.executable, "-c", script, to_yaml(config)])
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= after_step:
                break
            time.sleep(0.005)
        process.kill()
        process.wait(timeout=10)
    assert_same_run(whole, run_rl(config)["run"])


def test_export_gives_transformers_the_same_logits(task: dict[str, str], start: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_export(ExportConfig(checkpoint=start, output=str(tmp_path / "exported")))
    ids = AutoTokenizer.from_pretrained(tmp_path / "exported")("12+34=", return_tensors="pt")["input_ids"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    trained = AutoModelForCausalLM.from_pretrained(Path(start) / "model")
    assert torch.equal(exported(ids).logits, trained(ids).logits)


def test_an_adapter_goes_out_and_comes_back(task: dict[str, str], start: str, tmp_path: Path) -> None:
    """Its export stands alone with its tokenizer; merged by export, or at load, it is the run's own result, bit for bit."""
    pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")
    from transformers import AutoTokenizer

    short = "steps=2", "evaluation.data=null", "train.optimizer.lr=0.01"
    rest = "model.config=null", "model.tokenizer=null", f"model.path={start}"
    run = str(run_sft(sft_config(task, tmp_path, *short, *rest, "train.lora.rank=4"))["run"])
    adapter, whole = str(tmp_path / "adapter"), str(tmp_path / "whole")
    run_export(ExportConfig(checkpoint=run, output=adapter))
    run_export(ExportConfig(checkpoint=run, output=whole, merge=True))
    expected = load_file(Path(run) / "model" / "model.safetensors")
    merged = load_file(Path(whole) / "model.safetensors")
    assert merged.keys() == expected.keys() and all(torch.equal(merged[name], expected[name]) for name in expected)
    assert (
        AutoTokenizer.from_pretrained(adapter)("12+34=")["input_ids"]
        == AutoTokenizer.from_pretrained(start + "/model")("12+34=")["input_ids"]
    )
    samples = [
        run_generate(
            GenerateConfig(
                model=model, prompts=("1+2=", "12+34="), sampling=SamplingParams(max_new_tokens=6), numerics="exact"
            )
        )
        for model in (ModelSettings(path=start, adapter=adapter), ModelSettings(path=whole), ModelSettings(path=start))
    ]
    assert samples[0].equals(samples[1]) and not samples[0].equals(samples[2])
    with pytest.raises(
        ConfigError, match=f"model.path: '{adapter}' is a LoRA adapter, not a model; set model.path to its base .it was"
    ):
        run_generate(GenerateConfig(model=ModelSettings(path=adapter), prompts=("1+2=",)))
    for output, what in ((adapter, "an adapter"), (whole, "a model")):
        for merge in (False, True):
            with pytest.raises(ConfigError, match=f"output: '{output}' holds {what} already"):
                run_export(ExportConfig(checkpoint=run, output=output, merge=merge))
    with pytest.raises(ConfigError, match="base: is for merge=true alone"):
        run_export(ExportConfig(checkpoint=run, output=str(tmp_path / "new"), base=start))
    for changes, message in (
        (("train.lora.rank=8",), "the saved adapter has rank 4: set train.lora.rank=4"),
        ((), "this run trained an adapter .train.lora.; set it again"),
        (("train.lora.rank=4", "train.lora.alpha=16"), "at a scale of 8, and train.lora makes it 4"),
        (
            ("train.lora.rank=4", f"model.path={whole}"),
            f"on other base weights than '{whole}' holds; resume with the model.path",
        ),
        (("train.lora.rank=4", f"model.adapter={adapter}"), "on other base weights than this model has"),
    ):
        with pytest.raises(ValueError, match=message):
            run_sft(sft_config(task, tmp_path, *short, *rest, *changes, "steps=3"))
    onwards = f"run={{directory: {tmp_path}, name: onwards, tensorboard: false, progress: false}}"
    run_sft(sft_config(task, tmp_path, *short, *rest, f"train.lora.path={adapter}", onwards))
    on_merged = f"run={{directory: {tmp_path}, name: on_merged, tensorboard: false, progress: false}}"
    last = run_sft(
        sft_config(task, tmp_path, *short, *rest, f"model.adapter={adapter}", "train.lora.rank=4", on_merged)
    )["run"]
    with pytest.raises(
        ValueError, match="merge: the checkpoint does not name the adapter's base model; give its directory as base="
    ):
        run_export(ExportConfig(checkpoint=str(last), output=str(tmp_path / "new"), merge=True))
    run_export(ExportConfig(checkpoint=str(last), output=str(tmp_path / "new"), merge=True, base=whole))


def test_the_weights_really_moved(task: dict[str, str], start: str, tmp_path: Path) -> None:
    run = run_rl(rl_config(task, tmp_path, start, "steps=2"))["run"]
    moved = [name for name, weight in weights_of(run).items() if not torch.equal(weight, weights_of(start)[name])]
    assert len(moved) == len(weights_of(start))


def test_a_run_does_not_go_on_to_another_reference(task: dict[str, str], start: str, tmp_path: Path) -> None:
    """The reference is the model at the start, whose directory another run may have written anew."""
    first = tmp_path / "first"
    shutil.copytree(start, first)
    run = run_rl(rl_config(task, tmp_path, str(first), "steps=1"))["run"]
    weights = first / "model" / "model.safetensors"
    kept = weights.read_bytes()
    save_file({name: 1.01 * weight for name, weight in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.path: '.*first' does not hold the weights that the reference had"):
        run_rl(rl_config(task, tmp_path, str(first), "steps=2"))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(first, elsewhere)
    (elsewhere / "model" / "model.safetensors").write_bytes(kept)
    run_rl(rl_config(task, tmp_path, str(first), "steps=2", f"reference.path={elsewhere}"))
    whole = run_rl(rl_config(task, tmp_path / "whole", start, "steps=2"))["run"]
    assert_same_run(whole, run)


def test_evaluations_are_drawn_by_the_runs_seed(task: dict[str, str], start: str, tmp_path: Path) -> None:
    sampled = ("steps=1", "evaluation.sampling={temperature: 2.0, max_new_tokens: 9}")
    runs = [
        run_rl(rl_config(task, tmp_path / str(i), start, *sampled, f"seed={seed}")) for i, seed in enumerate((1, 1, 2))
    ]
    drawn = [metrics_of(run["run"])[0]["eval/response_length_mean"] for run in runs]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_a_stopped_run_leaves_and_what_another_start_changes_are_told(
    task: dict[str, str], start: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = ("run.progress=true", "reward={function: null, inline: true}")
    calls = itertools.count()

    def stop_in_step_3(response: str) -> float:
        if next(calls) == 2 * 24 + 3 * 8:
            raise KeyboardInterrupt
        return float(len(response))

    def run(*words: str, reward: Callable[..., float] = lambda response: float(len(response))) -> str:
        """What it said."""
        with contextlib.suppress(KeyboardInterrupt):
            run_rl(rl_config(task, tmp_path, start, *told, *words), reward_function=reward)
        return " ".join(capfd.readouterr().err.split())

    assert "stopped after step 2, and none was saved: the same command begins anew (checkpoint.every_steps=50)" in run(
        "steps=4", reward=stop_in_step_3
    )
    calls = itertools.count()
    said = run("steps=4", "checkpoint.every_steps=1", reward=stop_in_step_3)
    assert "no checkpoint is there; beginning anew at step 1" in said
    assert "stopped after step 2; the same command goes on after step 2, the newest that was saved" in said
    said = run("steps=4", "checkpoint.every_steps=1", "sampling.temperature=0.5")
    assert "other settings since step 2: sampling.temperature 1.0 -> 0.5" in said
    (path,) = tmp_path.rglob("history.jsonl")
    assert [line["changed"] for line in read_lines(path) if "changed" in line] == [{"sampling.temperature": [1.0, 0.5]}]
    assert "other settings" not in run("steps=5", "sampling.temperature=0.5")
    path.with_name("config.yaml").write_text("steps: [")
    with pytest.raises(ConfigError, match=r"run.name: '.*config.yaml' cannot be read as YAML, .*; mend or delete it"):
        run("steps=6", "sampling.temperature=0.5")


def test_fast_mode_resumes_within_tolerance(task: dict[str, str], start: str, tmp_path: Path) -> None:
    def config(root: Path, *overrides: str) -> RLConfig:
        return dataclasses.replace(rl_config(task, root, start, *overrides), numerics="fast")

    whole = run_rl(config(tmp_path / "whole", "steps=6"))["run"]
    run_rl(config(tmp_path / "stopped", "steps=3"))
    resumed = run_rl(config(tmp_path / "stopped", "steps=6"))["run"]
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(weight, weights_of(resumed)[name], rtol=1e-4, atol=1e-5)
    for line in metrics_of(whole):
        assert line["policy/logprob_gap_max"] < 1e-4


def test_another_seed_draws_other_samples(task: dict[str, str], start: str, tmp_path: Path) -> None:
    def prompts_and_responses(seed: int) -> tuple[list[str], list[str]]:
        run = run_rl(rl_config(task, tmp_path / str(seed), start, "steps=1", f"seed={seed}", "data.shuffle=false"))[
            "run"
        ]
        batch = Batch.from_parquet(Path(run) / "rollouts" / "step_00000001.parquet")
        return batch.pylist("prompt"), batch.pylist("response")

    (prompts_0, responses_0), (prompts_1, responses_1) = prompts_and_responses(0), prompts_and_responses(1)
    assert prompts_0 == prompts_1
    assert responses_0 != responses_1
