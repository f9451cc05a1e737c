"""What the slowest samples cost, and what seating others in the place of those that have ended gains.

    python benchmarks/long_tail.py shape=qwen2.5-0.5b,rows=48,seats=12

Random weights, end of sequence ignored; lengths are drawn from a skewed distribution (log-normal, sigma 1, cut at `longest`), as those
of responses are. `whole`: one call of the native engine, which seats a waiting row as soon as another ends. `apart`: the same, but no row
decodes beside prompts. `batches`: the same rows, `seats` at a time, each batch until its slowest row ends. All by turns, the fastest of
`repeats` each, in seconds and in the process's own processor seconds; as many tokens in each.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import one_of, parse_cases, print_cases
from decode import limit_rows
from shapes import SHAPES, build_model, draw_prompts
from timing import DEVICE, time_call


@dataclass(frozen=True)
class Case:
    """One measurement; see the module."""

    shape: str = one_of("qwen2.5-0.5b", *SHAPES)
    rows: int = 48
    seats: int = 12
    prompt: int = 16
    longest: int = 128
    repeats: int = 2


def main() -> None:
    """Runs the cases."""
    sys.exit(print_cases(parse_cases(Case), measure))


def measure(case: Case) -> dict[str, Any]:
    """Seconds of both ways, and what the engine says of the first."""
    from hybridflow.batch import Batch
    from hybridflow.data import build_character_tokenizer
    from hybridflow.rollout import NativeEngine, NativeSettings
    from hybridflow.types import SamplingParams

    model = build_model(case.shape, DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    model.module.requires_grad_(False)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(case.longest / 4), 1.0, case.rows).astype(np.int64), 1, case.longest)
    prompts = draw_prompts(case.shape, [case.prompt] * case.rows, rng)
    batch = Batch.from_columns(group_id=list(range(case.rows)), prompt_tokens=prompts)
    sampling = SamplingParams(max_new_tokens=case.longest, ignore_eos=True)
    engine = NativeEngine(model, build_character_tokenizer("0123456789"), NativeSettings(max_sequences=case.seats))
    start = engine._start

    def generate(first: int, last: int, beside: bool = True) -> Time:
        def start_limited(*args: Any) -> Any:
            job = start(*args)
            job.scheduler.max_held_beside *= beside
            return job

        engine._start = start_limited
        limit_rows(engine, lengths[first:last])
        started_s = time.process_time()
        seconds = time_call(lambda: engine.generate(batch.slice(first, min(last, case.rows)), sampling, step=0))
        return Time(seconds, time.process_time() - started_s)

    generate(0, case.seats)
    whole, apart, batches = [], [], []
    for _ in range(case.repeats):
        whole.append(generate(0, case.rows))
        report = engine.report
        apart.append(generate(0, case.rows, beside=False))
        parts = [generate(at, min(at + case.seats, case.rows)) for at in range(0, case.rows, case.seats)]
        batches.append(Time(*map(sum, zip(*parts, strict=True))))
    return {
        "tokens": int(lengths.sum()), **describe("whole", whole), **describe("apart", apart), **describe("batches", batches),
        "steps": report.steps, "beside_tokens": report.beside_tokens,
        "occupancy": round(report.live_steps / max(1, report.seat_steps), 3), "tail_share": round(report.tail_seconds / report.seconds, 3),
    }  # fmt: skip


class Time(NamedTuple):
    """Of one way: seconds, and processor seconds of this process."""

    seconds: float
    processor: float


def describe(name: str, times: list[Time]) -> dict[str, float]:
    """The fastest of each."""
    fastest = Time(*map(min, zip(*times, strict=True)))
    return {f"{name}_s": round(fastest.seconds, 2), f"{name}_processor_s": round(fastest.processor, 2)}


if __name__ == "__main__":
    main()
