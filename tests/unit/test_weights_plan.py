"""Plans between thousands of layouts: every value arrives once, nothing else travels, no bucket is too full, and nobody sends for two."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from hybridflow.train_engine import Layout, compute_box
from hybridflow.weights.layout import (
    Cut,
    Held,
    LayoutError,
    Placement,
    WeightLayout,
    build_layout,
    compute_placement,
    plan_rollout,
    plan_trainers,
    read_layout,
    read_tensor_dims,
)
from hybridflow.weights.messages import Piece, plan_messages
from hybridflow.weights.plan import WeightPlan, plan_weights

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
Rng = np.random.Generator


# --- random layouts -------------------------------------------------------------------------------------------------


def draw_shapes(rng: Rng) -> dict[str, tuple[int, ...]]:
    kinds = [tuple(rng.integers(1, 14, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(1, 4))]
    return {f"t{index}.weight": kinds[rng.integers(len(kinds))] for index in range(rng.integers(1, 7))}


def draw_dims(rng: Rng, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    return {name: int(rng.integers(len(shape))) for name, shape in shapes.items() if rng.random() < 0.7}


def draw_regular(rng: Rng) -> tuple[WeightLayout, WeightLayout]:
    """Trainers to replicas of tensor-parallel ranks, on the same ranks, on some of them or on others."""
    shapes, degrees = draw_shapes(rng), rng.integers(1, 4, 3).tolist()
    dims, tensor, replicas = draw_dims(rng, shapes), int(rng.integers(1, 5)), int(rng.integers(1, 4))
    trainers = math.prod(degrees)
    size = max(trainers, tensor * replicas) + int(rng.integers(0, 3))
    ranks = rng.permutation(size)[: tensor * replicas].tolist()
    source = plan_trainers(
        shapes, dims, replicate=degrees[0], shard=degrees[1], tensor=degrees[2], size=size, dtype=torch.float32
    )
    dtype = DTYPES[rng.integers(3)]
    return source, plan_rollout(shapes, dims, ranks=ranks, size=size, tensor=tensor, dtype=dtype)


def draw_grid(rng: Rng, shape: tuple[int, ...], size: int) -> Placement:
    """A tensor cut by a grid at random places; each part on one rank or on several."""
    borders = [sorted({0, n, *rng.integers(0, n + 1, rng.integers(0, 3)).tolist()}) for n in shape]
    ranges = [list(zip(b[:-1], b[1:], strict=True)) for b in borders]
    boxes = [[]]
    for axis in ranges:
        boxes = [[*box, part] for box in boxes for part in axis]
    offsets, lengths = np.zeros((size, len(shape)), np.int64), np.zeros((size, len(shape)), np.int64)
    holders = rng.permutation(size)
    for place, rank in enumerate(holders[: len(boxes) + int(rng.integers(0, size))].tolist()):
        box = boxes[place % len(boxes)]
        offsets[rank], lengths[rank] = [a for a, _ in box], [b - a for a, b in box]
    return Placement(shape, offsets, lengths)


def draw_boxes(rng: Rng, shape: tuple[int, ...], size: int) -> Placement:
    """Any box for any rank; some ranks want nothing, some the same."""
    low = np.stack([rng.integers(0, n, size) for n in shape], axis=1)
    high = np.stack([rng.integers(low[:, dim], n + 1) for dim, n in enumerate(shape)], axis=1)
    copied = rng.integers(0, size, size)
    return Placement(shape, low[copied], (high - low)[copied])


def draw_irregular(rng: Rng) -> tuple[WeightLayout, WeightLayout]:
    shapes, size = draw_shapes(rng), 30
    dtype = DTYPES[rng.integers(3)]

    def hold(draw: Callable[[Rng, tuple[int, ...], int], Placement]) -> WeightLayout:
        tensors = {}
        for name, shape in shapes.items():
            tensors[name] = Held(draw(rng, shape, size), dtype)
        return WeightLayout(size, tensors)

    return hold(draw_grid), hold(draw_boxes)


def draw_sharded(rng: Rng) -> tuple[WeightLayout, WeightLayout]:
    """FSDP2 shards, in one copy or several, to a whole replica on each of the same ranks."""
    shapes, replicate, shard = draw_shapes(rng), int(rng.integers(1, 4)), int(rng.integers(2, 9))
    if rng.random() < 0.7:
        # Parts of one length, as real matrices have them: an all-gather pads little.
        shapes = {name: (shard * int(rng.integers(1, 4)), *shape[1:]) for name, shape in shapes.items()}
    size = replicate * shard
    source = plan_trainers(shapes, {}, replicate=replicate, shard=shard)
    return source, plan_rollout(shapes, {}, ranks=range(size), size=size, dtype=DTYPES[rng.integers(3)])


def draw_wide(rng: Rng) -> tuple[WeightLayout, WeightLayout]:
    """As `draw_regular`, on 65 to 1,024 ranks."""
    shapes = draw_shapes(rng)
    dims, size = draw_dims(rng, shapes), int(rng.integers(65, 1025))
    tensor = int(rng.choice([1, 2, 4, 8]))
    shard = int(rng.integers(1, size // tensor + 1))
    source = plan_trainers(
        shapes, dims, replicate=size // tensor // shard, shard=shard, tensor=tensor, size=size, dtype=torch.float32
    )
    split = int(rng.integers(1, 17))
    ranks = rng.permutation(size)[: split * int(rng.integers(1, size // split + 1))].tolist()
    return source, plan_rollout(shapes, dims, ranks=ranks, size=size, tensor=split, dtype=DTYPES[rng.integers(3)])


def iter_layouts(seed: int, count: int) -> Iterator[tuple[Rng, WeightLayout, WeightLayout]]:
    draws = (draw_regular, draw_irregular, draw_regular, draw_sharded)
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        yield rng, *draws[index % 4](rng)


# --- what a plan has to be, counted value by value ------------------------------------------------------------------


def mask_boxes(held: Placement) -> np.ndarray:
    """[ranks, *shape] True where a rank holds the value."""
    mask = np.ones((len(held.offsets), *held.global_shape), np.bool_)
    for dim, length in enumerate(held.global_shape):
        low, count = held.offsets[:, dim, None], held.shape[:, dim, None]
        inside = (np.arange(length) >= low) & (np.arange(length) < low + count)
        mask &= inside.reshape(len(low), *(length if d == dim else 1 for d in range(len(held.global_shape))))
    return mask


def check_delivery(made: WeightPlan, source: WeightLayout, target: WeightLayout) -> None:
    wanted = {name: mask_boxes(held.placement) for name, held in target.tensors.items()}
    held = {name: mask_boxes(source.tensors[name].placement) for name in wanted}
    arrived = {name: np.zeros(mask.shape, np.int64) for name, mask in wanted.items()}
    travelled = np.zeros(made.size, np.int64)
    for _, part in made.iter_parts():
        c = part.copies
        inside = source.tensors[part.tensor].placement
        assert (c.start >= inside.offsets[c.source]).all(), "sent by a rank without it"
        assert (c.start + c.shape <= inside.offsets[c.source] + inside.shape[c.source]).all(), (
            "sent by a rank without it"
        )
        np.add.at(travelled, c.target, c.shape.prod(axis=1) * part.itemsize * (c.source != c.target))
        for taker, start, shape in zip(c.target.tolist(), c.start.tolist(), c.shape.tolist(), strict=True):
            arrived[part.tensor][(taker, *(slice(a, a + n) for a, n in zip(start, shape, strict=True)))] += 1
    for name, times in arrived.items():
        np.testing.assert_array_equal(times, wanted[name].astype(np.int64))
    least = sum(
        (wanted[name] & ~held[name]).reshape(made.size, -1).sum(axis=1) * layout.dtype.itemsize
        for name, layout in target.tensors.items()
    )
    np.testing.assert_array_equal(travelled, least)
    np.testing.assert_array_equal(made.received, least)
    assert made.sent.sum() == made.received.sum() == made.bytes_moved


def check_buckets(made: WeightPlan) -> None:
    """What each rank packs and hears in each bucket, a piece that several want counted once."""
    for bucket in made.buckets:
        room: dict[int, int] = defaultdict(int)
        packed = set()
        for part in bucket.parts:
            copies = part.copies
            rows = zip(
                copies.source.tolist(),
                copies.target.tolist(),
                copies.start.tolist(),
                copies.shape.tolist(),
                strict=True,
            )
            for sender, taker, start, shape in rows:
                if sender == taker:
                    continue
                num_bytes = math.prod(shape) * part.itemsize
                room[taker] += num_bytes
                key = (sender, part.tensor, tuple(start), tuple(shape))
                room[sender] += num_bytes * (key not in packed)
                packed.add(key)
        assert max(room.values(), default=0) <= made.bucket_bytes


def check_messages(made: WeightPlan, target: WeightLayout, gathers: bool) -> None:
    """Both ends of each message name the same pieces at the same places."""
    views = [plan_messages(made, rank, gathers=gathers) for rank in range(made.size)]
    for buckets in zip(*views, strict=True):
        for rank, bucket in enumerate(buckets):
            assert bucket.num_bytes <= made.bucket_bytes
            for message in bucket.receives:
                (sender,) = message.peers
                # Of several messages from one rank the n-th is the n-th that it sends here.
                nth = [m for m in bucket.receives if m.peers == (sender,)].index(message)
                theirs = [m for m in buckets[sender].sends if rank in m.peers][nth]
                assert pieces_in(bucket.received, message) == pieces_in(buckets[sender].packed, theirs)
            heard = sum(len(m.peers) for m in bucket.sends)
            assert heard == sum(m.peers == (rank,) for other in buckets for m in other.receives)
            if bucket.group and bucket.room:
                for piece in bucket.received:
                    sender = bucket.group[piece.offset // bucket.room]
                    assert piece in buckets[sender].packed


def pieces_in(pieces: tuple[Piece, ...], message: object) -> list[Piece]:
    low, high = message.offset, message.offset + message.num_bytes
    return [dataclasses.replace(p, offset=p.offset - low) for p in pieces if low <= p.offset < high]


# --- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_between_random_layouts_every_value_arrives_once_and_no_bucket_is_too_full(seed: int) -> None:
    gathered = cut = 0
    for rng, source, target in iter_layouts(seed, 400):
        bucket_bytes = int(rng.choice([800, 3000, 1 << 20]))
        nodes = rng.integers(0, 3, source.size).tolist() if rng.random() < 0.5 else None
        made = plan_weights(source, target, bucket_bytes, nodes=nodes, piece_bytes=int(rng.choice([8, 64, 1 << 20])))
        check_delivery(made, source, target)
        check_buckets(made)
        check_messages(made, target, gathers=False)
        if made.groups:
            check_messages(made, target, gathers=True)
        gathered += bool(made.groups)
        cut += len(made.buckets) > 1
    assert gathered > 40 and cut > 40, "the layouts drawn leave something untried"


@pytest.mark.slow
def test_between_random_layouts_on_up_to_1024_ranks_every_value_arrives_once() -> None:
    sizes = []
    for index in range(40):
        rng = np.random.default_rng([3, index])
        source, target = draw_wide(rng)
        made = plan_weights(source, target, int(rng.choice([800, 3000, 1 << 20])))
        check_delivery(made, source, target)
        check_buckets(made)
        check_messages(made, target, gathers=bool(made.groups))
        sizes.append(source.size)
    assert max(sizes) > 900 and min(sizes) < 150


QWEN_7B = {"width": 3584, "inner": 18944, "kv": 512, "vocab": 152064}


def build_shapes(width: int, inner: int, kv: int, vocab: int, layers: int = 28) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a Qwen2 model."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(layers):
        matrices = {
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }  # fmt: skip
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{at}self_attn.{side}_proj.bias": (matrices[f"self_attn.{side}_proj"][0],) for side in "qkv"}
        shapes |= {f"{at}{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}


def read_dims(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    return read_tensor_dims(shapes, AutoConfig.for_model("qwen2").base_model_tp_plan)


SMALL = build_shapes(width=8, inner=12, kv=4, vocab=10, layers=2)


def test_a_family_plan_splits_rows_columns_and_vocabulary_and_leaves_norms_and_row_split_biases_whole() -> None:
    dims = read_dims(SMALL | {"model.layers.0.self_attn.o_proj.bias": (8,)})
    at = "model.layers.0."
    by_rows = ["self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.up_proj.weight"]
    assert [dims[at + name] for name in by_rows] == [0, 0, 0]
    assert [dims[at + name] for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")] == [1, 1]
    assert dims["model.embed_tokens.weight"] == dims["lm_head.weight"] == 0
    assert not {at + "self_attn.o_proj.bias", at + "input_layernorm.weight", "model.norm.weight"} & dims.keys()


def test_trainers_hold_the_boxes_that_the_training_engine_says() -> None:
    shapes, layout = SMALL | {"odd.mlp.up_proj.weight": (7, 5)}, Layout(data=4, tensor=2, shard=2)
    dims = read_dims(shapes)
    held = plan_trainers(shapes, dims, replicate=layout.replicate, shard=layout.shard, tensor=layout.tensor)
    for name, shape in shapes.items():
        for rank in range(layout.size):
            at = layout.coordinates(rank)
            cuts = [*([(dims[name], 2, at.tensor)] if name in dims else []), (0, 2, at.shard)]
            assert held.tensors[name].placement.box(rank) == compute_box(shape, cuts)


def test_two_gpus_with_half_of_a_7b_each_move_half_of_it_to_replicas_and_the_row_split_quarters_to_tensor_parallel() -> (
    None
):
    shapes = build_shapes(**QWEN_7B)
    dims = read_dims(shapes)
    total = 2 * sum(math.prod(shape) for shape in shapes.values())
    source = plan_trainers(shapes, dims, shard=2)
    replicas = plan_weights(source, plan_rollout(shapes, dims, ranks=[0, 1], size=2), 1 << 29)
    assert replicas.groups == ((0, 1),)
    assert replicas.received.tolist() == replicas.sent.tolist() == [total // 2] * 2
    assert len(replicas.buckets) <= total / (1 << 29) * 1.35, "many half-empty buckets"
    split = plan_weights(source, plan_rollout(shapes, dims, ranks=[0, 1], size=2, tensor=2), 1 << 29)
    across = sum(math.prod(shape) for name, shape in shapes.items() if dims.get(name) == 1)
    norms = sum(math.prod(shape) for name, shape in shapes.items() if name not in dims)
    assert split.received.tolist() == [2 * (across // 4 + norms // 2)] * 2


def test_a_7b_over_1024_ranks_is_planned_in_seconds() -> None:
    shapes, size = build_shapes(**QWEN_7B), 1024
    dims = read_dims(shapes)
    source = plan_trainers(shapes, dims, replicate=8, shard=32, tensor=4)
    target = plan_rollout(shapes, dims, ranks=range(size), size=size, tensor=8, num_kv_heads=4)
    started_s = time.perf_counter()
    made = plan_weights(source, target, 1 << 28, nodes=[rank // 8 for rank in range(size)])
    assert time.perf_counter() - started_s < 20.0
    masks = [held.placement.counts * held.dtype.itemsize for held in target.tensors.values()]
    assert (made.received + made.local == np.sum(masks, axis=0)).all()
    for bucket in made.buckets[:2]:
        for part in bucket.parts:
            counts = np.bincount(part.copies.target, weights=part.copies.counts, minlength=size)
            assert (counts <= target.tensors[part.tensor].placement.counts).all()


@pytest.mark.parametrize("size", [256, 1024])
def test_thousand_ranks_with_the_smallest_of_parts_get_every_value_once(size: int) -> None:
    shapes = {"a.mlp.up_proj.weight": (size + 3, 3), "a.norm.weight": (7,), "a.mlp.down_proj.weight": (5, 2 * size)}
    dims = read_dims(shapes)
    source = plan_trainers(shapes, dims, replicate=2, shard=size // 8, tensor=4)
    target = plan_rollout(shapes, dims, ranks=range(size), size=size, tensor=size // 4)
    made = plan_weights(source, target, 4096)
    check_delivery(made, source, target)
    check_buckets(made)


@pytest.mark.parametrize(("replicate", "replicas"), [(2, 1), (3, 1), (4, 3), (8, 5)])
def test_trainers_with_equal_weights_share_the_sending(replicate: int, replicas: int) -> None:
    shapes = build_shapes(width=64, inner=96, kv=16, vocab=300, layers=6)
    size = replicate + replicas
    source = plan_trainers(shapes, {}, replicate=replicate, size=size)
    target = plan_rollout(shapes, {}, ranks=range(replicate, size), size=size)
    fine = plan_weights(source, target, 1 << 16, piece_bytes=64).sent[:replicate]
    assert fine.max() <= 1.02 * fine.mean()
    whole = plan_weights(source, target, 1 << 16).sent[:replicate]
    assert whole.max() <= whole.mean() + 2 * sum(math.prod(shape) for shape in set(shapes.values()))
    assert whole.max() <= 1.4 * whole.mean(), "whole tensors go round"


def test_a_box_comes_from_the_own_node_where_that_has_it() -> None:
    shapes = {"a.weight": (64, 8)}
    nodes = [0, 1, 0, 0, 1, 1, 2]
    source = plan_trainers(shapes, {}, replicate=2, size=7)
    target = plan_rollout(shapes, {}, ranks=[2, 3, 4, 5, 6], size=7)
    made = plan_weights(source, target, 1 << 20, nodes=nodes, piece_bytes=16)
    pairs = {
        pair
        for _, part in made.iter_parts()
        for pair in zip(part.copies.source.tolist(), part.copies.target.tolist(), strict=True)
    }
    assert pairs == {(0, 2), (0, 3), (1, 4), (1, 5), (0, 6), (1, 6)}, "the node without a trainer gets half from each"


def test_replicas_of_shards_gather_within_their_own_copy() -> None:
    shapes = {"a.weight": (64, 8), "b.weight": (32,)}
    source = plan_trainers(shapes, {}, replicate=2, shard=4)
    made = plan_weights(source, plan_rollout(shapes, {}, ranks=range(8), size=8), 1 << 20)
    assert made.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_fewer_kv_heads_than_ranks_lie_on_several_of_them() -> None:
    layout = plan_rollout(SMALL, read_dims(SMALL), ranks=range(4), size=4, tensor=4, num_kv_heads=2)
    keys = layout.tensors["model.layers.1.self_attn.k_proj.weight"].placement
    assert [keys.box(rank).offsets for rank in range(4)] == [(0, 0), (0, 0), (2, 0), (2, 0)]
    assert keys.box(3).shape == (2, 8)
    assert layout.tensors["model.layers.1.self_attn.q_proj.weight"].placement.box(3).offsets == (6, 0)


def test_a_layout_is_what_another_rank_reads_of_it_and_keeps_its_boxes_among_others() -> None:
    one = plan_rollout(SMALL, read_dims(SMALL), ranks=range(2), size=2, tensor=2)
    read = read_layout(one.write())
    two = read.repeat(2).among(3, 8)
    assert two.size == 8 and two.tensors.keys() == one.tensors.keys()
    for name, held in one.tensors.items():
        assert read.tensors[name].dtype == two.tensors[name].dtype == torch.bfloat16
        boxes = [held.placement.box(rank) for rank in range(2)]
        assert [read.tensors[name].placement.box(rank) for rank in range(2)] == boxes
        assert [two.tensors[name].placement.box(rank) for rank in range(3, 7)] == [*boxes, *boxes]
    nothing = two.compute_bytes()
    assert nothing[[0, 1, 2, 7]].tolist() == [0] * 4 and nothing[3] == one.compute_bytes()[0] > 0


def test_plans_are_told_apart_by_their_digest() -> None:
    source, target = plan_trainers(SMALL, {}, shard=2), plan_rollout(SMALL, {}, ranks=[0, 1], size=2)
    digests = [
        plan_weights(source, target, 4096).digest,
        plan_weights(source, target, 2048).digest,
        plan_weights(source, plan_rollout(SMALL, {}, ranks=[1], size=2), 4096).digest,
        plan_weights(plan_trainers(SMALL, {}, replicate=2), target, 4096).digest,
    ]
    assert len(set(digests)) == 4 and plan_weights(source, target, 4096).digest == digests[0]


def hold(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> WeightLayout:
    offsets, lengths = (np.array(part) for part in zip(*boxes, strict=True))
    placement = Placement(shape, offsets, lengths)
    return WeightLayout(len(boxes), {"a": Held(placement, torch.bfloat16)})


def test_what_no_plan_can_lead_to_is_refused_by_name() -> None:
    target = build_layout({"a": (8, 4)}, {}, torch.bfloat16, 2)
    with pytest.raises(LayoutError, match=r"holds 16 of the 32 values of tensor 'a'"):
        plan_weights(hold((8, 4), [((0, 0), (4, 4)), ((0, 0), (4, 4))]), target, 4096)
    with pytest.raises(LayoutError, match=r"overlap in tensor 'a' at \[0, 0\]"):
        plan_weights(hold((8, 4), [((0, 0), (4, 4)), ((2, 0), (4, 4))]), target, 4096)
    with pytest.raises(LayoutError, match=r"tensor 'b' is on one side alone"):
        plan_weights(build_layout({"a": (8, 4), "b": (1,)}, {}, torch.bfloat16, 2), target, 4096)
    with pytest.raises(LayoutError, match=r"tensor 'a' is \[4, 8\] at the source and \[8, 4\] at the target"):
        plan_weights(build_layout({"a": (4, 8)}, {}, torch.bfloat16, 2), target, 4096)
    with pytest.raises(LayoutError, match=r"the source counts 3 ranks and the target 2"):
        plan_weights(build_layout({"a": (8, 4)}, {}, torch.bfloat16, 3), target, 4096)
    with pytest.raises(LayoutError, match=r"in its smallest pieces, and a bucket has 8; set bucket_bytes to"):
        plan_weights(plan_trainers({"a": (8, 4)}, {}, shard=2), target, 8)
    with pytest.raises(LayoutError, match=r"3 rollout ranks are no multiple of a tensor-parallel degree of 2"):
        plan_rollout(SMALL, {}, ranks=[0, 1, 2], size=4, tensor=2)
    with pytest.raises(LayoutError, match=r"without dimensions"):
        compute_placement((), [Cut(0, 1, (0,))], 1)
