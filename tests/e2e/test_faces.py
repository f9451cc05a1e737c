"""The two faces, command line and Python, on a tiny model: what a user types, what comes out, what is said when it is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hybridflow.cli.main import main
from hybridflow.config import ConfigError, load_config
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig
from hybridflow.flow.trainer import RLTrainer, SFTTrainer
from hybridflow.observability.run import RunDirectory, RunSettings

MODEL = (
    "{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64, tie_word_embeddings: false}"
)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def hybridflow(*arguments: str, cwd: Path) -> Done:
    """The command line in this process, as its entry point calls it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Done(code, out.getvalue(), err.getvalue())


def test_the_command_runs_as_a_program(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-m", "hybridflow", "rl", "model.path=nowhere", "data.files=[x.jsonl]"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=100)
    assert done.returncode == 2
    assert done.stderr == (
        "error: model.path: 'nowhere' does not exist; give a Hugging Face model directory or a run's directory\n"
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a user has it after `hybridflow sft`."""
    place = tmp_path_factory.mktemp("user")
    files = write_sums(place / "sums", seed=0)
    (place / "train.jsonl").write_text(Path(files["train"]).read_text())
    (place / "test.jsonl").write_text("".join(Path(files["test"]).read_text().splitlines(keepends=True)[:10]))
    (place / "long.jsonl").write_text('{"prompt": "' + "1+2=" * 40 + '", "answer": "3"}\n')
    (place / "my_reward.py").write_text(
        "def reward(response: str, answer: str) -> float:\n    return float(len(response) == len(answer))\n"
    )
    done = hybridflow(
        "sft", f"model.config={MODEL}", "model.tokenizer=sums/tokenizer", "data.files=[train.jsonl]",
        "data.response_column=answer", "steps=2", "run.name=first", "run.tensorboard=false", "train.optimizer.lr=0.001", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["run"] == "runs/default/first"
    return place


def test_a_run_leaves_its_files(place: Path) -> None:
    run = place / "runs" / "default" / "first"
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.yaml", "environment.json", "metrics.jsonl", "phases.jsonl", "checkpoints", "model"}
    assert json.loads((run / "environment.json").read_text())["versions"]["torch"]
    phases = [json.loads(line) for line in (run / "phases.jsonl").read_text().splitlines()]
    assert {(line["step"], line["phase"]) for line in phases} >= {(1, "update"), (2, "update")}
    updates = [span for line in phases for span in line["spans"] if span["verb"] == "update"]
    assert [span["notes"]["hybrid/bytes_moved"] for span in updates] == [0, 0]
    assert not any("notes" in span for line in phases for span in line["spans"] if span["verb"] != "update")


def test_rl_goes_on_from_sft_and_the_rest_works_on_its_result(place: Path) -> None:
    done = hybridflow(
        "rl", "model.path=runs/default/first", "data.files=[train.jsonl]", "reward.function=my_reward.py:reward", "steps=2",
        "prompts_per_step=4", "sampling.max_new_tokens=4", "run.name=second", "evaluation.data.files=[test.jsonl]",
        "algorithm.report_kl=true", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0.0 <= result["eval/reward_mean"] <= 1.0
    rollouts = pq.read_table(place / "runs/default/second/rollouts/step_00000002.parquet")
    assert rollouts.num_rows == 32
    assert {"tokens", "loss_mask", "rollout_logprobs", "ref_logprobs", "reward", "answer"} <= set(rollouts.column_names)
    assert any((place / "runs/default/second/tensorboard").iterdir())
    sources = json.loads((place / "runs/default/second/environment.json").read_text())["sources"]
    assert len(sources["reward"]) == 64

    generated = hybridflow(
        "generate", "model.path=runs/default/second", 'prompts=["12+34="]', "sampling.max_new_tokens=4", cwd=place
    )
    assert json.loads(generated.stdout)["prompt"] == "12+34=", generated.stderr
    evaluated = hybridflow(
        "eval", "model.path=runs/default/second", "evaluation.data.files=[test.jsonl]", "reward.function=my_reward.py:reward",
        "evaluation.sampling.max_new_tokens=4", "output=scored.parquet", cwd=place,
    )  # fmt: skip
    assert json.loads(evaluated.stdout)["rows"] == 10, evaluated.stderr
    assert pq.read_table(place / "scored.parquet").num_rows == 10
    exported = hybridflow("export", "checkpoint=runs/default/second", "output=exported", cwd=place)
    assert exported.returncode == 0, exported.stderr
    assert (place / "exported" / "model.safetensors").is_file()
    again = hybridflow("export", "checkpoint=runs/default/second", "output=exported", cwd=place)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1), again.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["steps=0"], "steps"),
        (["sampling.temprature=1"], "sampling.temperature"),
        (["model.path=nowhere"], "'nowhere' does not exist"),
        (["sampling.top_p=0.9", "rollout.engine=vllm"], "top_p"),
        (["sampling.samples_per_prompt=1"], "samples_per_prompt"),
        (["reward.function=my_reward.py:rewrad"], "rewrad"),
        (["data.files=[missing.jsonl]"], "missing.jsonl"),
        (["algorithm.advantage_function=nowhere:f"], "nowhere"),
        (["checkpoint.resume_mode=path"], "resume_path"),
        (["numerics=exact", "model.dtype=bfloat16"], "numerics"),
    ],
)
def test_a_wrong_setting_is_one_sentence_before_anything_starts(
    place: Path, arguments: list[str], expected: str
) -> None:
    usual = [
        "model.path=runs/default/first",
        "data.files=[train.jsonl]",
        "reward.function=my_reward.py:reward",
        "run.name=wrong",
    ]
    done = hybridflow("rl", *usual, *arguments, cwd=place)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "runs" / "default" / "wrong").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_live_functions_from_python(place: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "ray":
        request.getfixturevalue("ray_cluster")
    bonus = 0.25

    def reward(response: str) -> float:
        if response.startswith("1"):
            raise ValueError("no ones")
        return len(response) + bonus

    def advantages(rewards: np.ndarray, group_ids: np.ndarray, ok: np.ndarray) -> np.ndarray:
        return np.where(ok, rewards - np.nanmean(rewards), 0.0)

    config = load_config(
        RLConfig,
        config_name="rl",
        overrides=[
            f"model.path={place / 'runs/default/first'}", f"data.files=[{place / 'train.jsonl'}]", "steps=2", "prompts_per_step=8",
            "sampling.max_new_tokens=4", f"run={{directory: {tmp_path}, name: live, progress: false, tensorboard: false}}",
            f"runtime.kind={kind}",
        ],
    )  # fmt: skip
    result = RLTrainer(config, reward=reward, advantages=advantages).train()
    assert result["reward/errors"] > 0
    assert result["rows/failed"] == result["reward/errors"]
    rows = pq.read_table(Path(result["run"]) / "rollouts" / "step_00000002.parquet").to_pylist()
    for row in rows:
        if row["response"].startswith("1"):
            assert row["reward"] is None
            assert "no ones" in row["reward_error"]
        elif row["reward"] is not None:
            assert row["reward"] == len(row["response"]) + bonus


def test_a_used_name_is_not_written_over(place: Path) -> None:
    config = load_config(
        RLConfig,
        config_name="rl",
        overrides=[
            f"model.path={place / 'runs/default/first'}", f"data.files=[{place / 'train.jsonl'}]", "run.name=first",
            f"run.directory={place / 'runs'}", "checkpoint.resume_mode=never", "reward.function=exact_match",
        ],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"run.name: .*holds checkpoints and resume_mode is 'never'"):
        RLTrainer(config).train()


def test_sft_from_python_is_evaluated_by_a_live_function(place: Path, tmp_path: Path) -> None:
    config = load_config(
        SFTConfig,
        config_name="sft",
        overrides=[
            f"model.path={place / 'runs/default/first'}", f"data.files=[{place / 'train.jsonl'}]", "data.response_column=answer",
            "steps=1", f"evaluation.data.files=[{place / 'test.jsonl'}]", "evaluation.sampling.max_new_tokens=3",
            f"run={{directory: {tmp_path}, name: live, progress: false, tensorboard: false}}",
        ],
    )  # fmt: skip
    result = SFTTrainer(config, reward=lambda response: 0.5).train()
    assert result["eval/reward_mean"] == 0.5
    with pytest.raises(ConfigError, match=r"reward.function: evaluation.data is given"):
        SFTTrainer(dataclasses.replace(config, run=dataclasses.replace(config.run, name="none"))).train()


def test_a_run_that_reached_its_goal_goes_on_when_the_goal_is_raised(place: Path, tmp_path: Path) -> None:
    def train(stop_at: float) -> int:
        overrides = [
            f"model.path={place / 'runs/default/first'}", f"data.files=[{place / 'train.jsonl'}]", "data.response_column=answer",
            "steps=3", f"evaluation.data.files=[{place / 'test.jsonl'}]", "evaluation.sampling.max_new_tokens=3",
            "evaluation.every_steps=1", f"evaluation.stop_at={stop_at}",
            f"run={{directory: {tmp_path}, name: goal, progress: false, tensorboard: false}}",
        ]  # fmt: skip
        config = load_config(SFTConfig, config_name="sft", overrides=overrides)
        run = Path(SFTTrainer(config, reward=lambda response: 0.5).train()["run"])
        return len((run / "metrics.jsonl").read_text().splitlines())

    assert [train(0.4), train(0.4), train(0.9)] == [1, 1, 3]


def rl(place: Path, *arguments: str) -> Done:
    usual = [
        "model.path=runs/default/first",
        "data.files=[train.jsonl]",
        "reward.function=my_reward.py:reward",
        "steps=1",
    ]
    small = [
        "prompts_per_step=4",
        "sampling.max_new_tokens=4",
        "sampling.samples_per_prompt=2",
        "run.tensorboard=false",
    ]
    return hybridflow("rl", *usual, *small, *arguments, cwd=place)


@pytest.mark.parametrize("name", ["run.name=..", "run.name=.", "run.project=.."])
def test_a_run_stays_inside_its_root(place: Path, name: str) -> None:
    done = rl(place, name)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_two_processes_do_not_write_one_run(place: Path) -> None:
    held = RunDirectory(RunSettings(directory=str(place / "runs"), name="held", tensorboard=False), "rl")
    held.hold()
    done = rl(place, "run.name=held")
    assert done.returncode == 2
    assert "is written by another process" in done.stderr
    held.close()
    assert rl(place, "run.name=held").returncode == 0


def test_a_run_of_another_kind_is_not_gone_on_with(place: Path) -> None:
    done = rl(place, "run.name=first")
    assert done.returncode == 2
    assert "is of a run of 'sft', which 'rl' cannot go on with" in done.stderr


def test_ruined_weights_are_never_saved(place: Path) -> None:
    huge = ["train.optimizer.lr=1e38", "algorithm.drop_constant_groups=false"]
    done = rl(place, "run.name=ruined", "steps=3", "checkpoint.every_steps=1", *huge)
    assert done.returncode == 1
    assert "not finite" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert not (place / "runs" / "default" / "ruined" / "model").exists()


def test_a_run_whose_rows_all_fail_stops_and_says_why(place: Path) -> None:
    done = rl(place, "run.name=long", "steps=20", "data.files=[long.jsonl]", "prompts_per_step=1")
    assert done.returncode == 1
    assert "every row has failed in 6 steps in a row" in done.stderr
    done = rl(place, "run.name=short", "steps=2", "data.files=[long.jsonl]", "prompts_per_step=1")
    assert done.returncode == 1
    assert "every row has failed in each of 2 steps, and nothing was trained" in done.stderr
    assert not (place / "runs" / "default" / "short" / "model").exists()
    (place / "bad.py").write_text("def reward(response: str) -> float:\n    raise ValueError('no verifier')\n")
    scored = hybridflow(
        "eval", "model.path=runs/default/first", "evaluation.data.files=[test.jsonl]", "reward.function=bad.py:reward", cwd=place
    )  # fmt: skip
    assert scored.returncode == 1
    assert "every row of the evaluation failed; row 0 says: " in scored.stderr
    assert "no verifier" in scored.stderr


def test_a_row_beyond_the_context_stops_sft(place: Path) -> None:
    done = hybridflow(
        "sft", "model.path=runs/default/first", "data.files=[long.jsonl]", "data.response_column=answer", "steps=1", "run.name=beyond",
        cwd=place,
    )  # fmt: skip
    assert done.returncode == 1
    assert "more than the model's context of 64; set data.max_tokens to 64 or less" in done.stderr


def test_a_state_of_another_model_is_named(place: Path) -> None:
    assert rl(place, "run.name=state").returncode == 0
    other = "{model_type: llama, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2}"
    model = ["model.path=null", f"model.config={other}", "model.tokenizer=runs/default/first/model"]
    done = rl(place, "run.name=state", "steps=2", *model)
    assert done.returncode == 1
    assert "resume with the same model" in done.stderr


def test_a_wrong_key_of_the_evaluation_is_named_as_such(place: Path) -> None:
    done = rl(place, "run.name=never", "evaluation.data.files=[nope.jsonl]")
    assert done.returncode == 2
    assert done.stderr.startswith("error: evaluation.data.files: 'nope.jsonl' names no file")
