"""Optimizer steps of a trainer of TRL, and what each of their phases takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from timing import wait


def build_watch(note: Callable[[], None]) -> Any:
    """A callback that calls `note` after each optimizer step."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """See `build_watch`."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            note()

    return Watch()


def time_trl_steps(build: Callable[[Any], Any]) -> tuple[Any, list[dict[str, float]]]:
    """A trainer of TRL, made by `build` with a callback of ours, and the seconds of each of its optimizer steps by phase.

    The first, which loads and compiles, is among them.
    """
    from trl.extras.profiling import ProfilingContext

    steps: list[dict[str, float]] = []
    timed: defaultdict[str, float] = defaultdict(float)
    started_s = time.perf_counter()

    def end_step() -> None:
        nonlocal started_s
        wait()
        steps.append(split_step(time.perf_counter() - started_s, timed))
        timed.clear()
        started_s = time.perf_counter()

    def note(self: Any, seconds: float) -> None:
        timed[self.name.partition(".")[2]] += seconds

    ProfilingContext._log_metrics = note
    trainer = build(build_watch(end_step))
    trainer.train()
    return trainer, steps


def split_step(whole_s: float, timed: dict[str, float]) -> dict[str, float]:
    """Phases of a step from what TRL timed: `_prepare_inputs` holds generation, scoring and the sync of vLLM's weights."""
    sync_s = timed["sync_weights"]
    rollout_s = sum(seconds for name, seconds in timed.items() if name.endswith(("generate", "generate_batch")))
    prepared_s = timed["_prepare_inputs"]
    return {
        "rollout": rollout_s,
        "sync": sync_s,
        "score": prepared_s - rollout_s - sync_s,
        "update": whole_s - prepared_s,
    }
