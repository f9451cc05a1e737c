"""Whole runs on Ray whose generators share a model write the samples and numbers of one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import FaultyVerb, Verb
from tiny_runs import metrics_of, read_lines, rl_config, rollouts_of

from hybridflow.config import ConfigError
from hybridflow.flow.commands import run_rl
from hybridflow.flow.rl_job import RLConfig
from hybridflow.roles.generator import GeneratorWorker

pytestmark = pytest.mark.timeout(300)

STEPS = 3
FLOAT64 = ("numerics=fast", "model.dtype=float64", f"steps={STEPS}", "evaluation.every_steps=3")
RAY = ("runtime.kind=ray", "rollout.chunks=2", "runtime.call_timeout_s=120", "rollout.native.tensor_parallel_size=2")
PLACEMENTS = {
    "colocated": ('{actor: "cpu:0-3"}', "train.parallel_config.tp=2"),
    "apart": ('{actor: "cpu:0", rollout: "cpu:1-2"}', "train.parallel_config.tp=1"),
    "replicas": ('{actor: "cpu:0", rollout: "cpu:1-4"}', "train.parallel_config.tp=1"),
}


def config_of(task: dict[str, str], start: str, root: Path, *overrides: str) -> RLConfig:
    return rl_config(task, root, start, *FLOAT64, *overrides)


@pytest.fixture(scope="module")
def local(task: dict[str, str], start: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run in one process."""
    return str(run_rl(config_of(task, start, tmp_path_factory.mktemp("local")))["run"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_generators_that_share_a_model_write_the_samples_of_one_process(
    placement: str, local: str, task: dict[str, str], start: str, tmp_path: Path, ray_cluster: None
) -> None:
    devices, parallel = PLACEMENTS[placement]
    overrides = (*RAY, f"runtime.placement.device_map={devices}", parallel)
    run = str(run_rl(config_of(task, start, tmp_path, *overrides))["run"])
    ours, theirs = rollouts_of(local), rollouts_of(run)
    assert len(theirs) == STEPS
    for step, (batch, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        for name in ("tokens", "group_id", "sample_id", "finish_reason", "reward", "policy_version_min"):
            assert batch.pylist(name) == other.pylist(name), (step, name)
        for left, right in zip(batch.arrays("rollout_logprobs"), other.arrays("rollout_logprobs"), strict=True):
            np.testing.assert_allclose(right, left, rtol=0, atol=1e-5)
    lines, others = metrics_of(local), metrics_of(run)
    for line, other in zip(lines, others, strict=True):
        for name in ("reward/mean", "train/grad_norm", "response/length_mean"):
            assert other[name] == pytest.approx(line[name], rel=1e-5), name
    told = read_lines(Path(run) / "metrics.jsonl")
    if placement == "colocated":
        assert all(line["probe/max_gap"] < 1e-6 for line in told)


def is_first(mark: Path) -> bool:
    """True for one caller of all processes."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def slow(directory: Path, calls_of_others: int) -> Callable[[type, str], Verb]:
    """A verb in whose first call the first replica stays until the other one has made so many calls. It fails where that does not come."""

    def build(owner: type, name: str) -> Verb:
        def verb(worker: Any, *args: Any, **kwargs: Any) -> Any:
            replica, place = divmod(worker._seat.rank, 2)
            if replica == 0 and is_first(directory / f"begun_{place}"):
                deadline_s = time.monotonic() + 100.0
                while len(list(directory.glob("made_*"))) < calls_of_others:
                    if time.monotonic() > deadline_s:
                        raise TimeoutError("the other replica has not taken the calls of this one")
                    time.sleep(0.01)
            made = getattr(owner, name)(worker, *args, **kwargs)
            if replica == 1 and place == 0:
                (directory / f"made_{time.time_ns()}").touch()
            return made

        verb.__name__ = name
        return verb

    return build


def test_a_replica_that_is_done_early_takes_the_calls_of_one_that_is_slow(
    local: str, task: dict[str, str], start: str, tmp_path: Path, ray_cluster: None
) -> None:
    """Two replicas with three calls each; one makes five of the six while the other is at its first."""
    devices, parallel = PLACEMENTS["replicas"]
    calls = tmp_path / "calls"
    calls.mkdir()
    with FaultyVerb(GeneratorWorker, "rollout", slow(calls, calls_of_others=5)):
        overrides = (*RAY, "rollout.chunks=3", f"runtime.placement.device_map={devices}", parallel)
        run = str(run_rl(config_of(task, start, tmp_path, *overrides))["run"])
    assert (calls / "begun_0").exists() and (calls / "begun_1").exists()
    for batch, other in zip(rollouts_of(local), rollouts_of(run), strict=True):
        for name in ("tokens", "group_id", "sample_id"):
            assert batch.pylist(name) == other.pylist(name), name


def killed(directory: Path, after_calls: int) -> Callable[[type, str], Verb]:
    """A verb that, once, after so many calls of its rank 1, kills its process."""

    def build(owner: type, name: str) -> Verb:
        def verb(worker: Any, *args: Any, **kwargs: Any) -> Any:
            if worker.rollout_ranks.rank == 1:
                made = len(list(directory.glob("call_*")))
                (directory / f"call_{time.time_ns()}").touch()
                if made >= after_calls and is_first(directory / "killed"):
                    os.kill(os.getpid(), signal.SIGKILL)
            return getattr(owner, name)(worker, *args, **kwargs)

        verb.__name__ = name
        return verb

    return build


@pytest.mark.parametrize("placement", ["apart", "replicas"])
def test_a_rank_that_dies_takes_its_group_along_and_changes_no_number(
    placement: str, local: str, task: dict[str, str], start: str, tmp_path: Path, ray_cluster: None
) -> None:
    devices, parallel = PLACEMENTS[placement]
    calls = tmp_path / "calls"
    calls.mkdir()
    with FaultyVerb(GeneratorWorker, "rollout", killed(calls, after_calls=3)):
        overrides = (*RAY, f"runtime.placement.device_map={devices}", parallel)
        run = str(run_rl(config_of(task, start, tmp_path, *overrides))["run"])
    (death,) = read_lines(Path(run) / "recovery.jsonl")
    assert "rollout" in str(death)
    for batch, other in zip(rollouts_of(local), rollouts_of(run), strict=True):
        assert batch.pylist("tokens") == other.pylist("tokens")


def test_what_does_not_fit_is_refused_before_anything_starts(task: dict[str, str], start: str, tmp_path: Path) -> None:
    asked = {
        ("rollout.native.tp=2",): "rollout.native.tp: 2 takes 2 workers or a multiple, and 1 generates; more need runtime.kind=ray",
        ("rollout.native.tp=3",): "rollout.native.tp: 3 does not divide the model's 4 attention heads; set a divisor",
        ("rollout.native.tp=2", "numerics=exact", "model.dtype=float32"): "rollout.native.tp: 2 parts change the order of sums",
        ("rollout.native.tp=2", "rollout.engine=vllm"): "rollout.native.tp: 2 is for the native engine, and rollout.engine is vllm",
    }  # fmt: skip
    for overrides, message in asked.items():
        with pytest.raises(ConfigError) as caught:
            run_rl(config_of(task, start, tmp_path, *overrides))
        assert str(caught.value).startswith(message)
    assert not (tmp_path / "run").exists()
