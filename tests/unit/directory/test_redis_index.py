"""The Redis index's own rules: generations, the purge's fence, a snapshot taken while others write."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from tests.support.directory_fakes import FINGERPRINT, RealClock, block, blocks, make_record

from tandem.directory.embedded import EmbeddedRedis
from tandem.directory.redis_directory import RedisDirectory
from tandem.directory.redis_index import RedisPrefixIndex, list_owners, purge
from tandem.directory.watch import Watch
from tandem.errors import InternalError
from tandem.ids import BlockHash, Epoch, WorkerId
from tandem.kv.events import BlocksRemoved, BlocksStored, CacheCleared

A = WorkerId("a")


@pytest.fixture
async def directory() -> AsyncIterator[RedisDirectory]:
    with EmbeddedRedis() as server:
        async with RedisDirectory(server.url, FINGERPRINT, RealClock(), block_s=0.1) as directory:
            await directory.membership.announce(make_record("a"), 60.0)
            yield directory


def entry(
    generation: int, *, stored: tuple[BlockHash, ...] = (), removed: tuple[BlockHash, ...] = ()
) -> dict[bytes, bytes]:
    return {
        b"id": b"a",
        b"epoch": b"1",
        b"gen": b"%d" % generation,
        b"stored": b"".join(stored),
        b"removed": b"".join(removed),
    }


def mirror() -> RedisPrefixIndex:
    return RedisPrefixIndex(None, FINGERPRINT, lambda _: Epoch(1), Watch())  # type: ignore[arg-type]


def test_p19_what_an_older_generation_says_late_is_ignored() -> None:
    index = mirror()
    index.apply(entry(5, stored=blocks(1)))
    index.apply(entry(4, stored=blocks(2)))
    index.apply({**entry(4), b"gone": b"1"})
    assert index.held(A) == {block(1)}
    index.apply(entry(6, stored=blocks(3)))
    assert index.held(A) == {block(3)}
    index.apply({**entry(6), b"gone": b"1"})
    assert index.num_blocks == 0
    assert index.match(blocks(3)) == {}


def test_p19_an_entry_seen_twice_ends_the_same() -> None:
    index = mirror()
    for _ in range(2):
        index.apply(entry(1, stored=blocks(1, 2)))
        index.apply(entry(1, removed=blocks(2), stored=blocks(3)))
    assert index.held(A) == {block(1), block(3)}


async def test_a_purge_leaves_the_living_alone(directory: RedisDirectory) -> None:
    await directory.index.publish(A, Epoch(1), 1, [BlocksStored(blocks(1, 2))])
    owners = await list_owners(directory._store)
    assert [owner.worker_id for owner in owners] == [A]
    await purge(directory._store, owners[0])
    await directory.reap()  # its mirror doesn't run: it knows of nobody, and still may not purge
    await directory.index.rebuild(after_outage=False)
    assert directory.index.held(A) == {block(1), block(2)}


async def test_p18_a_clear_leaves_nothing_of_the_old_generation_and_all_of_the_new(
    directory: RedisDirectory,
) -> None:
    await directory.index.publish(A, Epoch(1), 1, [BlocksStored(blocks(*range(2000)))])
    await directory.index.publish(A, Epoch(1), 2, [CacheCleared(), BlocksStored(blocks(5, 3000))])
    keys = await directory._store.command("KEYS", "blk:*")
    assert len(keys) == 2
    assert len(await list_owners(directory._store)) == 1


async def test_p19_a_snapshot_taken_while_a_worker_publishes_becomes_the_truth(
    directory: RedisDirectory,
) -> None:
    dice = random.Random(1)
    truth: set[BlockHash] = set()

    async def publish_much() -> None:
        for sequence in range(1, 150):
            numbers = blocks(*(dice.randrange(900) for _ in range(60)))
            if dice.random() < 0.05:
                truth.clear()
                events = [CacheCleared(), BlocksStored(numbers)]
                truth.update(numbers)
            elif dice.random() < 0.5:
                events = [BlocksRemoved(numbers)]
                truth.difference_update(numbers)
            else:
                events = [BlocksStored(numbers)]
                truth.update(numbers)
            await directory.index.publish(A, Epoch(1), sequence, events)

    writing = asyncio.create_task(publish_much())
    await directory.start()
    await writing
    await directory.wait_until(lambda: directory.index.held(A) == truth, 5.0)


async def test_a_hash_of_another_length_is_a_bug_that_is_said(directory: RedisDirectory) -> None:
    with pytest.raises(InternalError, match="3 bytes and 16"):
        await directory.index.publish(A, Epoch(1), 1, [BlocksStored((BlockHash(b"abc"),))])
