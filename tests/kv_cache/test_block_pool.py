"""The block pool against a naive model: a set of free numbers."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_cache.block_pool import BlockPool, OutOfBlocks

SIZE, SEGMENT = 25, 6


class PoolAgainstSet(RuleBasedStateMachine):
    """Every sequence of allocations and frees."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE, SEGMENT)
        self.free = set(range(SIZE))
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, SIZE + 2), prefer=st.none() | st.integers(-2, SIZE + 2))
    def allocate(self, count: int, prefer: int | None) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocks, match=f"{count} blocks asked for, {len(self.free)}"):
                self.pool.allocate(count, prefer)
            return
        blocks = self.pool.allocate(count, prefer)
        assert len(blocks) == len(set(blocks)) == count
        assert set(blocks) <= self.free
        if prefer in self.free and count:
            assert blocks[0] == prefer
        for before, after in pairwise(blocks):
            # A run is left only where it ends: at a block that is not free, or at the end of the pool.
            assert after == before + 1 or before + 1 not in self.free or before + 1 in blocks
        self.free -= set(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        keep = data.draw(st.integers(0, len(blocks)))
        self.pool.free(blocks[keep:])
        self.free |= set(blocks[keep:])
        self.held.append(blocks[:keep])

    @rule(block=st.integers(-3, SIZE + 3))
    def double_free_is_refused(self, block: int) -> None:
        if block in self.free or not 0 <= block < SIZE:
            before = self.pool.free_count
            mine = next((held for held in self.held if held), [])
            with pytest.raises(ValueError, match=f"block {block} is not handed out"):
                self.pool.free([*mine, block])
            assert self.pool.free_count == before, "a refused free must free nothing"

    @invariant()
    def same_as_the_set(self) -> None:
        assert self.pool.free_count == len(self.free)
        assert self.pool.used_count == SIZE - len(self.free)
        assert [self.pool.is_free(block) for block in range(SIZE)] == [block in self.free for block in range(SIZE)]
        assert not self.pool.is_free(-1)
        assert not self.pool.is_free(SIZE)


TestPoolAgainstSet = PoolAgainstSet.TestCase
TestPoolAgainstSet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_naming_a_block_twice_is_refused() -> None:
    pool = BlockPool(5)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="named twice"):
        pool.free([block, block])
    assert pool.used_count == 1


@given(windows=st.integers(1, 4), order=st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_windows_that_grow_in_any_order_are_each_one_run(windows: int, order) -> None:
    """As many windows as there are segments, growing frame by frame, never get into each other's way."""
    pool = BlockPool(windows * SEGMENT, SEGMENT)
    held = [pool.allocate(1) for _ in range(windows)]
    growth = [window for window in range(windows) for _ in range(SEGMENT - 1)]
    order.shuffle(growth)
    for window in growth:
        held[window] += pool.allocate(1, prefer=held[window][-1] + 1)
    for blocks in held:
        assert blocks == list(range(blocks[0], blocks[0] + SEGMENT))


def test_a_gap_that_fits_is_preferred_to_breaking_a_run() -> None:
    pool = BlockPool(11, segment=12)
    blocks = pool.allocate(11)
    pool.free(blocks[1:3] + blocks[5:9])  # gaps of 2 and of 4
    assert pool.allocate(2) == blocks[1:3]
    assert pool.allocate(3) == blocks[5:8]


@pytest.mark.parametrize(("blocks", "segment"), [(0, 1), (-1, 1), (5, 0)])
def test_impossible_pools_are_refused(blocks: int, segment: int) -> None:
    with pytest.raises(ValueError, match=r"at least one block"):
        BlockPool(blocks, segment)
