"""Whole runs on Ray whose generators share a model write the samples and numbers of one process."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import FaultyVerb, Verb, run_on_two_nodes
from tiny_runs import assert_same_rollouts, assert_same_run, metrics_of, read_lines, rl_config, rollouts_of

from hybridflow.config import ConfigError
from hybridflow.flow.commands import run_rl
from hybridflow.flow.rl_job import RLConfig
from hybridflow.roles.generator import GeneratorWorker

pytestmark = pytest.mark.timeout(300)

STEPS = 3
FLOAT64 = ("numerics=fast", "model.dtype=float64", f"steps={STEPS}", "evaluation.every_steps=3")
RAY = ("runtime.kind=ray", "rollout.chunks=2", "runtime.call_timeout_s=120", "rollout.native.tensor_parallel_size=2")
WITHOUT_WAIT = "runtime.recovery={wait_for_node_s: 1.0}"
CUT, UNCUT = "sampling.top_p=0.9", "sampling.top_p=1.0"
# (devices, layout of the trainers, sampling): trainers that split the vocabulary know no cut
PLACEMENTS = {
    "colocated": ('{actor: "cpu:0-3"}', "train.parallel_config.tp=2", UNCUT),
    "apart": ('{actor: "cpu:0", rollout: "cpu:1-2"}', "train.parallel_config.tp=1", CUT),
    "replicas": ('{actor: "cpu:0", rollout: "cpu:1-4"}', "train.parallel_config.tp=1", CUT),
}


def config_of(task: dict[str, str], start: str, root: Path, *overrides: str) -> RLConfig:
    return rl_config(task, root, start, *FLOAT64, *overrides)


def overrides_of(placement: str) -> tuple[str, ...]:
    devices, *others = PLACEMENTS[placement]
    return *RAY, f"runtime.placement.device_map={devices}", *others


@pytest.fixture(scope="module")
def run_of(
    task: dict[str, str], start: str, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None
) -> Callable[..., str]:
    """The undisturbed run of these settings, which is made once."""

    @functools.cache
    def run(*overrides: str) -> str:
        return str(run_rl(config_of(task, start, tmp_path_factory.mktemp("undisturbed"), *overrides))["run"])

    return run


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_generators_that_share_a_model_write_the_samples_of_one_process(
    placement: str, run_of: Callable[..., str]
) -> None:
    sampling = PLACEMENTS[placement][-1]
    local, run = run_of(sampling), run_of(*overrides_of(placement))
    ours, theirs = rollouts_of(local), rollouts_of(run)
    assert len(theirs) == STEPS
    names = ["tokens", "group_id", "sample_id", "finish_reason", "reward", "policy_version_min"]
    names += ["kept_counts"] if sampling == CUT else []
    for step, (batch, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        for name in names:
            assert batch.pylist(name) == other.pylist(name), (step, name)
        assert sampling == UNCUT or len(set(chain.from_iterable(batch.pylist("kept_counts")))) > 2
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
    run_of: Callable[..., str], task: dict[str, str], start: str, tmp_path: Path
) -> None:
    """Two replicas with three calls each; one makes five of the six while the other is at its first."""
    local, calls = run_of(CUT), tmp_path / "calls"
    calls.mkdir()
    with FaultyVerb(GeneratorWorker, "rollout", slow(calls, calls_of_others=5)):
        run = str(run_rl(config_of(task, start, tmp_path, *overrides_of("replicas"), "rollout.chunks=3"))["run"])
    assert (calls / "begun_0").exists() and (calls / "begun_1").exists()
    for batch, other in zip(rollouts_of(local), rollouts_of(run), strict=True):
        for name in ("tokens", "group_id", "sample_id"):
            assert batch.pylist(name) == other.pylist(name), name


def killed(directory: Path, after_calls: int) -> Callable[[type, str], Verb]:
    """A verb in which, once, after so many calls of second ranks, such a one is killed in the middle, when the first one waits for it."""

    def build(owner: type, name: str) -> Verb:
        def verb(worker: Any, *args: Any, **kwargs: Any) -> Any:
            ranks = worker.rollout_ranks
            if ranks.rank == 1:
                made, meetings, meet = len(list(directory.glob("call_*"))), count(), ranks.gather
                (directory / f"call_{time.time_ns()}").touch()

                def gather(numbers: Sequence[float]) -> list[list[float]]:
                    if next(meetings) == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return meet(numbers)  # type: ignore[no-any-return]

                if made >= after_calls and is_first(directory / "killed"):
                    ranks.gather = gather
            return getattr(owner, name)(worker, *args, **kwargs)

        verb.__name__ = name
        return verb

    return build


@pytest.mark.parametrize("placement", ["apart", "replicas"])
def test_a_rank_that_dies_takes_its_group_along_and_changes_no_bit(
    placement: str, run_of: Callable[..., str], task: dict[str, str], start: str, tmp_path: Path
) -> None:
    undisturbed, calls = run_of(*overrides_of(placement)), tmp_path / "calls"
    calls.mkdir()
    with FaultyVerb(GeneratorWorker, "rollout", killed(calls, after_calls=3)):
        run = str(run_rl(config_of(task, start, tmp_path, *overrides_of(placement)))["run"])
    (death,) = read_lines(Path(run) / "recovery.jsonl")
    assert "rollout" in str(death)
    assert_same_rollouts(undisturbed, run)
    assert_same_run(undisturbed, run)


def lose_node_of_last_rank(config: RLConfig, directory: Path) -> tuple[int, str]:
    """Runs on two nodes, of which the one with the last generator goes while that is at work; how it ended, and what was told."""
    done = run_on_two_nodes(config, "team", directory)
    assert (directory / "removed").exists(), done.stderr
    return done.returncode, done.stderr


def test_a_team_that_goes_with_its_node_leaves_its_calls_to_the_others(
    run_of: Callable[..., str], task: dict[str, str], start: str, tmp_path: Path
) -> None:
    devices = 'runtime.placement.device_map={actor: "cpu:0", reference: "cpu:1", rollout: "cpu:2-5"}'
    lost = config_of(task, start, tmp_path, *overrides_of("replicas"), devices, WITHOUT_WAIT)
    code, told = lose_node_of_last_rank(lost, tmp_path)
    assert code == 0 and "its group goes on with 2 workers" in told, told
    undisturbed, run = run_of(*overrides_of("replicas")), tmp_path / "quickstart" / "run"
    assert_same_rollouts(undisturbed, run)
    assert_same_run(undisturbed, run)


def test_a_node_that_takes_half_a_team_along_ends_the_run_with_a_sentence(
    task: dict[str, str], start: str, tmp_path: Path
) -> None:
    lost = config_of(task, start, tmp_path, *overrides_of("replicas"), WITHOUT_WAIT)
    code, told = lose_node_of_last_rank(lost, tmp_path)
    assert code != 0
    assert (
        "rollout cannot go on with what is left: rollout.native.tp: 2 takes 2 workers or a multiple, and 3 generate"
        in told
    )


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
