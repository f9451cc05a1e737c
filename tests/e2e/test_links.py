"""Weights from trainers to generators that live apart, on Ray: straight over their link, and through the object store around a death."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import FaultyVerb, Verb
from tiny_runs import assert_same_rollouts, assert_same_run, read_lines, rl_config, weights_of

from hybridflow.flow.commands import run_rl
from hybridflow.roles.generator import GeneratorWorker

STEPS = 5
DIES_IN = 3
"""The step in whose rollout a generator dies."""
APART = ("runtime.kind=ray", "runtime.call_timeout_s=120", "evaluation.every_steps=100", f"steps={STEPS}")

pytestmark = pytest.mark.timeout(600)


def disturbed(directory: Path, *, dies: bool) -> Callable[[type, str], Verb]:
    """A rollout that in step 1 and in that after `DIES_IN` waits for both generators; in `DIES_IN` itself one ends its process."""

    def build(owner: type, name: str) -> Verb:
        def wait_for_both(step: int) -> None:
            (directory / f"step_{step}_{os.getpid()}").touch()
            end_s = time.monotonic() + 100.0
            while len(list(directory.glob(f"step_{step}_*"))) < 2 and time.monotonic() < end_s:
                time.sleep(0.02)

        def verb(worker: Any, prompts: Any, sampling: Any, step: int, *args: Any) -> Any:
            if step in (1, DIES_IN + 1):
                wait_for_both(step)
            if dies and step == DIES_IN:
                with contextlib.suppress(FileExistsError):
                    (directory / "died").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            return getattr(owner, name)(worker, prompts, sampling, step, *args)

        verb.__name__ = name
        return verb

    return build


def test_weights_go_over_the_link_and_around_a_death_through_the_store_and_change_no_number(
    task: dict[str, str], start: str, tmp_path: Path, ray_cluster: None
) -> None:
    undisturbed, (lines, moved, stored) = run_and_read(task, start, tmp_path / "one", dies=False)
    size = sum(weight.numel() * weight.element_size() for weight in weights_of(start).values())
    # What a version took is told with the update after it. Each of two generators gets all of it.
    assert moved == [0, *[2 * size] * (STEPS - 1)]
    assert stored == [None] * STEPS and min(line["hybrid/switch_ms"] for line in lines[1:]) > 0
    run, (_, moved, stored) = run_and_read(task, start, tmp_path / "two", dies=True)
    (recovery,) = read_lines(Path(run) / "recovery.jsonl")
    assert recovery["worker"].startswith("rollout") and recovery["step"] == DIES_IN
    # The version that lay with the dead one goes through the store, once, and the next as well unless its successor is there by then;
    # after that there is a link again.
    assert stored[:3] == [None, None, size] and stored[4] is None
    assert moved[:3] == [0, 2 * size, 3 * size] and moved[4] == 2 * size
    assert (moved[3], stored[3]) in ((2 * size, None), (size, size))
    assert_same_rollouts(undisturbed, run)
    assert_same_run(undisturbed, run)


def run_and_read(task: dict[str, str], start: str, root: Path, *, dies: bool) -> tuple[str, tuple[Any, Any, Any]]:
    """A run of two trainers and two generators apart; its lines, and the bytes that each tells of."""
    devices = 'runtime.placement.device_map={actor: "cpu:0-1", rollout: "cpu:2-3"}'
    marks = root / "marks"
    marks.mkdir(parents=True)
    with FaultyVerb(GeneratorWorker, "rollout", disturbed(marks, dies=dies)):
        run = str(run_rl(rl_config(task, root, start, *APART, devices))["run"])
    assert (marks / "died").exists() == dies
    lines = read_lines(Path(run) / "metrics.jsonl")
    return run, (lines, *([line.get(f"hybrid/bytes_{way}") for line in lines] for way in ("moved", "stored")))
