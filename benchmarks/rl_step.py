"""One step of GRPO on one GPU, by phase: hybridflow, and TRL's GRPOTrainer.

    python benchmarks/rl_step.py shape=qwen2.5-0.5b shape=qwen2.5-1.5b
    python benchmarks/rl_step.py side=trl,shape=qwen2.5-0.5b,vllm=1,micro=32

Random weights of the real shape, prompts of equal length, responses that go to their limit, a reward that costs nothing (the share of even
tokens). hybridflow: generation and training on one set of bfloat16 weights over float32 masters; the rollout's own log-probabilities are
the old ones; `share=0` computes the prompt of a group once a row in the update. TRL: bfloat16 weights and moments, no second pass for old
log-probabilities, `vllm=1` its colocated vLLM (awake all the time: all of it fits), else Transformers' `generate`; `micro` rows at a time,
`liger` and `torch_compile` as it has them. A case with vLLM runs in a process of its own where there are others.
Prints seconds by phase of the fastest step after the warm-up, and tokens a second over the whole step, prompts and responses counted.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cases import one_of, parse_cases, print_cases
from shapes import SHAPES, build_model, build_module, draw_prompts
from step_profile import cover
from timing import DEVICE, read_peak_bytes, time_call, wait
from trl_steps import time_trl_steps


@dataclass(frozen=True)
class Case:
    """One measurement; see the module."""

    side: str = one_of("hybridflow", "trl")
    shape: str = one_of("qwen2.5-0.5b", *SHAPES)
    prompts: int = 64
    samples: int = 8
    prompt: int = 256
    response: int = 512
    steps: int = 3
    budget: int = 65536
    compile: int = one_of(1, 0)
    share: int = one_of(1, 0)
    vllm: int = one_of(0, 1)
    micro: int = 32
    liger: int = one_of(1, 0)
    torch_compile: int = one_of(0, 1)
    attention: str = "sdpa"
    kv_share: float = 0.3
    busy: int = one_of(0, 1)

    @property
    def tokens(self) -> int:
        """Of a step, prompts counted once a row."""
        return self.prompts * self.samples * (self.prompt + self.response)


def main() -> None:
    """Runs the cases."""
    failed = False
    for text, case in zip(sys.argv[1:], parse_cases(Case), strict=True):
        if len(sys.argv) > 2 and case.vllm:
            failed |= subprocess.run([sys.executable, __file__, text], check=False).returncode != 0
        else:
            failed |= print_cases([case], {"hybridflow": run_hybridflow, "trl": run_trl}[case.side])
    sys.exit(failed)


def run_hybridflow(case: Case) -> dict[str, Any]:
    """Generation, advantages and one update, as the actor's worker does them."""
    from hybridflow.algorithms import compute_group_advantages
    from hybridflow.algorithms.losses import PolicyLoss
    from hybridflow.batch import Batch
    from hybridflow.data import build_character_tokenizer
    from hybridflow.rollout import NativeEngine, NativeSettings
    from hybridflow.train_engine import OptimizerSettings, TrainEngine, TrainSettings
    from hybridflow.types import SamplingParams

    model = build_model(case.shape, DEVICE, torch.bfloat16)
    settings = TrainSettings(
        micro_batch_tokens=case.budget,
        compile=bool(case.compile),
        share_prompts=bool(case.share),
        optimizer=OptimizerSettings(lr=1e-6),
    )
    trainer = TrainEngine(model, settings)
    rows = case.prompts * case.samples
    engine = NativeEngine(model, build_character_tokenizer("0123456789"), NativeSettings(max_sequences=rows))
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=case.response, samples_per_prompt=case.samples, ignore_eos=True)

    def step(number: int) -> dict[str, float]:
        prompts = draw_prompts(case.shape, [case.prompt] * case.prompts, rng)
        clock = Clock()
        batch = engine.generate(
            Batch.from_columns(group_id=list(range(case.prompts)), prompt_tokens=prompts), sampling, step=number
        )
        clock.mark("rollout")
        rewards = np.array([np.mean(tokens[case.prompt :] % 2 == 0) for tokens in batch.arrays("tokens")])
        advantages = compute_group_advantages(
            rewards, batch.numpy("group_id"), np.ones(rows, np.bool_), normalize_std=True
        )
        lengths = [len(tokens) for tokens in batch.arrays("tokens")]
        columns = [np.full(length, value, np.float32) for length, value in zip(lengths, advantages, strict=True)]
        batch = batch.with_column("advantages", columns)
        clock.mark("score")
        trainer.update(batch, PolicyLoss())
        engine.load_weights(number + 1)
        clock.mark("update")
        return clock.seconds

    return describe(case, [step(number) for number in range(case.steps + 1)][1:], step)


def run_trl(case: Case) -> dict[str, Any]:
    """GRPOTrainer; its phases are what it times itself."""
    import tempfile

    from datasets import Dataset
    from trl import GRPOTrainer

    from hybridflow.data import build_character_tokenizer

    rng = np.random.default_rng(0)
    texts = ["".join(rng.integers(0, 10, case.prompt - 1).astype(str)) for _ in range(case.prompts * (case.steps + 2))]
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = build_character_tokenizer("0123456789")
        tokenizer.save_pretrained(directory)
        build_module(case.shape, "sdpa", DEVICE, torch.bfloat16).save_pretrained(directory)
        trainer, steps = time_trl_steps(
            lambda watch: GRPOTrainer(
                model=directory,
                reward_funcs=lambda completion_ids, **_: [
                    float(np.mean(np.array(row) % 2 == 0)) for row in completion_ids
                ],
                args=build_trl_config(case, directory),
                train_dataset=Dataset.from_dict({"prompt": texts}),
                processing_class=tokenizer,
                callbacks=[watch],
            )
        )
    seen = trainer.state.num_input_tokens_seen
    assert seen == case.tokens * len(steps), (
        f"{seen} tokens in {len(steps)} steps of {case.tokens}: rows have other lengths"
    )
    return describe(case, steps[1:])


def build_trl_config(case: Case, directory: str) -> Any:
    """One optimizer step over all rows from one round of generation, nothing recomputed, nothing logged."""
    from trl import GRPOConfig

    rows = case.prompts * case.samples
    forced = {"ignore_eos": True, "detokenize": False} if case.vllm else {"min_new_tokens": case.response}
    return GRPOConfig(
        output_dir=directory, per_device_train_batch_size=case.micro, gradient_accumulation_steps=rows // case.micro,
        generation_batch_size=rows, num_generations=case.samples, num_iterations=1, max_completion_length=case.response,
        max_steps=case.steps + 1, beta=0.0, temperature=1.0, top_k=0, generation_kwargs=forced, use_vllm=bool(case.vllm),
        vllm_mode="colocate", vllm_gpu_memory_utilization=case.kv_share, vllm_max_model_length=case.prompt + case.response,
        vllm_enable_sleep_mode=False, vllm_importance_sampling_correction=False, mask_truncated_completions=False,
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": case.attention}, bf16=True, gradient_checkpointing=False,
        use_liger_kernel=bool(case.liger and DEVICE.type == "cuda"), torch_compile=bool(case.torch_compile),
        optim="adamw_torch_fused", learning_rate=1e-6, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=DEVICE.type == "cpu",
    )  # fmt: skip


class Clock:
    """Seconds between marks, the device's work included."""

    def __init__(self) -> None:
        wait()
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def mark(self, name: str) -> None:
        """Ends the phase of this name."""
        wait()
        now_s = time.perf_counter()
        self.seconds[name], self._last_s = now_s - self._last_s, now_s


def describe(
    case: Case, steps: list[dict[str, float]], step: Callable[[int], dict[str, float]] | None = None
) -> dict[str, Any]:
    """The fastest step; with `busy`, the share of one more in which a kernel runs."""
    best = min(steps, key=lambda seconds: sum(seconds.values()))
    found: dict[str, Any] = {name: round(value, 3) for name, value in best.items()}
    found |= {"step_s": round(sum(best.values()), 3), "tokens_per_s": round(case.tokens / sum(best.values()))}
    if DEVICE.type == "cuda":
        found["peak_gib"] = round(read_peak_bytes() / 2**30, 1)
    if case.busy and step is not None and DEVICE.type == "cuda":
        found["gpu_busy"] = round(measure_busy(lambda: step(len(steps) + 1)), 3)
    return found


def measure_busy(step: Callable[[], object]) -> float:
    """Share of a step's time in which a kernel runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        # The profiler's own start and end take up to a second.
        whole_s = time_call(step)
    return cover(list_kernels(profiled)) / 1e9 / whole_s


def list_kernels(profiled: torch.profiler.profile) -> list[tuple[int, int]]:
    """Start and end of each on the device, in nanoseconds."""
    events = profiled.profiler.kineto_results.events()
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]


if __name__ == "__main__":
    main()
