"""What a run says and writes beside its metrics."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.checkpoint import CheckpointWriter
from hybridflow.config import ConfigError, load_config
from hybridflow.flow.commands import run_sft
from hybridflow.flow.job import CheckpointSettings, Job, describe_start, find_run
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.sft_job import SFTConfig
from hybridflow.observability import run
from hybridflow.observability.run import RunDirectory, RunSettings, claim_name
from hybridflow.roles.policy import model_directory
from hybridflow.runtime.api import RuntimeSettings
from hybridflow.runtime.placement import PlacementSettings, PoolSettings
from hybridflow.types import Span

TINY = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}"
)


def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how many steps are left, makes no directory for rollouts that it does not have, and its checkpoint is known for one."""
    words = [
        f"+model.config={TINY}", f"+model.tokenizer={tmp_path / 'tokenizer'}", "rows_per_step=4", "+data.response_column=answer",
        f"data.files=[{write_sums(tmp_path, seed=0)['valid']}]", f"run={{directory: {tmp_path}, name: first, tensorboard: false}}",
    ]  # fmt: skip
    for steps in (1, 2, 4):
        run_sft(load_config(SFTConfig, config_name="sft", overrides=[*words, f"steps={steps}"]))
    told = [line.partition("; ")[2] for line in capsys.readouterr().err.splitlines() if "going on after" in line]
    assert told == ["1 step is left", "2 steps are left"]
    first = tmp_path / "default" / "first"
    assert not (first / "rollouts").exists() and (first / "metrics.jsonl").exists()
    (checkpoint, *_) = (first / "checkpoints").glob("step_*")
    with pytest.raises(ConfigError) as caught:
        model_directory(str(checkpoint))
    assert str(caught.value) == (
        f"model.path: '{checkpoint}' is a checkpoint; hybridflow export checkpoint={checkpoint} output=DIR first"
    )


def test_runs_without_a_name_share_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both looked for a free name before either had one, and where the first one has ended and left a checkpoint."""
    monkeypatch.setattr(run, "datetime", SimpleNamespace(datetime=SimpleNamespace(now=lambda: datetime(2026, 1, 2))))

    def find() -> RunDirectory:
        found, checkpoint = find_run(RunSettings(directory=str(tmp_path)), "rl", CheckpointSettings())
        assert checkpoint is None and not found.path.exists()
        return found

    first, second = find(), find()
    for found in (first, second):
        found.hold()
    with CheckpointWriter(first.checkpoints, 1) as writer:
        writer.commit([], {"kind": "rl", "step": 1})
    first.close()
    third = find()
    third.hold()
    names = [found.path.name for found in (first, second, third)]
    assert names == ["rl-20260102-000000", "rl-20260102-000000-2", "rl-20260102-000000-3"]
    assert third.checkpoints == tmp_path / "default" / names[2] / "checkpoints"
    second.close()
    third.close()


def test_quickstarts_without_a_name_share_no_directory(tmp_path: Path) -> None:
    assert [claim_name(tmp_path / "q", "add", "-data") for _ in range(3)] == ["add", "add-2", "add-3"]
    assert sorted(path.name for path in (tmp_path / "q").iterdir()) == ["add-2-data", "add-3-data", "add-data"]


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"^model.path: 'nowhere' does not exist; give a Hugging Face model"):
        model_directory("nowhere")


def test_the_first_step_begins_with_its_first_call() -> None:
    job = Job.__new__(Job)
    job._step_started_s, job._is_first = time.perf_counter() - 30.0, True
    spans = [Span("actor", 0, "update", 1, "update", time.time() - seconds, 1.0, 0.0) for seconds in (2.0, 3.0)]
    assert job._time_step({}, spans, spans)["time/step_s"].value == pytest.approx(3.0, abs=0.5)
    job._step_started_s -= 10.0
    assert job._time_step({}, spans, spans)["time/step_s"].value == pytest.approx(10.0, abs=0.5)


def test_a_first_step_without_calls_or_with_a_clock_that_is_ahead_is_timed_as_a_whole() -> None:
    ahead = [Span("actor", 0, "update", 1, "update", time.time() + 60.0, 1.0, 0.0)]
    for spans in ([], ahead):
        job = Job.__new__(Job)
        job._step_started_s, job._is_first = time.perf_counter() - 7.0, True
        assert job._time_step({}, spans, spans)["time/step_s"].value == pytest.approx(7.0, abs=0.5)


def test_what_is_told_while_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def on_ray(placement: PlacementSettings) -> str | None:
        return describe_start(RuntimeSettings(kind="ray", placement=placement))

    assert describe_start(RuntimeSettings()) is None
    aside = describe_start(RuntimeSettings(placement=PlacementSettings(device_map={"actor": "gpu:0-7"})))
    assert aside == (
        "runtime.placement is left aside: runtime.kind is local, which runs all roles in this process; set runtime.kind=ray for it"
    )
    assert on_ray(PlacementSettings()) == "starting 1 trainer"
    assert on_ray(PlacementSettings(device_map={"actor": "gpu:0-7"})) == "starting 8 trainers"
    by_node = PoolSettings(name="actor", devices=("cpu:0-5",), strategy="per_node")
    assert on_ray(PlacementSettings(mesh=(by_node,))) == "starting trainers"
