"""Speed of the rollout's kernels on one GPU, by replays of a captured graph, and the ways of laying them out that there are to choose from.

    python benchmarks/decode_kernels.py                            # kernels and stack, some two minutes
    python benchmarks/decode_kernels.py --parts products attention --rows 32 256
    python benchmarks/decode_kernels.py --shapes qwen3-0.6b --rows 32

kernels: each kernel of a layer, microseconds and share of the bound: bytes (inputs once, outputs once) at 4.3 TB/s or arithmetic at 790
TFLOP/s, whichever is longer. products: layouts of the products of few rows beside the library's. attention: layouts of attention with
the rotation in it, beside the two kernels apart. stack: microseconds of a layer in a stack of a few, whole steps without head, and a search
for the layouts that are fastest there: alone, one launch hides behind another, in a stack each waits for the one before.

All rows hold 384 tokens (`--spread`: uniform in 128 to 640), in blocks of random order. Graphs of single kernels go through several sets of
inputs, more than the L2 cache holds, so the times are those of memory. What Triton refuses is shown by the error's name.
Layouts are compiled beforehand by several processes, which share Triton's cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cases import build_parser
from shapes import BANDWIDTH, PRODUCT_FLOPS, build_model, read_layer
from shapes import SHAPES as MODELS
from torch import Tensor
from triton.errors import TritonError

from hybridflow.rollout.native import kernels
from hybridflow.rollout.native.kernels import AttentionPlan, ProductPlan, launch
from hybridflow.rollout.native.layers import FusedLayers
from hybridflow.rollout.native.plans import StepPlan

DEVICE = torch.device("cuda")
BLOCK, MEAN, LONGEST = 32, 384, 640
ROTATED_BYTES, MOST_SETS, LEAST_CALLS, REPEATS = 300e6, 24, 6, 9
STACK_LAYERS, COMPILERS = 4, 14
VOCABULARY = 151936
REFUSED = (TritonError, RuntimeError, ValueError, AssertionError)


class Shape(NamedTuple):
    """A layer: `Shape("qwen2.5-1.5b", heads=12, kv_heads=2, width=1536, inner=8960, normed=False)`; heads are of 128."""

    name: str
    heads: int
    kv_heads: int
    width: int
    inner: int
    normed: bool
    size: int = 128

    @classmethod
    def of(cls, name: str) -> Shape:
        """That of a model."""
        layer = read_layer(name)
        normed = MODELS[name]["model_type"] == "qwen3"
        return cls(name, layer.heads, layer.kv_heads, layer.width, layer.inner, normed, layer.size)

    def list_products(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each weight; of both halves where a gate joins two."""
        queries = self.heads * self.size
        return {
            "qkv": (queries + 2 * self.kv_heads * self.size, self.width), "out": (self.width, queries),
            "gate_up": (2 * self.inner, self.width), "down": (self.width, self.inner),
        }  # fmt: skip


SHAPES = [Shape.of(name) for name in ("qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-7b")]
# (columns, depth, splits, warps, stages, turned); a gate's columns are half.
NARROW = [
    (32, 128, 1, 4, 4, False), (64, 128, 1, 4, 4, False), (64, 128, 2, 4, 4, False), (64, 128, 4, 4, 4, False), (64, 128, 8, 4, 4, False),
    (32, 128, 4, 4, 4, False), (64, 128, 1, 4, 4, True), (64, 128, 2, 4, 4, True), (64, 128, 4, 4, 4, True), (64, 128, 6, 4, 4, True),
    (64, 128, 8, 4, 3, True), (128, 64, 4, 4, 5, True), (128, 128, 8, 8, 3, True),
]  # fmt: skip
NARROW_GATED = [
    (16, 128, 1, 4, 4, False), (32, 128, 1, 4, 3, False), (32, 128, 1, 4, 4, False), (64, 128, 1, 4, 3, False), (64, 128, 1, 8, 3, False),
    (64, 64, 1, 4, 5, True), (64, 128, 1, 4, 3, True), (64, 64, 1, 4, 4, True), (128, 64, 1, 8, 4, True),
]  # fmt: skip
# (rows, columns, depth, splits, warps, stages, turned).
WIDE = [
    (128, 64, 64, 1, 4, 4, False), (128, 64, 64, 2, 4, 4, False), (128, 64, 64, 4, 4, 4, False), (128, 128, 64, 2, 8, 4, False),
    (128, 128, 64, 4, 8, 4, False), (64, 64, 128, 2, 4, 3, False), (64, 128, 64, 1, 4, 4, False), (256, 64, 64, 4, 4, 4, True),
    (256, 128, 64, 4, 8, 4, True), (128, 64, 64, 4, 4, 4, True),
]  # fmt: skip
WIDE_GATED = [
    (128, 64, 64, 1, 8, 4, False), (64, 64, 64, 1, 4, 5, False), (128, 64, 64, 1, 4, 3, True), (128, 32, 64, 1, 4, 4, False),
    (128, 64, 64, 1, 8, 3, True),
]  # fmt: skip
# (splits, tile, warps, stages, keys of a split at least).
LAYOUTS = [
    (1, 64, 4, 3, 128),
    (1, 32, 2, 4, 128),
    (1, 32, 2, 3, 128),
    (1, 32, 2, 5, 128),
    (1, 32, 1, 4, 128),
    (1, 64, 4, 2, 128),
    (1, 32, 4, 4, 128),
]
SPLIT_LAYOUTS = [
    (2, 64, 4, 3, 128), (2, 32, 2, 4, 128), (3, 32, 2, 4, 128), (3, 64, 4, 3, 128), (4, 64, 4, 3, 64), (6, 64, 4, 3, 64), (6, 32, 2, 4, 64),
    (12, 32, 2, 4, 32),
]  # fmt: skip
Calls = tuple[list[Callable[[], object]], float, float]
"""Calls that differ in their inputs alone; bytes and operations of one."""


def main() -> None:
    """The parts that are asked for, each a table."""
    options = parse_options()
    shapes = [shape for shape in SHAPES if shape.name in options.shapes]
    began_s = time.monotonic()
    if options.late:
        launch._FIRST_CAPABILITY = (99, 0)
    if options.compilers and not options.planned:
        compile_all(options, shapes)
    print(f"compiled after {time.monotonic() - began_s:.0f} s", flush=True)
    best: dict[tuple[str, int, str], ProductPlan | None] = {}
    for part in PARTS:
        if part in options.parts:
            for shape in shapes:
                for line in PARTS[part](shape, options, best):
                    print(line, flush=True)
            print(f"({part}: {time.monotonic() - began_s:.0f} s)", flush=True)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = build_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 256])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=["kernels", "stack"])
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--late", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--spread", action="store_true", help="contexts uniform in 128 to 640")
    parser.add_argument("--sorted", action="store_true", help="the longest rows first")
    parser.add_argument("--planned", action="store_true", help="stack: the plan and its neighbours, without a search")
    parser.add_argument("--compilers", type=int, default=COMPILERS, help="processes; 0 compiles when it measures")
    return parser.parse_args()


def compile_all(options: argparse.Namespace, shapes: list[Shape]) -> None:
    """Runs every layout once, side by side in processes without state of the GPU of their own before."""
    parts = ("products", "attention") if "stack" in options.parts else options.parts
    work = [
        (part, shape, rows)
        for part in ("products", "attention")
        if part in parts
        for shape in shapes
        for rows in options.rows
    ]
    jobs = [
        (part, shape, rows, key, options)
        for part, shape, rows in work
        for key in ((name, plan) for name, plan in (iter_products if part == "products" else iter_layouts)(shape, rows))
    ]
    with multiprocessing.get_context("fork").Pool(options.compilers) as pool:
        pool.map(compile_one, jobs, chunksize=1)


def compile_one(job: tuple[str, Shape, int, tuple[str, Any], argparse.Namespace]) -> None:
    """One layout; what is refused will be refused again."""
    part, shape, rows, (name, plan), options = job
    try:
        build = (
            build_product(shape, rows, name, plan, 1)
            if part == "products"
            else build_joint(shape, rows, options, plan, 1)
        )
        build[0][0]()
        torch.cuda.synchronize()
    except REFUSED:
        return
    finally:
        torch.cuda.empty_cache()


def measure(calls: list[Callable[[], object]], least_calls: int = LEAST_CALLS) -> float:
    """Seconds of a call: the median of replays of a graph that holds them all, over their number."""
    for call in calls:
        call()
    calls = calls * -(-least_calls // len(calls))
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


def describe(build: Callable[[], Calls]) -> tuple[float, str]:
    """(microseconds, the same with the share of the bound), or infinity and the error's name."""
    try:
        calls, num_bytes, operations = build()
        run_s = measure(calls)
    except REFUSED as error:
        return float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0][:50]}"
    return run_s * 1e6, f"{run_s * 1e6:.1f} ({max(num_bytes / BANDWIDTH, operations / PRODUCT_FLOPS) / run_s:.0%})"


def count_sets(num_bytes: float, most: int) -> int:
    """Input sets to go through: more bytes together than the L2 cache holds."""
    return min(max(int(ROTATED_BYTES / num_bytes), 2), MOST_SETS, most)


def draw(*shape: int, spread: float = 1.0) -> Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * spread


def tell_kernels(shape: Shape, options: argparse.Namespace, best: dict[Any, Any]) -> Iterator[str]:
    """Each kernel of a layer as it is."""
    yield f"{shape.name:14}" + "".join(f"{rows:>18}" for rows in options.rows)
    for name, build in KERNELS.items():
        cells = [describe(lambda build=build, rows=rows: build(shape, rows, options))[1] for rows in options.rows]
        yield f"  {name:20}" + "".join(f"{cell:>16}" for cell in cells)


def tell_products(shape: Shape, options: argparse.Namespace, best: dict[Any, Any]) -> Iterator[str]:
    """The library's product (with the gate's kernel), then layouts, the fastest first; a shared sum's is added by the kernel after it."""
    for rows in options.rows:
        for name in shape.list_products():
            library_us, cell = describe(lambda name=name, rows=rows: build_product(shape, rows, name, None))
            found = []
            for each, plan in iter_products(shape, rows):
                if each == name:
                    found.append(
                        (
                            *describe(lambda plan=plan, name=name, rows=rows: build_product(shape, rows, name, plan)),
                            plan,
                        )
                    )
            found.sort(key=lambda entry: entry[0])
            best[shape.name, rows, name] = found[0][2] if found and found[0][0] < library_us else None
            others = "  ".join(f"{text} {tuple(plan)}" for _, text, plan in found[:4])
            refused = sum(us == float("inf") for us, _, _ in found)
            yield f"{shape.name:14}{rows:5} {name:8} library {cell:>14} | {others} | {refused} refused"


def iter_products(shape: Shape, rows: int) -> Iterator[tuple[str, ProductPlan]]:
    """Layouts that are tried of each product."""
    for name in shape.list_products():
        gated = name == "gate_up"
        if rows <= 64:
            for columns, depth, splits, warps, stages, turned in NARROW_GATED if gated else NARROW:
                yield name, ProductPlan(max(16, rows), columns, depth, splits, warps, stages, turned)
        elif rows <= 256:
            for plan in WIDE_GATED if gated else WIDE:
                yield name, ProductPlan(*plan)
        elif gated:
            for plan in WIDE_GATED:
                yield name, ProductPlan(*plan)


def build_product(shape: Shape, rows: int, name: str, plan: ProductPlan | None, most: int = MOST_SETS) -> Calls:
    """One product, and what follows the gate's."""
    outputs, inputs = shape.list_products()[name]
    num_bytes, operations = 2.0 * (outputs * inputs + rows * (inputs + outputs)), 2.0 * rows * outputs * inputs
    x = draw(rows, inputs)
    sets = [draw(outputs, inputs, spread=inputs**-0.5) for _ in range(count_sets(num_bytes, most))]
    if name == "gate_up":
        if plan is None:
            return [lambda w=w: kernels.gated_act(F.linear(x, w), "silu") for w in sets], num_bytes, operations
        return [lambda w=w: kernels.multiply_gated(x, w, "silu", plan) for w in sets], num_bytes, operations
    if plan is None:
        return [lambda w=w: F.linear(x, w) for w in sets], num_bytes, operations
    return [lambda w=w: kernels.multiply(x, w, None, plan) for w in sets], num_bytes, operations


def tell_attention(shape: Shape, options: argparse.Namespace, best: dict[Any, Any]) -> Iterator[str]:
    """Rotation and attention apart, then layouts of both in one, the fastest first."""
    for rows in options.rows:
        _, apart = describe(lambda rows=rows: build_apart(shape, rows, options))
        found = [
            (*describe(lambda plan=plan, rows=rows: build_joint(shape, rows, options, plan)), plan)
            for _, plan in iter_layouts(shape, rows)
        ]
        found.sort(key=lambda entry: entry[0])
        best[shape.name, rows, "attention"] = found[0][2] if found[0][0] < float("inf") else None
        cells = "  ".join(f"{text} {tuple(plan)}" for _, text, plan in found[:6])
        yield f"{shape.name:14}{rows:5} apart {apart:>14} | joint {cells}"


def iter_layouts(shape: Shape, rows: int) -> Iterator[tuple[str, AttentionPlan]]:
    """Layouts that are tried of attention."""
    for layout in [*LAYOUTS, *SPLIT_LAYOUTS] if rows * shape.kv_heads <= 512 else LAYOUTS:
        yield "attention", AttentionPlan(*layout)


class Held(NamedTuple):
    """Rows in a cache: block tables [B, W] and tokens held [B], int32; slots that the cache has."""

    tables: Tensor
    lengths: Tensor
    num_slots: int


def build_held(rows: int, options: argparse.Namespace) -> Held:
    """Blocks in random order."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.full((rows,), MEAN, dtype=torch.int32)
    if options.spread:
        lengths = torch.randint(2 * MEAN - LONGEST, LONGEST + 1, (rows,), generator=generator, dtype=torch.int32)
    if options.sorted:
        lengths = lengths.sort(descending=True).values
    counts = -(-lengths // BLOCK)
    # As wide as the tables of an engine whose rows end at 640 tokens.
    tables = torch.zeros(rows, 32, dtype=torch.int32)
    order = torch.randperm(int(counts.sum()), generator=generator).int()
    tables[torch.arange(32)[None, :] < counts[:, None]] = order
    return Held(tables.to(DEVICE), lengths.to(DEVICE), len(order) * BLOCK)


def build_attention(shape: Shape, rows: int, options: argparse.Namespace, plan: AttentionPlan | None = None) -> Calls:
    """decode_attention."""
    held, query = build_held(rows, options), draw(rows, shape.heads, shape.size)
    num_bytes = int(held.lengths.sum()) * shape.kv_heads * shape.size * 4.0 + 4 * query.numel()
    sets = [draw(2, held.num_slots, shape.kv_heads, shape.size) for _ in range(count_sets(num_bytes, MOST_SETS))]
    return [
        lambda kv=kv: kernels.decode_attention(query, kv[0], kv[1], held.tables, held.lengths, scale=shape.size**-0.5, plan=plan)
        for kv in sets
    ], num_bytes, 0.0  # fmt: skip


def build_joint(
    shape: Shape, rows: int, options: argparse.Namespace, plan: AttentionPlan | None, most: int = MOST_SETS
) -> Calls:
    """attend_and_store."""
    held, columns = build_held(rows, options), (shape.heads + 2 * shape.kv_heads) * shape.size
    num_bytes = int(held.lengths.sum()) * shape.kv_heads * shape.size * 4.0 + 2.0 * rows * (
        columns + shape.heads * shape.size
    )
    sets = [
        (draw(2, held.num_slots, shape.kv_heads, shape.size), draw(rows, columns))
        for _ in range(count_sets(num_bytes, most))
    ]
    cos, sin = draw(2, 1024, shape.size)
    gain = draw(shape.size) if shape.normed else None
    arrivals = torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device=DEVICE)
    return [
        lambda kv=kv, qkv=qkv: kernels.attend_and_store(
            qkv, None, cos, sin, kv[0], kv[1], held.tables, held.lengths, arrivals, num_heads=shape.heads, scale=shape.size**-0.5,
            query_norm=gain, key_norm=gain, eps=1e-6, plan=plan,
        )
        for kv, qkv in sets
    ], num_bytes, 0.0  # fmt: skip


def build_apart(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """rotate_and_store, then decode_attention."""
    attend, num_bytes, _ = build_attention(shape, rows, options)
    rotate, _, _ = build_rotation(shape, rows, options)
    return [
        lambda pair=pair: (pair[1](), pair[0]()) for pair in zip(attend, rotate * len(attend), strict=False)
    ], num_bytes, 0.0  # fmt: skip


def build_norm(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """add_rms_norm."""
    num_bytes = 4.0 * rows * shape.width * 2
    sets = [draw(2, rows, shape.width) for _ in range(count_sets(num_bytes, MOST_SETS))]
    weight = draw(shape.width)
    return [lambda pair=pair: kernels.add_rms_norm(pair[0], pair[1], weight, 1e-6) for pair in sets], num_bytes, 0.0


def build_rotation(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """rotate_and_store."""
    columns = (shape.heads + 2 * shape.kv_heads) * shape.size
    num_bytes = 2.0 * rows * columns * 2
    sets = [draw(rows, columns) for _ in range(count_sets(num_bytes, MOST_SETS))]
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
    ], num_bytes, 0.0  # fmt: skip


def build_gate(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """gated_act."""
    num_bytes = 3.0 * rows * shape.inner * 2
    sets = [draw(rows, 2 * shape.inner) for _ in range(count_sets(num_bytes, MOST_SETS))]
    return [lambda x=x: kernels.gated_act(x, "silu") for x in sets], num_bytes, 0.0


def build_head(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """The head's product."""
    num_bytes = 2.0 * (VOCABULARY * shape.width + rows * VOCABULARY)
    weight, x = draw(VOCABULARY, shape.width, spread=shape.width**-0.5), draw(rows, shape.width)
    return [lambda: x @ weight.t()], num_bytes, 2.0 * rows * VOCABULARY * shape.width


def build_sampling(shape: Shape, rows: int, options: argparse.Namespace) -> Calls:
    """sample."""
    num_bytes = rows * VOCABULARY * 2.0
    sets = [draw(rows, VOCABULARY) for _ in range(count_sets(num_bytes, MOST_SETS))]
    keys, positions = torch.randint(-(2**62), 2**62, (2, rows), device=DEVICE)
    return [lambda x=x: kernels.sample(x, keys, positions, temperature=0.6, greedy=False) for x in sets], num_bytes, 0.0


KERNELS: dict[str, Callable[[Shape, int, argparse.Namespace], Calls]] = {
    "qkv": lambda shape, rows, options: build_product(shape, rows, "qkv", None),
    "rotate_and_store": build_rotation,
    "decode_attention": build_attention,
    "out": lambda shape, rows, options: build_product(shape, rows, "out", None),
    "add_rms_norm": build_norm,
    "gate_up + gated_act": lambda shape, rows, options: build_product(shape, rows, "gate_up", None),
    "gated_act": build_gate,
    "down": lambda shape, rows, options: build_product(shape, rows, "down", None),
    "head": build_head,
    "sample": build_sampling,
}


def tell_stack(shape: Shape, options: argparse.Namespace, best: dict[Any, Any]) -> Iterator[str]:
    """Microseconds of a layer in a stack: as the library's products have it, as it is planned, and by the fastest layouts found one after
    the other."""
    MODELS["stack"] = {**MODELS[shape.name], "num_hidden_layers": STACK_LAYERS}
    model = build_model("stack", DEVICE, torch.bfloat16)
    model.module.requires_grad_(False)
    layers = FusedLayers(model)
    for rows in options.rows:
        held = build_held(rows, options)
        cache = model.new_cache(held.num_slots // BLOCK)
        for part in (cache.keys, cache.values):
            part.normal_()
        stack = Stack(layers, rows, held, cache)
        yield f"{shape.name:14}{rows:5} library {stack.tell(StepPlan())}"
        planned = layers.plan(rows, held.tables.shape[1])
        yield f"{shape.name:14}{rows:5} planned {stack.tell(planned)}"
        if options.planned:
            yield from vary(shape, rows, stack, planned)
        else:
            yield from search(shape, rows, stack)
        del cache, stack
        torch.cuda.empty_cache()


class Stack:
    """A few layers and rows to decode with them."""

    def __init__(self, layers: FusedLayers, rows: int, held: Held, cache: Any) -> None:
        self._layers = layers
        tokens = torch.randint(0, VOCABULARY, (rows,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
        positions = held.lengths.long() - 1
        slots = held.tables[torch.arange(rows, device=DEVICE), positions // BLOCK].long() * BLOCK + positions % BLOCK
        self._inputs = (tokens, positions, slots, held.tables, held.lengths, cache)
        self._expected = self.run(StepPlan())

    def run(self, plan: StepPlan) -> Tensor:
        """Hidden states."""
        with torch.inference_mode():
            return self._layers.decode_states(*self._inputs, plan)

    def time(self, plan: StepPlan) -> float:
        """Microseconds of a layer; infinity for a plan that is refused."""
        try:
            return measure([lambda: self.run(plan)], 2) * 1e6 / STACK_LAYERS
        except REFUSED as error:
            print(f"{plan}: {type(error).__name__}: {str(error).splitlines()[0][:60]}")
            return float("inf")

    def tell(self, plan: StepPlan) -> str:
        """Microseconds, and how far hidden states are from those of the library's products, as a share."""
        distance = ((self.run(plan) - self._expected).float().norm() / self._expected.float().norm()).item()
        return f"{self.time(plan):8.1f} us a layer, distance {distance:.4f}"


def vary(shape: Shape, rows: int, stack: Stack, planned: StepPlan) -> Iterator[str]:
    """The plan with one product otherwise: by the library where it has a plan, else by two layouts."""
    if rows > 64:
        return
    for name in shape.list_products():
        gated, tile = name == "gate_up", max(16, 1 << (rows - 1).bit_length())
        others: list[ProductPlan | None] = [None]
        if getattr(planned, name) is None:
            others = [
                ProductPlan(tile, 64, 64 if gated else 128, 1, 4, 5 if gated else 4, True),
                ProductPlan(tile, 32, 128, 1, 4, 4),
            ]
        for other in others:
            plan = planned._replace(**{name: other})
            yield f"{shape.name:14}{rows:5}   with {name} {other and tuple(other)}: {stack.time(plan):.1f}"


def search(shape: Shape, rows: int, stack: Stack) -> Iterator[str]:
    """Attention first, then one product after the other, attention once more; each time what is fastest in the whole stack."""
    layouts = [plan for _, plan in iter_layouts(shape, rows)]
    plan = StepPlan()
    for turn in (0, 1):
        found = [plan] if turn else []
        found += [
            plan._replace(joint=joint, attention=layout) for joint in (False, True) for layout in [None, *layouts]
        ]
        times = sorted((stack.time(each), index) for index, each in enumerate(found))
        plan = found[times[0][1]]
        if turn:
            break
        runners = "  ".join(
            f"{us:.1f} {'joint' if found[i].joint else 'apart'} {found[i].attention and tuple(found[i].attention)}"
            for us, i in times[:5]
        )
        yield f"{shape.name:14}{rows:5} attention {runners}"
        for name in ("out", "gate_up", "down", "qkv"):
            products = [
                plan,
                *(plan._replace(**{name: product}) for each, product in iter_products(shape, rows) if each == name),
            ]
            if name == "qkv" and not plan.joint:
                continue
            times = sorted((stack.time(each), index) for index, each in enumerate(products))
            held = [(us, getattr(products[index], name)) for us, index in times[:5]]
            runners = "  ".join(f"{us:.1f} {product and tuple(product)}" for us, product in held)
            yield f"{shape.name:14}{rows:5} {name:9} {runners}"
            plan = products[times[0][1]]
    yield f"{shape.name:14}{rows:5} best    {stack.tell(plan)} {plan}"


PARTS: dict[str, Callable[[Shape, argparse.Namespace, dict[Any, Any]], Iterator[str]]] = {
    "kernels": tell_kernels,
    "products": tell_products,
    "attention": tell_attention,
    "stack": tell_stack,
}


if __name__ == "__main__":
    main()
