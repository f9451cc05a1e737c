"""How fast and in how much memory a training step runs on one GPU: hybridflow, TRL's SFTTrainer and a plain Transformers loop.

    python benchmarks/train_speed.py side=hybridflow shape=qwen3-0.6b rows=8192
    python benchmarks/train_speed.py side=hybridflow shape=qwen2.5-7b rows=4096 lora=16 checkpointing=full
    python benchmarks/train_speed.py side=trl shape=qwen3-0.6b rows=8192 liger=1 compile=1
    python benchmarks/train_speed.py case case ...          # several, each `key=value,key=value`, one after the other

Random weights of the real shape; float32 masters, AdamW and clipping included. TRL and plain Transformers: bfloat16 weights and moments,
the fastest that they have. Prints one JSON line a case: tokens a second, MFU (formula in `shapes.compute_step_flops`), peak GiB.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from cases import Lengths, one_of, parse_cases, parse_whole_line, print_cases
from shapes import PEAK_FLOPS, SHAPES, build_model, build_module, compute_step_flops, plan_lengths
from timing import DEVICE, read_peak_bytes, time_call, wait
from trl_steps import build_watch

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Case:
    """One measurement; see the module."""

    side: str = one_of("hybridflow", "trl", "transformers")
    shape: str = one_of("qwen3-0.6b", *SHAPES)
    rows: Lengths = Lengths("8192")
    budget: int = 32768
    step_tokens: int = 131072
    steps: int = 3
    checkpointing: str = one_of("none", "selective", "full", "auto")
    compile: int = one_of(1, 0)
    liger: int = one_of(0, 1)
    lora: int = 0
    attention: str = "auto"
    offload: str = one_of("none", "optimizer", "parameters")
    profile: int = one_of(0, 1)


def main() -> None:
    """Runs the cases."""
    cases = parse_cases(Case) if any("," in word for word in sys.argv[1:]) else [parse_whole_line(Case)]
    sys.exit(print_cases(cases, measure, always=("side", "shape", "rows")))


def measure(case: Case) -> dict[str, Any]:
    """Speed and memory of one case."""
    sides = {"hybridflow": run_hybridflow, "trl": run_trl, "transformers": run_transformers}
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, lengths = sides[case.side](case)
    step_s = statistics.median(seconds)
    flops = compute_step_flops(case.shape, lengths, lora_rank=case.lora)
    return {
        "tokens_per_s": round(sum(lengths) / step_s), "mfu": round(flops / step_s / PEAK_FLOPS, 4),
        "peak_gib": round(read_peak_bytes() / 2**30, 1), "step_s": [round(s, 4) for s in seconds],
    }  # fmt: skip


def time_steps(case: Case, step: Callable[[], object]) -> list[float]:
    """Seconds of each step after the warm-up."""
    return [time_call(step) for _ in range(WARM_UP_STEPS + case.steps)][WARM_UP_STEPS:]


def run_hybridflow(case: Case) -> tuple[list[float], list[int]]:
    """Our engine; the same rows in every step."""
    from hybridflow.algorithms.losses import SFTLoss
    from hybridflow.models.lora import LoraSettings
    from hybridflow.train_engine import OptimizerSettings, TrainEngine, TrainSettings

    model = build_model(case.shape, DEVICE, torch.bfloat16)
    if case.attention != "auto":
        model.packed_kernel = None if case.attention == "torch" else case.attention
    settings = TrainSettings(
        micro_batch_tokens=case.budget,
        gradient_checkpointing=case.checkpointing,
        compile=bool(case.compile),
        liger=bool(case.liger),
        lora=LoraSettings(rank=case.lora, alpha=2.0 * case.lora) if case.lora else None,
        offload=case.offload,
        optimizer=OptimizerSettings(lr=1e-6),
    )
    engine = TrainEngine(model, settings)
    lengths = plan_lengths(case.rows, case.step_tokens, seed=0)
    batch = build_rows(lengths, SHAPES[case.shape]["vocab_size"])
    seconds = time_steps(case, lambda: engine.update(batch, SFTLoss()))
    if case.profile:
        from step_profile import print_profile

        print_profile(lambda: engine.update(batch, SFTLoss()))
    return seconds, lengths


def build_rows(lengths: list[int], vocab_size: int) -> Any:
    """Random tokens, all but the first of a row trained."""
    from hybridflow.batch import Batch
    from hybridflow.types import RowState

    rng = np.random.default_rng(0)
    return Batch.from_columns(
        tokens=[rng.integers(0, vocab_size - 1000, length).astype(np.int32) for length in lengths],
        loss_mask=[(np.arange(length) > 0).astype(np.uint8) for length in lengths],
        state=np.full(len(lengths), int(RowState.OK), np.int8),
    )


def run_trl(case: Case) -> tuple[list[float], list[int]]:
    """SFTTrainer on tokenized rows, packed where they are documents; the same lengths."""
    import tempfile

    from datasets import Dataset
    from trl import SFTTrainer

    from hybridflow.data import build_character_tokenizer

    ends: list[float] = []

    def note() -> None:
        wait()
        ends.append(time.perf_counter())

    module = build_module(case.shape, "sdpa" if case.attention == "auto" else case.attention, DEVICE, torch.bfloat16)
    least, most = case.rows.bounds
    row_tokens = most if least == most else min(case.budget, 8192)
    lengths = plan_lengths(case.rows, case.step_tokens, seed=0)
    rng = np.random.default_rng(0)
    wanted = lengths * (WARM_UP_STEPS + case.steps + 1)
    data = Dataset.from_dict(
        {"input_ids": [rng.integers(0, SHAPES[case.shape]["vocab_size"] - 1000, length).tolist() for length in wanted]}
    )
    lora: dict[str, Any] = {}
    if case.lora:
        from peft import LoraConfig

        lora = {"peft_config": LoraConfig(r=case.lora, lora_alpha=2 * case.lora, target_modules="all-linear")}
    with tempfile.TemporaryDirectory() as directory:
        SFTTrainer(
            model=module, args=build_trl_config(case, directory, row_tokens, packing=least < most), train_dataset=data,
            processing_class=build_character_tokenizer("0123456789"), callbacks=[build_watch(note)], **lora,
        ).train()  # fmt: skip
    return [later - earlier for earlier, later in pairwise(ends[WARM_UP_STEPS - 1 :])], lengths


def build_trl_config(case: Case, directory: str, row_tokens: int, *, packing: bool) -> Any:
    """As many rows at a time as our micro-batches hold, nothing logged, nothing saved."""
    from trl import SFTConfig

    return SFTConfig(
        output_dir=directory, per_device_train_batch_size=max(1, case.budget // row_tokens),
        gradient_accumulation_steps=max(1, case.step_tokens // max(case.budget, row_tokens)), max_steps=WARM_UP_STEPS + case.steps + 1,
        max_length=row_tokens, packing=packing, gradient_checkpointing=case.checkpointing == "full", bf16=True,
        use_liger_kernel=bool(case.liger), torch_compile=bool(case.compile), optim="adamw_torch_fused", max_grad_norm=1.0,
        logging_strategy="no", save_strategy="no", report_to="none", use_cpu=DEVICE.type == "cpu",
        learning_rate=1e-6, dataloader_num_workers=2, disable_tqdm=True,
    )  # fmt: skip


def run_transformers(case: Case) -> tuple[list[float], list[int]]:
    """A plain loop: the module's own loss, SDPA attention, fused AdamW in bfloat16; rows of equal length."""
    module = build_module(case.shape, "sdpa", DEVICE, torch.bfloat16)
    module.train()
    if case.checkpointing == "full":
        module.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    lengths = plan_lengths(case.rows, case.step_tokens, seed=0)
    tokens = torch.randint(0, SHAPES[case.shape]["vocab_size"] - 1000, (len(lengths), lengths[0]), device=DEVICE)
    parts = tokens.split(max(1, case.budget // lengths[0]))

    def step() -> None:
        for part in parts:
            loss = module(input_ids=part, labels=part, use_cache=False).loss
            (loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(case, step), lengths


if __name__ == "__main__":
    main()
