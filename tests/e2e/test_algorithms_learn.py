"""Each algorithm, chosen as on the command line, raises the reward of a tiny model, and each term of it does what it is for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY, read_lines, write_task

from hybridflow.config import load_config
from hybridflow.flow.commands import run_rl
from hybridflow.flow.rl_job import RLConfig

PAPERS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
STEPS = 25


def share_of_ones(response: str) -> float:
    """A reward that a new model can raise in a few steps."""
    return response.count("1") / max(len(response), 1)


@pytest.fixture(scope="module")
def learn(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("runs")
    task = write_task(root / "task")
    known: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def learn(*overrides: str, reward: Callable[..., float] | None = share_of_ones) -> list[dict[str, Any]]:
        """The metrics of each step."""
        if overrides not in known:
            run = f"run={{directory: {root}, name: run-{len(known)}, tensorboard: false, progress: false}}"
            sampling = "sampling={samples_per_prompt: 8, max_new_tokens: 6, temperature: 1.0}"
            lines = [
                f"evaluation={{data: {{files: [{task['valid']}]}}, max_prompts: 8, sampling: {{max_new_tokens: 6, temperature: 0.0}}}}",
                f"model.config={TINY}",
                f"model.tokenizer={task['tokenizer']}",
                f"data.files=[{task['few']}]",
                run,
                sampling,
            ]
            lines += [
                f"steps={STEPS}",
                "prompts_per_step=8",
                "train.optimizer.lr=3e-3",
                "reward.inline=true",
                *overrides,
            ]
            config = load_config(RLConfig, config_name="rl", overrides=lines)
            known[overrides] = read_lines(Path(run_rl(config, reward_function=reward)["run"]) / "metrics.jsonl")
        return known[overrides]

    return learn


def mean_of(steps: list[dict[str, Any]], name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)


@pytest.mark.parametrize("name", PAPERS)
def test_each_paper_raises_the_reward(learn: Callable[..., list[dict[str, Any]]], name: str) -> None:
    steps = learn(f"algorithm={name}")
    assert len(steps) == STEPS and mean_of(steps[:3], "reward/mean") < 0.15
    assert mean_of(steps[-3:], "reward/mean") > 0.5
    # On the first update after a rollout nothing has moved, whatever the advantages are.
    assert max(step["policy/logprob_gap_max"] for step in steps) < 1e-5
    assert max(step["policy/clip_fraction_low"] + step["policy/clip_fraction_high"] for step in steps) == 0.0


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus"])
def test_kl_in_the_reward_holds_the_policy_near_the_reference(
    learn: Callable[..., list[dict[str, Any]]], name: str
) -> None:
    plain = learn(f"algorithm={name}")
    held = learn(f"algorithm={name}", "algorithm.kl_in_reward=1")
    assert abs(held[0]["reward/kl"]) < 1e-6 and plain[-1]["reward/kl"] > 0.5
    assert held[-1]["reward/kl"] < plain[-1]["reward/kl"] / 4


def test_kl_in_the_loss_holds_the_policy_near_the_reference(learn: Callable[..., list[dict[str, Any]]]) -> None:
    plain = learn("algorithm=grpo", "algorithm.report_kl=true")
    held = learn("algorithm=grpo", "algorithm.kl_coefficient=3")
    assert held[-1]["policy/kl_to_reference"] < plain[-1]["policy/kl_to_reference"] / 4


def test_an_entropy_bonus_keeps_the_entropy(learn: Callable[..., list[dict[str, Any]]]) -> None:
    plain, kept = learn("algorithm=grpo"), learn("algorithm=grpo", "algorithm.entropy_coefficient=1.0")
    assert kept[-1]["policy/entropy"] > plain[-1]["policy/entropy"] + 0.3


def test_dual_clip_is_told_where_several_updates_move_the_policy(learn: Callable[..., list[dict[str, Any]]]) -> None:
    moved = learn("updates_per_step=4", "train.optimizer.lr=2e-2", "algorithm.clip_dual=1.2", "steps=4")
    assert max(step["policy/clip_fraction_dual"] for step in moved) > 0.0
    assert "policy/clip_fraction_dual" not in learn("algorithm=grpo")[-1]


def test_an_advantage_function_and_rewards_of_ones_own_by_file(
    learn: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """REINFORCE with the batch's mean as its baseline, and two rewards, in a file beside the run."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def centred(rewards, group_ids, ok):\n"
        "    return rewards - np.nanmean(rewards)\n"
        "def ones(response):\n"
        "    return response.count('1') / max(len(response), 1)\n"
        "async def short(response, limit):\n"
        "    return float(len(response) <= limit)\n"
    )
    mine = f"{tmp_path}/mine.py"
    components = f"{{ones: {{function: '{mine}:ones'}}, short: {{function: '{mine}:short', weight: 0.0, arguments: {{limit: 6}}}}}}"
    steps = learn(
        f"algorithm.advantage_function={mine}:centred",
        "algorithm.drop_constant_groups=false",
        "sampling.samples_per_prompt=1",
        "prompts_per_step=40",
        f"reward.components={components}",
        reward=None,
    )
    assert mean_of(steps[-3:], "reward/ones") > mean_of(steps[:3], "reward/ones") + 0.2
    assert {step["reward/short"] for step in steps} == {1.0} == {steps[-1]["eval/reward_short"]}
    assert steps[-1]["eval/reward_ones"] == pytest.approx(steps[-1]["eval/reward_mean"], rel=1e-9)
    assert all(step["reward/mean"] == pytest.approx(step["reward/ones"], rel=1e-9) for step in steps)


@pytest.mark.parametrize(
    "shaping",
    [
        ("sampling.repetition_penalty=1.3", "train.share_prompts=true"),
        ("sampling.repetition_penalty=0.8", "sampling.min_p=0.05", "sampling.top_p=0.9", "numerics=exact"),
        ("sampling.min_p=0.01", "sampling.top_k=30", "sampling.top_p=0.9", "train.share_prompts=true"),
    ],
    ids=["penalty", "all, exact", "cut"],
)
def test_shaped_samples_train_at_a_ratio_of_one(
    learn: Callable[..., list[dict[str, Any]]], shaping: tuple[str, ...]
) -> None:
    steps = learn("steps=4", "algorithm.kl_coefficient=0.05", *shaping)
    gap = 0.0 if "numerics=exact" in shaping else 1e-5
    assert max(step["policy/logprob_gap_max"] for step in steps) <= gap
    first, last = steps[0]["policy/kl_to_reference"], steps[-1]["policy/kl_to_reference"]
    if any("_p=" in setting for setting in shaping):
        assert first > 1e-3  # The reference knows the tokens that were cut.
    else:
        assert abs(first) <= gap and last > 1e-5


@pytest.mark.parametrize("adapter", [(), ("+train.lora={rank: 4, alpha: 8}",)], ids=["a model", "without the adapter"])
def test_the_kl_of_a_policy_of_one_token_is_what_the_reference_thinks_of_it(
    learn: Callable[..., list[dict[str, Any]]], adapter: tuple[str, ...]
) -> None:
    """Were the reference cut as the draw was, its set would be that token, and the KL 0."""
    settings = (
        "steps=1",
        "algorithm.drop_constant_groups=false",
        "algorithm.report_kl=true",
        "algorithm.kl_estimator=k1",
    )
    (greedy,) = learn(*settings, "sampling.top_k=1", *adapter)
    assert greedy["policy/kl_to_reference"] > 0.1 and greedy["policy/logprob_gap_max"] == 0.0
    (most,) = learn(*settings, "sampling.top_p=0.9", *adapter)
    assert 0.0 < most["policy/kl_to_reference"] <= -math.log(0.9)
    (whole,) = learn(*settings, *adapter)
    assert abs(whole["policy/kl_to_reference"]) < 1e-5
