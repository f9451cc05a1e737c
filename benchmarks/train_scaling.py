"""How a training step scales over the GPUs of one machine: data parallel with and without sharding, tensor and sequence parallel.

    python benchmarks/train_scaling.py gpus=2,shape=qwen2.5-7b,rows=4096,shard=2,checkpointing=full
    python benchmarks/train_scaling.py gpus=1,rows=65536,checkpointing=full gpus=2,rows=65536,checkpointing=full,sp=2

Neighbouring cases with as many GPUs share their processes. Prints one JSON line a case: tokens a second on each GPU, MFU, peak GiB, and
of this the activations (peak less weights, gradients, masters and moments). `step_tokens` is for each data-parallel rank.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.multiprocessing
from cases import Lengths, at_least, free_memory, list_given, one_of, parse_cases, print_line
from shapes import PEAK_FLOPS, SHAPES, build_model, compute_step_flops, plan_lengths
from step_profile import print_profile
from timing import read_peak_bytes, time_call, wait
from train_speed import build_rows

from hybridflow.algorithms.losses import SFTLoss
from hybridflow.models import LoraSettings
from hybridflow.train_engine import OptimizerSettings, Ranks, TrainEngine, TrainSettings
from hybridflow.train_engine.mesh import ParallelConfig
from hybridflow.train_engine.sharding import local_part

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Case:
    """One measurement; see the module."""

    gpus: int = 1
    shape: str = one_of("qwen2.5-1.5b", *SHAPES)
    rows: Lengths = Lengths("4096")
    budget: int = 32768
    step_tokens: int = 65536
    steps: int = 3
    tp: int = 1
    sp: int = 1
    shard: int = at_least(0, 1)
    checkpointing: str = one_of("none", "selective", "full", "auto")
    lora: int = 0
    offload: str = one_of("none", "optimizer", "parameters")
    compile: int = one_of(1, 0)
    reshard: int = one_of(1, 0)
    profile: int = one_of(0, 1)


def main() -> None:
    """Runs the cases in their order; neighbours with as many GPUs share their processes."""
    failed = torch.multiprocessing.get_context("spawn").Value("b", 0)
    for gpus, cases in groupby(parse_cases(Case), key=lambda case: case.gpus):
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run_rank, (gpus, list(cases), f"file://{directory}/meet", failed), nprocs=gpus)
    sys.exit(failed.value)


def run_rank(rank: int, gpus: int, cases: list[Case], meeting: str, failed: Any) -> None:
    """One process; after a case that does not fit in memory, the next one."""
    from hybridflow.config import HybridflowError
    from hybridflow.train_engine import join_ranks

    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join_ranks(rank=rank, size=gpus, rendezvous=meeting, device=device, timeout_s=300)
    for case in cases:
        try:
            result = run_case(case, ranks, device)
        except (torch.OutOfMemoryError, HybridflowError) as error:
            result, failed.value = {**vars(case), "error": str(error)[:400]}, 1
        if rank == 0:
            print_line(result)
        free_memory()
    ranks.leave()


def run_case(case: Case, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """What this rank measured."""
    model = build_model(case.shape, device, torch.bfloat16)
    settings = TrainSettings(
        micro_batch_tokens=case.budget,
        parallel_config=ParallelConfig(tp=case.tp, sp=case.sp, shard=case.shard),
        gradient_checkpointing=case.checkpointing,
        compile=bool(case.compile),
        lora=LoraSettings(rank=case.lora, alpha=2.0 * case.lora) if case.lora else None,
        offload=case.offload,
        reshard_after_forward=bool(case.reshard),
        optimizer=OptimizerSettings(lr=1e-6),
    )
    engine = TrainEngine(model, settings, ranks)
    data_ranks = case.gpus // (case.tp * case.sp)
    lengths = plan_lengths(case.rows, case.step_tokens, seed=ranks.rank // (case.tp * case.sp))
    batch = build_rows(lengths, SHAPES[case.shape]["vocab_size"])
    seconds = time_steps(case, lambda: engine.update(batch, SFTLoss()), ranks)
    found = describe(case, seconds, lengths, data_ranks, engine)
    if case.profile and ranks.rank == 0:
        print_profile(lambda: engine.update(batch, SFTLoss()))
    elif case.profile:
        engine.update(batch, SFTLoss())
    return found


def time_steps(case: Case, step: Any, ranks: Any) -> list[float]:
    """Seconds of each step after the warm-up, all ranks starting together."""

    def meet() -> None:
        wait()
        ranks.total(0)

    seconds = []
    for number in range(WARM_UP_STEPS + case.steps):
        if number == WARM_UP_STEPS and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        seconds.append(time_call(step, meet))
    return seconds[WARM_UP_STEPS:]


def describe(case: Case, seconds: list[float], lengths: list[int], data_ranks: int, engine: Any) -> dict[str, Any]:
    """The case's line."""
    step_s, peak = statistics.median(seconds), read_peak_bytes()
    flops = data_ranks * compute_step_flops(case.shape, lengths, lora_rank=case.lora) / case.gpus
    fixed = count_fixed_bytes(engine)
    return {
        **list_given(case), "tokens_per_s_per_gpu": round(data_ranks * sum(lengths) / case.gpus / step_s),
        "mfu": round(flops / step_s / PEAK_FLOPS, 4), "peak_gib": round(peak / 2**30, 2), "fixed_gib": round(fixed / 2**30, 2),
        "activations_gib": round((peak - fixed) / 2**30, 2), "step_s": [round(s, 4) for s in seconds], "torch": torch.__version__,
    }  # fmt: skip


def count_fixed_bytes(engine: Any) -> int:
    """Weights, float32 gradients, masters and moments on this GPU."""
    storages, device = {}, engine.model.device
    for _, tensor in engine.model.module.named_parameters():
        local = local_part(tensor)
        storages[local.untyped_storage().data_ptr()] = local
    for name, tensor in engine.state_tensors().items():
        if not name.startswith("rng/") and tensor.device == device:
            storages[tensor.untyped_storage().data_ptr()] = tensor
    gradients = sum(t.nbytes for name, t in engine.state_tensors().items() if name.startswith("model/"))
    return sum(tensor.nbytes for tensor in storages.values()) + gradients


if __name__ == "__main__":
    main()
