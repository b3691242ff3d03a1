from __future__ import annotations

from array import array
from random import Random

import pytest

from tandem.errors import ConfigError
from tandem.ids import BlockHash
from tandem.kv.events import BlocksRemoved, BlocksStored, CacheCleared
from tandem.kv.hashing import hash_blocks
from tandem.kv.pool import BlockPool
from tandem.kv.prefix_cache import CachedBlock

BLOCK = 4
ROOT = b"root"


def tokens_of(*values: int) -> array[int]:
    """One block of each value."""
    return array("I", [value for value in values for _ in range(BLOCK)])


def store(pool: BlockPool, tokens: array[int], blocks: list[int], root: bytes = ROOT) -> CachedBlock | None:
    return pool.cache.extend(root, None, tokens, array("i", blocks), 0, len(tokens) // BLOCK)


def matched(pool: BlockPool, tokens: array[int], root: bytes = ROOT) -> list[int | None]:
    return [node.block_id for node in pool.cache.match(root, tokens, len(tokens) // BLOCK)]


def taken(pool: BlockPool, num: int) -> list[int]:
    blocks = pool.take(num)
    assert blocks is not None
    return blocks


def test_take_is_all_or_nothing():
    pool = BlockPool(4, BLOCK)
    first = taken(pool, 3)
    assert len(set(first)) == 3
    assert pool.take(2) is None
    assert pool.num_free == 1
    pool.release(first)
    assert pool.num_free == 4


def test_a_failed_take_leaves_shared_blocks_idle():
    pool = BlockPool(3, BLOCK)
    blocks = taken(pool, 2)
    store(pool, tokens_of(1, 2), blocks)
    pool.release(blocks)
    assert pool.num_spare(blocks) == 1
    assert pool.take(2, blocks) is None
    assert pool.num_free == 3
    assert pool.take(1, blocks) is not None
    assert pool.num_free == 0


def test_releasing_more_than_was_taken_is_caught():
    pool = BlockPool(2, BLOCK)
    blocks = taken(pool, 1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release(blocks)


def test_shared_blocks_are_free_only_when_the_last_holder_lets_go():
    pool = BlockPool(2, BLOCK)
    blocks = taken(pool, 2)
    store(pool, tokens_of(1, 2), blocks)
    assert pool.take(0, blocks) == []
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 2


def test_idle_blocks_are_evicted_least_recently_used_and_deepest_first():
    pool = BlockPool(4, BLOCK)
    old, young = taken(pool, 2), taken(pool, 2)
    store(pool, tokens_of(1, 2), old)
    store(pool, tokens_of(3, 4), young)
    pool.release(old)
    pool.release(young)
    taken(pool, 1)
    assert matched(pool, tokens_of(1, 2)) == old[:1]
    assert matched(pool, tokens_of(3, 4)) == young
    taken(pool, 2)
    assert matched(pool, tokens_of(1, 2)) == []
    assert matched(pool, tokens_of(3, 4)) == young[:1]


def test_blank_blocks_are_used_before_cached_ones():
    pool = BlockPool(2, BLOCK)
    cached = taken(pool, 1)
    store(pool, tokens_of(1), cached)
    pool.release(cached)
    assert taken(pool, 1) != cached
    assert matched(pool, tokens_of(1)) == cached


def test_a_block_with_a_cached_twin_stays_private():
    pool = BlockPool(4, BLOCK)
    first, second = taken(pool, 1), taken(pool, 2)
    store(pool, tokens_of(1), first)
    store(pool, tokens_of(1, 2), second)
    assert matched(pool, tokens_of(1, 2)) == [first[0], second[1]]
    pool.release(second)
    assert second[0] not in pool.cache
    pool.release(first)
    assert pool.num_free == 4


def test_evicting_a_parent_takes_its_held_children_out_of_the_cache_but_not_from_their_holder():
    pool = BlockPool(3, BLOCK)
    first, second = taken(pool, 1), taken(pool, 2)
    store(pool, tokens_of(1), first)
    last = store(pool, tokens_of(1, 2), second)
    pool.release(first)
    reused = taken(pool, 1)
    assert reused == first
    assert matched(pool, tokens_of(1, 2)) == []
    assert pool.num_free == 0
    assert last is not None
    assert not last.attached

    # The holder goes on: all its blocks enter again, its own twin of the first one now.
    more = pool.cache.extend(ROOT, last, tokens_of(1, 2), array("i", second), 2, 2)
    assert more is not None
    assert matched(pool, tokens_of(1, 2)) == second
    pool.release(second)
    pool.release(reused)
    assert pool.num_free == 3


def test_p16_a_forced_hash_collision_never_returns_anothers_block():
    pool = BlockPool(8, BLOCK, hasher=lambda parent, tokens: BlockHash(b"\0" * 16))
    a, b = taken(pool, 3), taken(pool, 3)
    store(pool, tokens_of(1, 5, 6), a)
    store(pool, tokens_of(2, 5, 6), b)
    assert matched(pool, tokens_of(1, 5, 6)) == a
    assert matched(pool, tokens_of(2, 5, 6)) == b
    assert matched(pool, tokens_of(3, 5, 6)) == []
    assert matched(pool, tokens_of(1, 6, 5)) == a[:1]


def test_p17_another_root_never_shares():
    pool = BlockPool(2, BLOCK)
    store(pool, tokens_of(1), taken(pool, 1), root=b"tenant-a")
    assert matched(pool, tokens_of(1), root=b"tenant-b") == []
    assert len(matched(pool, tokens_of(1), root=b"tenant-a")) == 1


def test_the_published_hashes_are_those_of_the_cluster():
    pool = BlockPool(3, BLOCK)
    tokens = tokens_of(7, 8, 9)
    store(pool, tokens, taken(pool, 3))
    assert pool.cache.events.drain() == [BlocksStored(tuple(hash_blocks(ROOT, tokens, BLOCK)))]
    assert pool.cache.events.drain() == []


def test_events_are_the_net_effect_and_the_snapshot_is_the_truth():
    pool = BlockPool(2, BLOCK)
    blocks = taken(pool, 1)
    store(pool, tokens_of(1), blocks)
    pool.release(blocks)
    (one,) = hash_blocks(ROOT, tokens_of(1), BLOCK)
    assert pool.cache.events.drain() == [BlocksStored((one,))]

    both = taken(pool, 2)
    store(pool, tokens_of(2), both)
    (two,) = hash_blocks(ROOT, tokens_of(2), BLOCK)
    pool.release(both)
    taken(pool, 2)
    # What came and went between two drains is never told.
    assert pool.cache.events.drain() == [BlocksRemoved((one,))]
    assert pool.cache.events.snapshot() == [CacheCleared()]
    store(pool, tokens_of(2), both)
    assert pool.cache.events.snapshot() == [CacheCleared(), BlocksStored((two,))]
    assert pool.cache.events.drain() == []


def test_removed_and_stored_again_before_the_drain_is_no_news():
    pool = BlockPool(1, BLOCK)
    for _ in range(2):
        blocks = taken(pool, 1)
        store(pool, tokens_of(1), blocks)
        pool.release(blocks)
    assert len(pool.cache.events.drain()) == 1
    blocks = taken(pool, 1)
    store(pool, tokens_of(1), blocks)
    assert pool.cache.events.drain() == []


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int):
    with pytest.raises(ConfigError, match="at least 1"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("seed", range(20))
def test_p6_after_random_use_the_pool_is_back_at_its_base(seed: int):
    """Holders come, match, store, grow and go; what a match returns is always what was stored."""
    random = Random(seed)
    pool = BlockPool(12, BLOCK)
    written: dict[int, tuple[int, ...]] = {}
    holders: list[tuple[list[int], array[int], CachedBlock | None]] = []
    published: set[BlockHash] = set()
    for _ in range(600):
        if random.random() < 0.55:
            tokens = tokens_of(*(random.randrange(2) for _ in range(random.randrange(1, 5))))
            nodes = pool.cache.match(ROOT, tokens, random.randrange(len(tokens) // BLOCK + 1))
            shared = [node.block_id for node in nodes if node.block_id is not None]
            for position, block in enumerate(shared):
                assert written[block] == tuple(tokens[: (position + 1) * BLOCK])
            new = pool.take(len(tokens) // BLOCK - len(shared), shared)
            if new is None:
                continue
            blocks = [*shared, *new]
            for position, block in enumerate(blocks):
                written[block] = tuple(tokens[: (position + 1) * BLOCK])
            last = nodes[-1] if nodes else None
            if random.random() < 0.7:
                last = pool.cache.extend(
                    ROOT,
                    last,
                    tokens,
                    array("i", blocks),
                    len(shared),
                    random.randint(len(shared), len(blocks)),
                )
            holders.append((blocks, tokens, last))
        elif holders:
            blocks, _, _ = holders.pop(random.randrange(len(holders)))
            pool.release(blocks)
        held = {block for blocks, _, _ in holders for block in blocks}
        assert pool.num_free == 12 - len(held)
        for event in pool.cache.events.drain():
            if isinstance(event, BlocksRemoved):
                published -= set(event.hashes)
            elif isinstance(event, BlocksStored):
                published |= set(event.hashes)
        assert len(published) == len(pool.cache)
    for blocks, _, _ in holders:
        pool.release(blocks)
    assert pool.num_free == 12
    taken(pool, 12)
    assert len(pool.cache) == 0
    assert pool.cache.num_roots == 0
