"""What it takes to bring new weights from trainers to the rollout, beside one plain all-gather of the same bytes in the same run.

    python benchmarks/weight_switch.py gpus=2,shape=qwen2.5-7b
    python benchmarks/weight_switch.py gpus=2,shape=qwen2.5-7b,cases=replicas+tensor,bucket_mib=1024
    python benchmarks/weight_switch.py gpus=2,shape=tiny,bucket_mib=1                       (CPU and gloo, to try it out)

Trainers hold float32 shards (FSDP2, over all GPUs), the rollout bfloat16 storages at fixed addresses. Cases: `replicas`, a whole copy on
each GPU by all-gathers; `messages`, the same box by box; `tensor`, one copy split over the GPUs; `engine`, replicas from a live training
engine; `same`, one device, where trainer and rollout share the storage. Prints one JSON line a case. Times are medians of the slowest rank,
with all that the switch takes: rounding, packing, transfer, unpacking, own copies. The plain all-gather has its bytes ready in place.

Fields of a line: `case`, `shape`, `gpus` as asked; `ms` the switch, `all_gather_ms` the plain all-gather of as many bytes, `ratio` the
first over the second, `ms_all` every round; `bytes` what a rank receives, `gib_per_s` these over `ms`; `buckets` of at most `bucket_mib`;
`plan_ms` what the plan took, once; `all_gather` whether it takes all-gathers or messages; `held_gib` the first rank's shards and storages.
On GPUs `peak_gib` is the most that was in use, `staging_gib` what is taken while weights travel beyond shards and storages, two buckets at
most, `kept_gib` what stays taken after it. `torch` is its version. `engine` and `same` have the fields of theirs that apply.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from cases import free_memory, one_of, parse_whole_line, print_line, split_words
from shapes import SHAPES, build_model, build_module
from timing import time_call
from torch import Tensor

from hybridflow.models.attention import ATTENTION_NAME
from hybridflow.train_engine import Ranks, TrainEngine, TrainSettings, join_ranks
from hybridflow.train_engine.mesh import ParallelConfig
from hybridflow.weights import (
    CollectiveTransport,
    Gang,
    SameStorage,
    TargetWeights,
    WeightLayout,
    plan_rollout,
    plan_trainers,
    read_tensor_dims,
)
from hybridflow.weights.plan import WeightPlan, plan_weights

TIMEOUT_S = 60.0
CHECKED = 7
"""Every so many tensors one is compared, bit for bit."""


@dataclass(frozen=True)
class Run:
    """What is measured; see the module."""

    gpus: int = 2
    shape: str = one_of("qwen2.5-7b", *SHAPES)
    cases: str = "replicas+messages+tensor+engine+same"
    bucket_mib: int = 512
    rounds: int = 7


@dataclass(frozen=True)
class Here:
    """This process: its ranks and device, and the model's tensors by shape."""

    run: Run
    ranks: Ranks
    device: torch.device
    shapes: dict[str, tuple[int, ...]]
    dims: dict[str, int]

    def sync(self) -> None:
        """Waits for the device and for all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ranks.total(0)


def main() -> None:
    """Starts the ranks."""
    run = parse_whole_line(Run)
    split_words("cases", run.cases, CASES)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run_rank, (run, f"file://{directory}/meet"), nprocs=run.gpus)


def run_rank(rank: int, run: Run, meeting: str) -> None:
    """All cases, one after the other."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    ranks = join_ranks(rank=rank, size=run.gpus, rendezvous=meeting, device=device, timeout_s=300)
    module = build_module(run.shape, ATTENTION_NAME, torch.device("meta"), torch.bfloat16)
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    here = Here(run, ranks, device, shapes, read_tensor_dims(shapes, module.config.base_model_tp_plan))
    for case in run.cases.split("+"):
        result = CASES[case](here)
        if rank == 0:
            print_line({"case": case, "shape": run.shape, "gpus": run.gpus} | result)
        free_memory()
    ranks.leave()


def run_layouts(here: Here, tensor: int, gathers: bool | None) -> dict[str, Any]:
    """From float32 shards to replicas of `tensor` GPUs each."""
    rank, size = here.ranks.rank, here.ranks.size
    source = plan_trainers(here.shapes, {}, shard=size)
    target = plan_rollout(here.shapes, here.dims, ranks=range(size), size=size, tensor=tensor)
    started_s = time.perf_counter()
    made = plan_weights(source, target, here.run.bucket_mib * 2**20)
    planned_s = time.perf_counter() - started_s
    generator = torch.Generator(here.device).manual_seed(rank)
    parts: dict[str, Tensor] = {
        name: torch.randn(held.placement.box(rank).shape, generator=generator, device=here.device)
        for name, held in source.tensors.items()
    }
    boxes = {name: (part.placement.box(rank).shape, part.dtype) for name, part in target.tensors.items()}
    held = TargetWeights({name: torch.zeros(s, dtype=t, device=here.device) for name, (s, t) in boxes.items()})
    gang = Gang(rank, size, here.device, TIMEOUT_S)
    transport = CollectiveTransport(made, (source, target), gang, parts, held, gathers=gathers)
    found = measure(here, transport.push, made)
    check_bits(here, source, target, parts, held)
    held_gib = (source.compute_bytes()[rank] + target.compute_bytes()[rank]) / 2**30
    uses_gather = bool(made.groups) and gathers is not False
    return found | {"plan_ms": round(1000 * planned_s, 1), "held_gib": round(held_gib, 2), "all_gather": uses_gather}


def run_engine(here: Here) -> dict[str, Any]:
    """From a training engine to a copy of its model on the same GPU."""
    from hybridflow.roles.weight_sync import WeightSync

    settings = TrainSettings(parallel_config=ParallelConfig(shard=0), gradient_checkpointing="full")
    engine = TrainEngine(build_model(here.run.shape, here.device, torch.bfloat16), settings, here.ranks)
    copied = build_model(here.run.shape, here.device, torch.bfloat16)
    copied.module.requires_grad_(False)
    sync = WeightSync(engine, copied, timeout_s=TIMEOUT_S, bucket_bytes=here.run.bucket_mib * 2**20)
    found = measure(here, sync.push, sync.plan)
    own, wrong = dict(copied.module.named_parameters()), 0
    for index, (name, weight) in enumerate(engine.iter_weights()):
        wrong += index % CHECKED == 0 and not torch.equal(own[name], weight)
    if wrong:
        raise SystemExit(f"{wrong} tensors came out otherwise than gathered one by one")
    return found


def run_same(here: Here) -> dict[str, Any]:
    """Trainer and rollout on one storage."""
    transport = SameStorage(here.device)
    switches = [transport.push(version) for version in range(here.run.rounds)]
    return {"ms": round(1000 * max(s.seconds for s in switches), 4), "bytes": sum(s.bytes_moved for s in switches)}


CASES: dict[str, Callable[[Here], dict[str, Any]]] = {
    "replicas": lambda here: run_layouts(here, 1, None),
    "messages": lambda here: run_layouts(here, 1, False),
    "tensor": lambda here: run_layouts(here, here.ranks.size, None),
    "engine": run_engine,
    "same": run_same,
}


def measure(here: Here, push: Callable[[int], Any], made: WeightPlan) -> dict[str, Any]:
    """Times of the switch and of the all-gather, in turn, and the memory that the switch takes."""
    num_bytes = int(made.received.max())
    memory = _measure_memory(here, lambda: push(0))
    gather = _build_gather(here, num_bytes)
    switches, gathers = [], []
    for version in range(1, here.run.rounds + 1):
        switches.append(_time(here, lambda version=version: push(version)))
        gathers.append(_time(here, gather))
    ours, theirs = statistics.median(switches), statistics.median(gathers)
    return memory | {
        "ms": round(1000 * ours, 2), "all_gather_ms": round(1000 * theirs, 2), "ratio": round(ours / theirs, 3),
        "bytes": num_bytes, "gib_per_s": round(num_bytes / ours / 2**30, 1), "buckets": len(made.buckets),
        "bucket_mib": here.run.bucket_mib, "ms_all": [round(1000 * s, 2) for s in switches], "torch": torch.__version__,
    }  # fmt: skip


def _time(here: Here, call: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    here.sync()
    return max(seconds for (seconds,) in here.ranks.gather([time_call(call)]))


def _measure_memory(here: Here, call: Callable[[], Any]) -> dict[str, float]:
    """The first call; NCCL's own buffers, which torch does not count, are not in it."""
    if here.device.type != "cuda":
        call()
        return {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    gib = {"peak_gib": peak, "staging_gib": peak - before, "kept_gib": after - before}
    return {name: round(value / 2**30, 3) for name, value in gib.items()}


def _build_gather(here: Here, num_bytes: int) -> Callable[[], Any]:
    """One all-gather in which each rank receives so many bytes."""
    size = here.ranks.size
    if size == 1:
        return lambda: None
    own = torch.zeros(num_bytes // (size - 1) // 2, dtype=torch.bfloat16, device=here.device)
    every = torch.empty(own.numel() * size, dtype=torch.bfloat16, device=here.device)
    return lambda: dist.all_gather_into_tensor(every, own)


def check_bits(
    here: Here, source: WeightLayout, target: WeightLayout, parts: dict[str, Tensor], held: TargetWeights
) -> None:
    """Compares some of the tensors with what gathering them one by one gives; ends the run where they differ."""
    for name in list(here.shapes)[::CHECKED]:
        part = parts[name].bfloat16()
        longest = max(int(source.tensors[name].placement.shape[rank, 0]) for rank in range(here.ranks.size))
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[: part.shape[0]] = part
        whole = torch.cat(here.ranks.gather_tensors(padded))[: here.shapes[name][0]]
        box = target.tensors[name].placement.box(here.ranks.rank)
        expected = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))]
        if not torch.equal(held.buffers[name], expected):
            raise SystemExit(f"tensor {name} did not arrive as it was sent")


if __name__ == "__main__":
    main()
