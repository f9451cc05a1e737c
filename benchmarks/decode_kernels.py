"""Speed of the rollout's kernels on one GPU, as shares of its memory's, by replays of a captured graph.

    python benchmarks/decode_kernels.py                  # about a minute
    python benchmarks/decode_kernels.py --deadline 30    # leaves out what it has not reached by then

Contexts are uniform in 128 to 640 tokens, in blocks of random order. Each graph goes through several sets of inputs, more than the L2
cache holds where memory allows, so the times are those of memory. Bytes: each input once, each output once. 4.3 TB/s is what a copy
reaches on an H200.

The first sweep lays attention out in other ways, 256 rows and one split; the second splits the default layout over 32 rows. Columns of
both are shares in percent, one for each shape; "-" is a layout that Triton refuses, "." one that was not reached.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from hybridflow.rollout.native import kernels

DEVICE = "cuda"
BANDWIDTH = 4.3e12
BLOCK = 32
ROTATED_BYTES, MOST_SETS, LEAST_CALLS = 400e6, 24, 6
REPEATS = 15


class Shape(NamedTuple):
    """A layer: `Shape("qwen2.5-1.5b", heads=12, kv_heads=2, width=1536, inner=8960, normed=False)`; heads are of 128."""

    name: str
    heads: int
    kv_heads: int
    width: int
    inner: int
    normed: bool
    size: int = 128


SHAPES = [
    Shape("qwen3-0.6b", 16, 8, 1024, 3072, True),
    Shape("qwen2.5-1.5b", 12, 2, 1536, 8960, False),
    Shape("qwen2.5-7b", 28, 4, 3584, 18944, False),
]
# (tile, warps, stages), the likeliest first.
LAYOUTS = [
    (64, 4, 3), (32, 4, 4), (32, 2, 4), (64, 4, 4), (32, 4, 3), (64, 8, 3), (32, 2, 5), (64, 2, 3), (128, 8, 3), (64, 8, 4),
    (32, 1, 4), (128, 4, 3),
]  # fmt: skip
SPLITS = [1, 2, 3, 4, 6, 8]
Calls = tuple[list[Callable[[], object]], float]


def main() -> None:
    """All kernels, then the sweeps, then one table."""
    options = parse_options()
    end = time.monotonic() + options.deadline
    lines = [f"{'kernel':22}{'shape':14}{'rows':>6}{'us':>9}{'GB/s':>8}{'share':>8}"]
    for rows in options.rows:
        for shape in SHAPES:
            for name, build in KERNELS.items():
                if build is build_sampling and shape is not SHAPES[0]:
                    continue  # it knows the vocabulary alone, which is the same
                lines.append(f"{name:22}{shape.name:14}{rows:6d}" + describe(build, shape, rows, options, end))
    lines += [f"layouts of attention, {max(options.rows[:2])} rows, one split:  " + "  ".join(s.name for s in SHAPES)]
    for layout in LAYOUTS:
        plan = kernels.AttentionPlan(1, *layout)
        lines.append(f"  {layout!s:14}" + sweep(plan, max(options.rows[:2]), options, end))
    lines += [f"splits, {options.rows[0]} rows:"]
    for splits in SPLITS:
        lines.append(
            f"  {splits:<14}" + sweep(kernels.AttentionPlan(splits, *LAYOUTS[0]), options.rows[0], options, end)
        )
    print("\n".join(lines))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--deadline", type=float, default=75.0, help="seconds after which nothing new is begun")
    return parser.parse_args()


def describe(build: Callable[..., Calls], shape: Shape, rows: int, options: argparse.Namespace, end: float) -> str:
    """Microseconds, GB/s and share of one kernel."""
    if time.monotonic() > end:
        return "   not reached"
    try:
        calls, num_bytes = build(shape, rows, options)
        run_s = measure(calls)
    except TritonError as error:
        return f"   {type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return f"{run_s * 1e6:9.1f}{num_bytes / run_s / 1e9:8.0f}{num_bytes / run_s / BANDWIDTH:8.1%}"


def sweep(plan: kernels.AttentionPlan, rows: int, options: argparse.Namespace, end: float) -> str:
    """Share of the bandwidth of attention by this plan, for each shape."""
    shares = []
    for shape in SHAPES:
        if time.monotonic() > end:
            shares.append(".")
            continue
        try:
            calls, num_bytes = build_attention(shape, rows, options, plan)
            shares.append(f"{num_bytes / measure(calls) / BANDWIDTH:.1%}")
        except TritonError:
            shares.append("-")
    return "".join(f"{share:>10}" for share in shares)


def measure(calls: list[Callable[[], object]]) -> float:
    """Seconds of a call: the median of replays of a graph that holds them all, over their number."""
    for call in calls:
        call()
    calls = calls * -(-LEAST_CALLS // len(calls))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[REPEATS // 2] / len(calls)


def count_sets(num_bytes: float) -> int:
    """Input sets to go through: more bytes together than the L2 cache holds."""
    return min(max(int(ROTATED_BYTES / num_bytes), 2), MOST_SETS)


def draw(*shape: int) -> Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def build_attention(
    shape: Shape, rows: int, options: argparse.Namespace, plan: kernels.AttentionPlan | None = None
) -> Calls:
    """Calls of decode_attention and the bytes of one."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(128, 641, (rows,), generator=generator, dtype=torch.int32)
    counts = -(-lengths // BLOCK)
    order, tables = (
        torch.randperm(int(counts.sum()), generator=generator).int(),
        torch.zeros(rows, 20, dtype=torch.int32),
    )
    tables[torch.arange(20)[None, :] < counts[:, None]] = order
    tables, lengths = tables.to(DEVICE), lengths.to(DEVICE)
    query = draw(rows, shape.heads, shape.size)
    num_bytes = int(lengths.sum()) * shape.kv_heads * shape.size * 4 + 2 * query.numel() * 2
    slots = len(order) * BLOCK
    sets = [draw(2, slots, shape.kv_heads, shape.size) for _ in range(count_sets(num_bytes))]
    workspace = torch.empty(rows * shape.heads * max(SPLITS) * (shape.size + 2), dtype=torch.float32, device=DEVICE)
    return [
        lambda kv=kv: kernels.decode_attention(
            query, kv[0], kv[1], tables, lengths, scale=shape.size**-0.5, workspace=workspace, plan=plan
        )
        for kv in sets
    ], num_bytes


def build_norm(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """Calls of add_rms_norm and the bytes of one."""
    num_bytes = 4 * rows * shape.width * 2
    sets = [draw(2, rows, shape.width) for _ in range(count_sets(num_bytes))]
    weight = draw(shape.width)
    return [lambda pair=pair: kernels.add_rms_norm(pair[0], pair[1], weight, 1e-6) for pair in sets], num_bytes


def build_rotation(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """Calls of rotate_and_store and the bytes of one."""
    columns = (shape.heads + 2 * shape.kv_heads) * shape.size
    num_bytes = 2 * rows * columns * 2
    sets = [draw(rows, columns) for _ in range(count_sets(num_bytes))]
    cos, sin = draw(2, 1024, shape.size)
    positions = torch.randint(128, 641, (rows,), device=DEVICE)
    slots = torch.randperm(rows * 8, device=DEVICE)[:rows]
    keys, values = draw(2, rows * 8, shape.kv_heads, shape.size)
    gain = draw(shape.size) if shape.normed else None
    return [
        lambda qkv=qkv: kernels.rotate_and_store(
            qkv, cos, sin, positions, slots, keys, values, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
            head_dim=shape.size, query_norm=gain, key_norm=gain, eps=1e-6,
        )
        for qkv in sets
    ], num_bytes  # fmt: skip


def build_gate(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """Calls of gated_act and the bytes of one."""
    num_bytes = 3 * rows * shape.inner * 2
    sets = [draw(rows, 2 * shape.inner) for _ in range(count_sets(num_bytes))]
    return [lambda x=x: kernels.gated_act(x, "silu") for x in sets], num_bytes


def build_sampling(shape: Shape, rows: int, options: argparse.Namespace, greedy: bool = False) -> Calls:
    """Calls of sample and the bytes of one."""
    num_bytes = rows * options.vocabulary * 2
    sets = [draw(rows, options.vocabulary) for _ in range(count_sets(num_bytes))]
    keys, positions = torch.randint(-(2**62), 2**62, (2, rows), device=DEVICE)
    return [lambda x=x: kernels.sample(x, keys, positions, temperature=0.6, greedy=greedy) for x in sets], num_bytes


KERNELS: dict[str, Callable[..., Calls]] = {
    "decode_attention": build_attention,
    "add_rms_norm": build_norm,
    "rotate_and_store": build_rotation,
    "gated_act": build_gate,
    "sample": build_sampling,
}


if __name__ == "__main__":
    main()
