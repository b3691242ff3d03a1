"""What every directory must do, in memory and over a real Redis."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from tests.support.directory_fakes import FINGERPRINT, ManualClock, RealClock, block, blocks, make_record

from tandem.directory.embedded import EmbeddedRedis
from tandem.directory.memory import MemoryDirectory
from tandem.directory.publisher import PrefixPublisher
from tandem.directory.redis_directory import RedisDirectory
from tandem.errors import Fenced, OutOfSequence, Unavailable
from tandem.ids import BlockHash, Epoch, WorkerId
from tandem.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
TTL_S = 30.0
SHORT_TTL_S = 0.3


@dataclass
class Subject:
    directory: MemoryDirectory | RedisDirectory
    clock: ManualClock | RealClock

    async def announce(self, name: str, epoch: int = 1, ttl_s: float = TTL_S, num_blocks: int = 1000) -> None:
        record = make_record(name, epoch=epoch, num_blocks=num_blocks)
        await self.directory.membership.announce(record, ttl_s)
        await self.see(lambda: record in self.directory.membership.workers())

    async def publish(self, name: str, sequence: int, *events: KvEvent, epoch: int = 1) -> None:
        await self.directory.index.publish(WorkerId(name), Epoch(epoch), sequence, events)

    def match(self, *numbers: int) -> dict[WorkerId, int]:
        return self.directory.index.match(blocks(*numbers))

    async def see(self, predicate: Callable[[], bool]) -> None:
        await self.directory.wait_until(predicate, 5.0)

    async def see_after_lease(self, predicate: Callable[[], bool]) -> None:
        if isinstance(self.clock, ManualClock):
            self.clock.now_s += SHORT_TTL_S
        await self.see(predicate)

    async def stored_keys(self) -> set[str]:
        """What in Redis belongs to published blocks."""
        if isinstance(self.directory, MemoryDirectory):
            return set()
        keys = await self.directory._store.command("KEYS", "*")
        return {key.decode(errors="replace") for key in keys if key[:4] in (b"blk:", b"own:", b"pub:")} | {
            member.decode() for member in await self.directory._store.command("SMEMBERS", "owners")
        }


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "memory":
        clock = ManualClock()
        async with MemoryDirectory(clock) as memory:
            yield Subject(memory, clock)
        return
    url = request.getfixturevalue("redis").url
    async with RedisDirectory(url, FINGERPRINT, real := RealClock(), block_s=0.1) as directory:
        await directory._store.command("FLUSHALL")
        await directory.start()
        await directory.wait_until(lambda: directory.in_contact, 5.0)
        yield Subject(directory, real)


async def test_an_announced_worker_is_seen_as_it_described_itself(subject: Subject) -> None:
    await subject.announce("b")
    await subject.announce("a")
    assert subject.directory.membership.workers() == (make_record("a"), make_record("b"))


async def test_renewing_replaces_the_record(subject: Subject) -> None:
    await subject.announce("a")
    busy = make_record("a", free_blocks=3, running=7)
    await subject.directory.membership.announce(busy, TTL_S)
    await subject.see(lambda: subject.directory.membership.workers() == (busy,))


async def test_an_older_epoch_is_refused_before_and_after_the_lease_ends(subject: Subject) -> None:
    await subject.announce("a", epoch=2**62 + 1, ttl_s=SHORT_TTL_S)
    with pytest.raises(Fenced, match="older life"):
        await subject.announce("a", epoch=2**62)
    await subject.see_after_lease(lambda: subject.directory.membership.workers() == ())
    with pytest.raises(Fenced):
        await subject.announce("a", epoch=2**62)
    await subject.announce("a", epoch=2**62 + 2)


async def test_leaving_removes_the_worker_and_what_it_published(subject: Subject) -> None:
    await subject.announce("a", epoch=5)
    await subject.publish("a", 1, BlocksStored(blocks(*range(1, 600))), epoch=5)
    await subject.see(lambda: subject.match(1) == {A: 1})
    await subject.directory.membership.leave(A, Epoch(4))
    assert len(subject.directory.membership.workers()) == 1
    await subject.directory.membership.leave(A, Epoch(5))
    await subject.see(lambda: subject.directory.index.num_blocks == 0)
    assert subject.directory.membership.workers() == ()
    assert subject.match(1) == {}
    assert await subject.stored_keys() == set()
    await subject.directory.membership.leave(A, Epoch(5))


async def test_match_counts_leading_blocks_for_each_worker(subject: Subject) -> None:
    for name in "abc":
        await subject.announce(name)
    await subject.publish("a", 1, BlocksStored(blocks(1, 2, 3)))
    await subject.publish("b", 1, BlocksStored(blocks(1, 3)))
    await subject.publish("c", 1, BlocksStored(blocks(2, 3)))
    await subject.see(lambda: subject.match(1, 2, 3, 4) == {A: 3, B: 1})
    await subject.see(lambda: subject.match(2, 3) == {A: 2, C: 2})
    assert subject.match() == {}
    assert subject.match(9) == {}


async def test_removed_blocks_are_no_longer_matched(subject: Subject) -> None:
    await subject.announce("a")
    await subject.publish("a", 1, BlocksStored(blocks(1, 2, 3)))
    await subject.publish("a", 2, BlocksRemoved(blocks(2)), BlocksStored(blocks(4)), BlocksRemoved(blocks(4)))
    await subject.see(lambda: subject.match(1, 2, 3) == {A: 1})
    assert subject.match(4) == {}


async def test_p19_clear_all_clears_all(subject: Subject) -> None:
    await subject.announce("a")
    await subject.announce("b")
    await subject.publish("a", 1, BlocksStored(blocks(1, 2)))
    await subject.publish("b", 1, BlocksStored(blocks(1)))
    await subject.publish("a", 2, BlocksStored(blocks(3)), CacheCleared(), BlocksStored(blocks(7)))
    await subject.see(lambda: subject.match(7) == {A: 1})
    assert subject.match(1, 2) == {B: 1}
    assert subject.match(3) == {}
    await subject.publish("a", 3, CacheCleared())
    await subject.publish("b", 2, CacheCleared())
    await subject.see(lambda: subject.directory.index.num_blocks == 0)
    assert not {key for key in await subject.stored_keys() if key.startswith(("blk:", "own:"))}


async def test_p18_a_dead_worker_is_not_matched_and_the_index_returns_to_base(subject: Subject) -> None:
    await subject.announce("b")
    await subject.publish("b", 1, BlocksStored(blocks(1)))
    base_keys = await subject.stored_keys()
    await subject.announce("a", ttl_s=SHORT_TTL_S)
    await subject.publish("a", 1, BlocksStored(blocks(*range(1, 700))))
    await subject.see(lambda: subject.match(1, 2) == {A: 2, B: 1})
    await subject.see_after_lease(lambda: subject.match(1, 2) == {B: 1})
    await subject.see(lambda: subject.directory.index.num_blocks == 1)
    assert [record.worker_id for record in subject.directory.membership.workers()] == [B]
    if isinstance(subject.directory, RedisDirectory):
        await subject.directory.reap()
    assert await subject.stored_keys() == base_keys


async def test_p18_a_new_epoch_clears_what_the_old_one_published(subject: Subject) -> None:
    await subject.announce("a", epoch=1)
    await subject.publish("a", 1, BlocksStored(blocks(1, 2)))
    await subject.see(lambda: subject.match(1, 2) == {A: 2})
    await subject.announce("a", epoch=2)
    assert subject.match(1, 2) == {}
    with pytest.raises(Fenced):
        await subject.publish("a", 2, BlocksStored(blocks(9)), epoch=1)
    await subject.publish("a", 1, BlocksStored(blocks(2)), epoch=2)
    await subject.see(lambda: subject.match(2) == {A: 1})
    await subject.see(lambda: subject.directory.index.num_blocks == 1)
    assert subject.match(1) == {}


async def test_publishing_without_a_lease_is_refused(subject: Subject) -> None:
    with pytest.raises(OutOfSequence, match="no lease"):
        await subject.publish("a", 1, BlocksStored(blocks(1)))
    assert await subject.stored_keys() == set()


async def test_a_batch_sent_twice_counts_once(subject: Subject) -> None:
    await subject.announce("a")
    await subject.publish("a", 1, BlocksStored(blocks(1)))
    await subject.publish("a", 2, BlocksRemoved(blocks(1)), BlocksStored(blocks(2)))
    await subject.publish("a", 1, BlocksStored(blocks(1)))
    await subject.see(lambda: subject.match(2) == {A: 1})
    assert subject.match(1) == {}


async def test_a_missing_batch_is_refused_until_a_clear(subject: Subject) -> None:
    await subject.announce("a")
    await subject.publish("a", 1, BlocksStored(blocks(1)))
    with pytest.raises(OutOfSequence, match="2 was expected"):
        await subject.publish("a", 3, BlocksStored(blocks(3)))
    await subject.publish("a", 3, CacheCleared(), BlocksStored(blocks(5)))
    await subject.publish("a", 4, BlocksStored(blocks(6)))
    await subject.see(lambda: subject.match(5, 6) == {A: 2})
    assert subject.match(1) == {}
    assert subject.match(3) == {}


async def test_a_worker_cannot_claim_more_blocks_than_it_has(subject: Subject) -> None:
    await subject.announce("a", num_blocks=4)
    await subject.publish("a", 1, BlocksStored(blocks(1, 2, 3, 4)))
    await subject.publish("a", 2, BlocksStored(blocks(5)))
    with pytest.raises(OutOfSequence, match="its 4 blocks"):
        await subject.publish("a", 3, BlocksStored(blocks(6)))
    await subject.publish("a", 4, CacheCleared(), BlocksStored(blocks(1)))
    await subject.see(lambda: subject.directory.index.num_blocks == 1)


class LossyIndex:
    """Drops batches, loses answers, and sends old batches again, as a network and a restart would."""

    def __init__(self, inner: MemoryDirectory | RedisDirectory, dice: random.Random) -> None:
        self._index = inner.index
        self._dice = dice
        self._old: list[tuple[WorkerId, Epoch, int, Sequence[KvEvent]]] = []
        self.calm = False

    async def publish(
        self, worker_id: WorkerId, epoch: Epoch, sequence: int, events: Sequence[KvEvent]
    ) -> None:
        self._old.append((worker_id, epoch, sequence, events))
        fate = 1.0 if self.calm else self._dice.random()
        if fate < 0.15:
            return  # dropped, and the sender believes that it arrived
        if fate < 0.3:
            raise Unavailable("lost before it arrived")
        if fate < 0.45:
            await self._index.publish(*self._dice.choice(self._old))  # late and out of order
        await self._index.publish(worker_id, epoch, sequence, events)
        if 0.45 <= fate < 0.6:
            raise Unavailable("the answer was lost")

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        return self._index.match(hashes)


@pytest.mark.parametrize("seed", range(4))
async def test_p19_the_index_converges_whatever_happens_to_events(subject: Subject, seed: int) -> None:
    dice = random.Random(seed)
    lossy = LossyIndex(subject.directory, dice)
    truth: dict[WorkerId, set[BlockHash]] = {A: set(), B: set()}
    publishers = {}
    for worker_id, held in truth.items():
        await subject.announce(worker_id)
        publishers[worker_id] = PrefixPublisher(
            lossy, worker_id, Epoch(1), lambda held=held: held, batch_hashes=5, max_delay_s=0.01, check_s=0.02
        )
        await publishers[worker_id].start()
    try:
        for step in range(60):
            worker_id = dice.choice([A, B])
            numbers = {block(dice.randrange(40)) for _ in range(dice.randrange(8))}
            match dice.randrange(10):
                case 0:
                    truth[worker_id].clear()
                    publishers[worker_id].offer([CacheCleared()])
                case 1 | 2 | 3 | 4:
                    truth[worker_id] -= numbers
                    publishers[worker_id].offer([BlocksRemoved(tuple(numbers))])
                case _:
                    truth[worker_id] |= numbers
                    publishers[worker_id].offer([BlocksStored(tuple(numbers))])
            if step % 7 == 0:
                await publishers[worker_id].wait_idle(10.0)
        lossy.calm = True

        def converged() -> bool:
            return all(
                subject.match(number) == {name: 1 for name, held in truth.items() if block(number) in held}
                for number in range(40)
            )

        await subject.see(converged)
    finally:
        for publisher in publishers.values():
            await publisher.aclose()
