"""How fast and in how much memory a training step runs on one GPU: hybridflow, TRL's SFTTrainer and a plain Transformers loop.

    python benchmarks/train_speed.py side=hybridflow shape=qwen3-0.6b rows=8192
    python benchmarks/train_speed.py side=hybridflow shape=qwen2.5-7b rows=4096 lora=16 checkpointing=full
    python benchmarks/train_speed.py side=trl shape=qwen3-0.6b rows=8192 liger=1 compile=1
    python benchmarks/train_speed.py case case ...          # several, each `key=value,key=value`, one after the other

Random weights of the real shape; float32 masters, AdamW and clipping included. TRL and plain Transformers: bfloat16 weights and moments,
the fastest that they have. Prints one JSON line a case: tokens a second, MFU (formula in `shapes.compute_step_flops`), peak GiB.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from shapes import PEAK_FLOPS, SHAPES, build_model, build_module, compute_step_flops, parse_case, plan_lengths

WARM_UP_STEPS = 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """One measurement; see the module."""

    side: str = "hybridflow"
    shape: str = "qwen3-0.6b"
    rows: str = "8192"
    budget: int = 32768
    step_tokens: int = 131072
    steps: int = 3
    checkpointing: str = "none"
    compile: int = 1
    liger: int = 0
    lora: int = 0
    attention: str = "auto"
    offload: str = "none"
    profile: int = 0


def main() -> None:
    """Runs the cases."""
    words = sys.argv[1:]
    for text in words if any("," in word for word in words) else [",".join(words)]:
        measure(parse_case(Case, text))


def measure(case: Case) -> None:
    """One case, printed."""
    sides = {"hybridflow": run_hybridflow, "trl": run_trl, "transformers": run_transformers}
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    given = {
        name: value
        for name, value in vars(case).items()
        if value != vars(Case())[name] or name in ("side", "shape", "rows")
    }
    try:
        seconds, lengths = sides[case.side](case)
        step_s = statistics.median(seconds)
        flops = compute_step_flops(case.shape, lengths, lora_rank=case.lora)
        result = {
            "tokens_per_s": round(sum(lengths) / step_s), "mfu": round(flops / step_s / PEAK_FLOPS, 4),
            "peak_gib": round(read_peak_bytes() / 2**30, 1), "step_s": [round(s, 4) for s in seconds],
        }  # fmt: skip
    except (torch.OutOfMemoryError, RuntimeError) as error:
        result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps({**given, **result, "torch": torch.__version__}), flush=True)
    gc.collect()


def read_peak_bytes() -> int:
    """Most that was allocated on the GPU."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def wait() -> None:
    """For the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def time_steps(case: Case, step: Callable[[], None]) -> list[float]:
    """Seconds of each step after the warm-up."""
    seconds = []
    for number in range(WARM_UP_STEPS + case.steps):
        wait()
        started_s = time.perf_counter()
        step()
        wait()
        if number >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - started_s)
    return seconds


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
    seconds = time_steps(case, lambda: engine.update(batch, SFTLoss()) and None)
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
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from hybridflow.data import build_character_tokenizer

    class Watch(TrainerCallback):
        """Times steps as `time_steps` does."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait()
            self.ends.append(time.perf_counter())

    module = build_module(case.shape, "sdpa" if case.attention == "auto" else case.attention, DEVICE, torch.bfloat16)
    equal, _, most = case.rows.partition("-")
    row_tokens = int(equal) if not most else min(case.budget, 8192)
    lengths = plan_lengths(case.rows, case.step_tokens, seed=0)
    rng = np.random.default_rng(0)
    wanted = lengths * (WARM_UP_STEPS + case.steps + 1)
    data = Dataset.from_dict(
        {"input_ids": [rng.integers(0, SHAPES[case.shape]["vocab_size"] - 1000, length).tolist() for length in wanted]}
    )
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = build_character_tokenizer("0123456789")
        config = SFTConfig(
            output_dir=directory, per_device_train_batch_size=max(1, case.budget // row_tokens),
            gradient_accumulation_steps=max(1, case.step_tokens // max(case.budget, row_tokens)), max_steps=WARM_UP_STEPS + case.steps + 1,
            max_length=row_tokens, packing=bool(most), gradient_checkpointing=case.checkpointing == "full", bf16=True,
            use_liger_kernel=bool(case.liger), torch_compile=bool(case.compile), optim="adamw_torch_fused", max_grad_norm=1.0,
            logging_strategy="no", save_strategy="no", report_to="none", use_cpu=DEVICE.type == "cpu",
            learning_rate=1e-6, dataloader_num_workers=2, disable_tqdm=True,
        )  # fmt: skip
        watch = Watch()
        lora: dict[str, Any] = {}
        if case.lora:
            from peft import LoraConfig

            lora = {"peft_config": LoraConfig(r=case.lora, lora_alpha=2 * case.lora, target_modules="all-linear")}
        trainer = SFTTrainer(
            model=module, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[watch], **lora
        )
        trainer.train()
    assert AutoTokenizer is not None
    ends = watch.ends[WARM_UP_STEPS - 1 :]
    return [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)], lengths


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
