import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rollout.native.blocks import BlockAllocator


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 7)), max_size=60),
)
def test_blocks_are_never_handed_out_twice_and_none_gets_lost(num_blocks, actions):
    allocator = BlockAllocator(num_blocks)
    holders: list[np.ndarray] = []
    for action, number in actions:
        if action == "allocate" and number <= allocator.num_free:
            blocks = allocator.allocate(number)
            held = {int(block) for holder in holders for block in holder}
            assert len(blocks) == number == len(set(blocks.tolist())) and not held & set(blocks.tolist())
            holders.append(blocks)
        elif action == "share" and holders:
            holders.append(holders[number % len(holders)].copy())
            allocator.share(holders[-1])
        elif action == "release" and holders:
            allocator.release(holders.pop(number % len(holders)))
        held = {int(block) for holder in holders for block in holder}
        assert allocator.num_free == num_blocks - len(held)


def test_several_holders_may_let_go_of_a_block_at_once():
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    allocator.share(np.concatenate([blocks, blocks]))
    allocator.release(np.concatenate([blocks, blocks]))
    assert allocator.num_free == 1
    allocator.release(blocks)
    assert allocator.num_free == 3


def test_what_is_not_there_is_refused():
    allocator = BlockAllocator(2)
    with pytest.raises(RuntimeError, match="3 KV blocks were asked for and 2 are free"):
        allocator.allocate(3)
    with pytest.raises(RuntimeError, match="released more often"):
        allocator.release(np.array([1]))
