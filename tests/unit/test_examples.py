"""examples/: what the commands of its README load, and that its functions do what they say."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hybridflow.algorithms import compute_group_advantages
from hybridflow.algorithms.advantages import compute_advantages, resolve_advantage_function
from hybridflow.batch import Batch
from hybridflow.config import load_config, to_yaml
from hybridflow.flow.commands import EvalConfig
from hybridflow.flow.quickstart import QuickstartConfig
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig
from hybridflow.rewards import RewardPool

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLASSES = {"rl": RLConfig, "sft": SFTConfig, "eval": EvalConfig, "quickstart": QuickstartConfig}
RECIPES = [path for path in sorted(EXAMPLES.glob("*/*.yaml")) if path.parent.name != "cluster"]
COMMANDS = sorted(
    {
        line.removeprefix("#").strip()
        for path in (EXAMPLES / "README.md", *RECIPES)
        for line in path.read_text().splitlines()
        if line.removeprefix("#").strip().startswith("hybridflow ")
    }
)


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def load_example(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_recipe_has_a_command() -> None:
    told = " ".join(COMMANDS)
    assert len(RECIPES) == 6
    assert all(f"--config-path examples/{path.parent.name} --config-name {path.stem}" in told for path in RECIPES)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_load(line: str) -> None:
    _, command, *words = shlex.split(line)
    flags = {word: words[place + 1] for place, word in enumerate(words) if word.startswith("--")}
    overrides = [word for word in words if not word.startswith("--") and word not in flags.values()]
    config = load_config(
        CLASSES[command],
        config_path=flags.get("--config-path"),
        config_name=flags.get("--config-name", command),
        overrides=overrides,
    )
    named = re.findall(r"(examples/\S+\.py):(\w+)", to_yaml(config))
    assert all(f"\ndef {function}(" in (ROOT / path).read_text() for path, function in named)
    assert bool(named) == (command == "rl" and "gsm8k" not in line and "=null" not in line)


def test_the_own_advantage_weighs_a_right_answer_by_how_rare_it_is() -> None:
    config = load_config(RLConfig, config_path="examples/own_advantage", config_name="own_advantage")
    function = resolve_advantage_function(config.algorithm.advantage_function or "")
    # One of 4 right, 3 of 4 right, none right, all right, and one right of two where two more rows failed.
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 9, 1, 0, 9], np.float64)
    groups, ok = np.repeat(np.arange(5) * 10**12, 4), rewards < 9
    got = compute_advantages(function, rewards, groups, ok).reshape(5, 4)
    assert got[0].tolist() == [3, -1, -1, -1]
    assert got[1] == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])
    assert not got[2].any() and not got[3].any()
    assert got[4].tolist() == [0, 1, -1, 0]
    # GRPO's own weigh both alike: what is rare by much, be it right or wrong.
    plain = compute_group_advantages(rewards, groups, ok, normalize_std=True).reshape(5, 4)
    assert plain[0, 0] == pytest.approx(-plain[1, 3])


def test_the_own_advantage_follows_the_gradient_of_log_p() -> None:
    """Over all draws of 6 answers from 3 (one of them right), against d log p / d logits, scaled by the chance that any is right."""
    function = load_example("own_advantage/advantage.py").log_success
    p = np.array([0.5, 0.3, 0.2])
    draws = np.stack(np.meshgrid(*[np.arange(3)] * 6), -1).reshape(-1, 6)
    expected = np.zeros(3)
    for draw in draws:
        advantages = function((draw == 0).astype(np.float64), np.zeros(6, np.int64), np.ones(6, np.bool_))
        scores = np.eye(3)[draw] - p
        expected += p[draw].prod() * (advantages[:, None] * scores).mean(0)
    direction = np.eye(3)[0] - p
    cosine = expected @ direction / np.linalg.norm(expected) / np.linalg.norm(direction)
    assert cosine == pytest.approx(1, abs=1e-9)
    some_right = 1 - (1 - p[0]) ** 6
    assert 0.8 * some_right < np.linalg.norm(expected) / np.linalg.norm(direction) < some_right


def test_the_own_reward_is_a_share_of_the_digits_beside_the_whole_answer() -> None:
    config = load_config(
        RLConfig, config_path="examples/own_reward", config_name="own_reward", overrides=["reward.inline=true"]
    )
    responses = ["58", "57", "85", "581", "5", "", "5812", " 58\n"]
    with RewardPool(config.reward) as pool:
        scored = pool.score(Batch.from_columns(response=responses, answer=["58"] * len(responses)))
    assert scored.pylist("reward/digits") == [1, 0.5, 0, 0.5, 0.5, 0, 0, 1]
    assert scored.pylist("reward/right") == [1, 0, 0, 0, 0, 0, 0, 1]
    assert scored.pylist("reward") == [1.5, 0.25, 0, 0.25, 0.25, 0, 0, 1.5]


def test_gloom_is_more_for_a_sad_story() -> None:
    pytest.importorskip("vaderSentiment")
    gloom = load_example("sentiment/reward.py").gloom
    assert (
        gloom("She cried. It was a terrible, sad day.") > 0.5 > -0.5 > gloom("She was happy and loved her nice cake.")
    )


def test_gsm8k_is_split_and_its_numbers_stand_alone(tmp_path: Path) -> None:
    prepare = load_example("gsm8k/data.py")
    rows = [
        {
            "question": f"q{number}",
            "answer": f"2*{number} = <<2*{number}={2 * number}>>{2 * number}\n#### 1,{number:03}",
        }
        for number in range(prepare.NUM_VALID + 3)
    ]
    for name, part in (("train", rows), ("test", rows[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    prepare.main(tmp_path, tmp_path / "out")
    found = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "valid", "test")
    }
    assert [len(found[name]) for name in ("train", "valid", "test")] == [3, prepare.NUM_VALID, 2]
    assert found["valid"][0] == {"question": "q3", "solution": "2*3 = 6\n#### 1,003", "answer": "1003"}
    assert found["train"] + found["valid"] == [prepare.convert(row) for row in rows]
