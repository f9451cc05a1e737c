"""The layout of ranks and the boxes of weights: pure plans, held to the invariants that they state."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import ConfigError
from hybridflow.train_engine import Layout, ParallelConfig, Ranks, build_mesh, check_heads, compute_box, plan_layout
from hybridflow.train_engine.mesh import Axis
from hybridflow.train_engine.sharding import Split, compute_cuts, owns_box

degrees = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    data, sequence, tensor = draw(degrees), draw(degrees), draw(degrees)
    divisors = [degree for degree in range(1, data * sequence + 1) if data * sequence % degree == 0]
    return Layout(data=data, sequence=sequence, tensor=tensor, shard=draw(st.sampled_from(divisors)))


def test_a_layout_of_eight_ranks_written_out() -> None:
    layout = Layout(data=2, sequence=2, tensor=2, shard=2)
    assert (layout.size, layout.replicate) == (8, 2)
    places = [layout.coordinates(rank) for rank in range(8)]
    assert [(at.data, at.sequence, at.tensor) for at in places] == list(itertools.product(range(2), repeat=3))
    assert [(at.replicate, at.shard, at.tensor) for at in places] == list(itertools.product(range(2), repeat=3))
    assert layout.partition("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.partition("sequence") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.partition("data") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.partition("tokens") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert Layout(data=2, sequence=2, tensor=2, shard=4).partition("shard") == layout.partition("tokens")


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_groups_hold_each_rank_once_and_differ_along_their_axis_alone(layout: Layout) -> None:
    views: list[tuple[Axis, ...]] = [("data", "sequence", "tensor"), ("replicate", "shard", "tensor")]
    for axis in get_args(Axis):
        groups = layout.partition(axis)
        assert sorted(itertools.chain(*groups)) == list(range(layout.size))
        assert {len(group) for group in groups} == {layout.degree(axis)}
        for view in (view for view in views if axis in view):
            for group in groups:
                places = [vars(layout.coordinates(rank)) for rank in group]
                assert [place[axis] for place in places] == list(range(len(group)))
                assert len({tuple(place[other] for other in view if other != axis) for place in places}) == 1
    for rank in range(layout.size):
        at = layout.coordinates(rank)
        assert (at.data * layout.sequence + at.sequence) == (at.replicate * layout.shard + at.shard)


def test_the_layout_follows_from_the_degrees_and_the_trainers() -> None:
    assert plan_layout(ParallelConfig(), 1) == Layout()
    assert plan_layout(ParallelConfig(tp=2, sp=2, shard=0), 8) == Layout(data=2, sequence=2, tensor=2, shard=4)
    assert plan_layout(ParallelConfig(dp=3, shard=3), 3) == Layout(data=3, shard=3)
    assert plan_layout(ParallelConfig(tensor_parallel_size=2, sequence_parallel_size=2), 4) == Layout(
        sequence=2, tensor=2
    )
    assert plan_layout(ParallelConfig(data_parallel_size=4, shard_size=2), 4) == Layout(data=4, shard=2)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (ParallelConfig(tp=2, sp=2), 6, "tp=2 and sp=2 need a multiple of 4 trainers, but there are 6"),
        (ParallelConfig(dp=2), 4, "parallel_config.dp: 2 does not fit 4 trainers .* set it to 4"),
        (ParallelConfig(shard=3), 4, "parallel_config.shard: 3 does not divide the 4 trainers"),
        (ParallelConfig(tp=2, shard=2), 2, "parallel_config.shard: 2 does not divide the 1 trainer of dp"),
    ],
)
def test_degrees_that_do_not_fit_are_named(config: ParallelConfig, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_layout(config, size)


@pytest.mark.parametrize(
    ("config", "asked", "needed"),
    [
        (ParallelConfig(shard=2), "shard=2", 2),
        (ParallelConfig(tp=3), "tp=3", 3),
        (ParallelConfig(dp=4), "dp=4", 4),
        (ParallelConfig(tp=2, sp=2, shard=4), "tp=2 and sp=2 and shard=4", 8),
        (ParallelConfig(sp=2, shard=0), "sp=2", 2),
    ],
)
def test_one_trainer_is_told_how_to_become_more(config: ParallelConfig, asked: str, needed: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_layout(config, 1)
    assert str(caught.value) == (
        f"train.parallel_config: {asked} takes {needed} trainers or a multiple, but there is 1 trainer; more need runtime.kind=ray with "
        f'runtime.placement.device_map={{actor: "gpu:0-{needed - 1}"}} (or cpu:0-{needed - 1})'
    )
    assert plan_layout(config, needed).size == needed


def test_heads_that_cannot_be_split_are_named() -> None:
    check_heads(Layout(tensor=2, sequence=4), num_heads=8, num_kv_heads=2)
    check_heads(Layout(sequence=2), num_heads=6, num_kv_heads=6)
    with pytest.raises(ConfigError, match=r"parallel_config.tp: 3 does not divide the model's 8 attention heads"):
        check_heads(Layout(tensor=3), 8, 2)
    with pytest.raises(ConfigError, match=r"parallel_config.tp: 4 does not divide the model's 2 key-value heads"):
        check_heads(Layout(tensor=4), 8, 2)
    with pytest.raises(ConfigError, match=r"parallel_config.sp: 8 does not divide the 4 attention heads of a rank"):
        check_heads(Layout(tensor=2, sequence=8), 8, 2)


@settings(deadline=None, max_examples=60)
@given(degrees, st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_the_degrees_that_are_named_are_those_that_work(kv_heads: int, tensor: int, sequence: int, groups: int) -> None:
    layout, heads = Layout(tensor=tensor, sequence=sequence), kv_heads * groups
    try:
        check_heads(layout, heads, kv_heads)
    except ConfigError as error:
        axis = "tensor" if ".tp: " in str(error) else "sequence"
        named = [int(word) for word in str(error).rpartition("set it to ")[2].replace(" or ", ", ").split(", ")]
        others = {"tensor": tensor if axis == "sequence" else 1}
        assert named == [
            degree for degree in range(1, 40) if _fits(Layout(**(others | {axis: degree})), heads, kv_heads)
        ]


def _fits(layout: Layout, heads: int, kv_heads: int) -> bool:
    try:
        check_heads(layout, heads, kv_heads)
    except ConfigError:
        return False
    return True


def test_the_sentence_about_heads_in_full() -> None:
    with pytest.raises(ConfigError) as caught:
        check_heads(Layout(tensor=3), 8, 4)
    assert str(caught.value) == (
        "train.parallel_config.tp: 3 does not divide the model's 8 attention heads; with 8 attention heads and 4 key-value heads, "
        "set it to 1, 2 or 4"
    )


def test_alone_every_axis_is_the_identity_and_makes_no_group() -> None:
    mesh = build_mesh(Ranks(), Layout(), torch.device("cpu"))
    for ranks in (mesh.world, mesh.tokens, mesh.data, mesh.sequence, mesh.tensor, mesh.replicate, mesh.shard):
        assert (ranks.rank, ranks.size, ranks.group, ranks.total(3.5)) == (0, 1, None, 3.5)
    with pytest.raises(ValueError, match="a degree of 1 has none"):
        mesh.device_mesh("shard")
    with pytest.raises(ValueError, match="of 2 ranks, but there are 1"):
        build_mesh(Ranks(), Layout(data=2), torch.device("cpu"))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 17), st.integers(1, 6))
def test_a_cut_is_that_of_torch_chunk(length: int, degree: int) -> None:
    chunks = list(torch.arange(length).chunk(degree)) if length else []
    chunks += [torch.arange(0)] * (degree - len(chunks))
    boxes = [compute_box((3, length), [(1, degree, index)]) for index in range(degree)]
    assert [box.shape for box in boxes] == [(3, chunk.numel()) for chunk in chunks]
    assert [box.offsets[1] for box, chunk in zip(boxes, chunks, strict=True) if chunk.numel()] == [
        int(chunk[0]) for chunk in chunks if chunk.numel()
    ]
    assert all(box.offsets[1] == length for box in boxes if not box.shape[1])


@settings(deadline=None, max_examples=100)
@given(
    layouts(),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([(), (("tensor", 0),), (("tensor", 1), ("shard", 0)), (("tensor", 0), ("shard", 0)), (("shard", 0),)]),
)  # fmt: skip
def test_over_all_ranks_every_value_is_written_once(
    layout: Layout, shape: tuple[int, int], ways: tuple[tuple[str, int], ...]
) -> None:
    splits = [Split(dim, axis) for axis, dim in ways]  # type: ignore[arg-type]
    written = np.zeros(shape, dtype=int)
    for rank in range(layout.size):
        box = compute_box(shape, compute_cuts(splits, layout, rank))
        if owns_box(splits, layout, rank):
            written[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))] += 1
    assert (written == 1).all()
