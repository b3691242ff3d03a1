from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from tests.support.directory_fakes import blocks

from tandem.directory.prefix_map import Delta, coalesce
from tandem.directory.publisher import PrefixPublisher
from tandem.errors import Fenced, OutOfSequence, Unavailable
from tandem.ids import BlockHash, Epoch, WorkerId
from tandem.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

ME = WorkerId("decode-0")


class ScriptedIndex:
    """Records what it takes; before that, does what the test scripted for each call."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Delta]] = []
        self.tried: list[int] = []
        self.fates: list[Exception | asyncio.Event] = []
        self.called = asyncio.Event()

    async def publish(
        self, worker_id: WorkerId, epoch: Epoch, sequence: int, events: Sequence[KvEvent]
    ) -> None:
        assert (worker_id, epoch) == (ME, 3)
        self.tried.append(sequence)
        self.called.set()
        fate = self.fates.pop(0) if self.fates else None
        if isinstance(fate, asyncio.Event):
            await fate.wait()
        elif fate is not None:
            raise fate
        self.taken.append((sequence, coalesce(events)))

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        return {}


@asynccontextmanager
async def publishing(
    index: ScriptedIndex,
    snapshot: Callable[[], tuple[BlockHash, ...]] = tuple,
    *,
    max_backlog: int = 100,
    batch_hashes: int = 100,
    check_s: float = 60.0,
) -> AsyncIterator[PrefixPublisher]:
    publisher = PrefixPublisher(
        index,
        ME,
        Epoch(3),
        snapshot,
        max_backlog=max_backlog,
        batch_hashes=batch_hashes,
        max_delay_s=0.01,
        check_s=check_s,
    )
    await publisher.start()
    try:
        yield publisher
    finally:
        await publisher.aclose()


async def test_waiting_events_go_out_as_one_batch_with_their_outcome() -> None:
    index = ScriptedIndex()
    async with publishing(index) as publisher:
        publisher.offer([BlocksStored(blocks(1, 2))])
        publisher.offer([BlocksRemoved(blocks(1)), BlocksStored(blocks(3))])
        await publisher.wait_idle(5.0)
    assert index.taken == [(1, Delta(cleared=False, stored=blocks(2, 3), removed=blocks(1)))]


async def test_offer_returns_while_the_index_hangs_and_order_is_kept() -> None:
    index = ScriptedIndex()
    hang = asyncio.Event()
    index.fates = [hang]
    async with publishing(index) as publisher:
        publisher.offer([BlocksStored(blocks(1))])
        await index.called.wait()
        publisher.offer([BlocksRemoved(blocks(1))])
        publisher.offer([CacheCleared(), BlocksStored(blocks(2))])
        assert index.taken == []
        hang.set()
        await publisher.wait_idle(5.0)
    assert index.taken == [
        (1, Delta(cleared=False, stored=blocks(1), removed=())),
        (2, Delta(cleared=True, stored=blocks(2), removed=())),
    ]


async def test_a_batch_without_an_answer_is_sent_again_under_its_number() -> None:
    index = ScriptedIndex()
    index.fates = [Unavailable("no answer"), Unavailable("no answer")]
    async with publishing(index) as publisher:
        publisher.offer([BlocksStored(blocks(1))])
        await publisher.wait_idle(5.0)
    assert index.tried == [1, 1, 1]
    assert [sequence for sequence, _ in index.taken] == [1]


async def test_out_of_sequence_brings_a_clear_and_the_snapshot_in_batches() -> None:
    index = ScriptedIndex()
    index.fates = [OutOfSequence("start over")]
    async with publishing(index, lambda: blocks(1, 2, 3), batch_hashes=2) as publisher:
        publisher.offer([BlocksStored(blocks(9))])
        await publisher.wait_idle(5.0)
    assert index.taken == [
        (2, Delta(cleared=True, stored=blocks(1, 2), removed=())),
        (3, Delta(cleared=False, stored=blocks(3), removed=())),
    ]


async def test_p40_the_backlog_is_kept_at_n_and_replaced_by_a_snapshot_at_n_plus_1() -> None:
    for num_waiting, starts_over in ((2, False), (3, False), (4, True)):
        index = ScriptedIndex()
        hang = asyncio.Event()
        index.fates = [hang]
        async with publishing(index, lambda: blocks(7), max_backlog=3) as publisher:
            publisher.offer([BlocksStored(blocks(100))])
            await index.called.wait()
            for number in range(num_waiting):
                publisher.offer([BlocksStored(blocks(number))])
            assert publisher.num_waiting == (0 if starts_over else num_waiting)
            hang.set()
            await publisher.wait_idle(5.0)
        expected = blocks(7) if starts_over else blocks(*range(num_waiting))
        assert index.taken[-1] == (2, Delta(cleared=starts_over, stored=expected, removed=()))


async def test_a_fenced_life_says_nothing_more() -> None:
    index = ScriptedIndex()
    index.fates = [Fenced("a newer life is there")]
    async with publishing(index) as publisher:
        publisher.offer([BlocksStored(blocks(1))])
        await publisher.wait_idle(5.0)
        publisher.offer([BlocksStored(blocks(2))])
        assert publisher.idle
    assert index.tried == [1]
    assert index.taken == []


async def test_silence_is_checked_so_that_an_emptied_index_is_filled_again() -> None:
    index = ScriptedIndex()
    async with publishing(index, lambda: blocks(1), check_s=0.01) as publisher:
        publisher.offer([BlocksStored(blocks(1))])
        await publisher.wait_idle(5.0)
        index.taken.clear()
        index.fates = [OutOfSequence("who are you?")]
        async with asyncio.timeout(5.0):
            while not any(delta.cleared for _, delta in index.taken):
                index.called.clear()
                await index.called.wait()
    assert next(delta for _, delta in index.taken if delta.cleared).stored == blocks(1)


async def test_a_bug_in_the_index_does_not_end_publishing() -> None:
    index = ScriptedIndex()
    index.fates = [ZeroDivisionError()]
    async with publishing(index, lambda: blocks(5)) as publisher:
        publisher.offer([BlocksStored(blocks(1))])
        await publisher.wait_idle(5.0)
    assert index.taken == [(2, Delta(cleared=True, stored=blocks(5), removed=()))]


async def test_closing_does_not_wait_for_a_hanging_index() -> None:
    index = ScriptedIndex()
    index.fates = [asyncio.Event()]
    publisher = PrefixPublisher(index, ME, Epoch(3), tuple)
    await publisher.start()
    publisher.offer([BlocksStored(blocks(1))])
    await index.called.wait()
    async with asyncio.timeout(1.0):
        await publisher.aclose()
        await publisher.aclose()
