"""A worker's way to the prefix index: events go in without waiting, batches go out in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from tandem.directory.base import PrefixIndex
from tandem.directory.watch import Watch
from tandem.errors import Fenced, OutOfSequence, TandemError
from tandem.ids import BlockHash, Epoch, WorkerId
from tandem.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

_LOG = logging.getLogger(__name__)


class PrefixPublisher:
    """Publishes one life of one worker. All calls from the event loop's thread.

    Waiting events are reduced to their outcome, one entry a hash. A batch whose answer was lost is
    sent again under its number, which is safe. When the index asks for it, or more than `max_backlog`
    hashes wait, what waits is thrown away and `snapshot()` is published after a clear. `snapshot`
    must return the blocks held now; events may be offered again after it saw them. With nothing to
    say, an empty batch every `check_s` finds out whether the index still knows what was published.
    """

    def __init__(
        self,
        index: PrefixIndex,
        worker_id: WorkerId,
        epoch: Epoch,
        snapshot: Callable[[], Iterable[BlockHash]],
        *,
        max_backlog: int = 65_536,
        batch_hashes: int = 1024,
        max_delay_s: float = 2.0,
        check_s: float = 5.0,
    ) -> None:
        self._index = index
        self._worker_id = worker_id
        self._epoch = epoch
        self._snapshot = snapshot
        self._max_backlog = max_backlog
        self._batch_hashes = batch_hashes
        self._max_delay_s = max_delay_s
        self._check_s = check_s
        self._pending: dict[BlockHash, bool] = {}
        self._clear = False
        self._resync = False
        self._in_flight: Sequence[KvEvent] | None = None
        self._sequence = 0
        self._wake = asyncio.Event()
        self._watch = Watch()
        self._task: asyncio.Task[None] | None = None
        self._fenced = False

    def offer(self, events: Iterable[KvEvent]) -> None:
        """Take events in order. Never waits, never raises for a failing index."""
        if self._resync or self._fenced:
            return  # the snapshot to come covers them; a fenced life has nothing to say
        for event in events:
            match event:
                case CacheCleared():
                    self._pending.clear()
                    self._clear = True
                case BlocksStored(hashes):
                    self._pending.update(dict.fromkeys(hashes, True))
                case BlocksRemoved(hashes):
                    self._pending.update(dict.fromkeys(hashes, False))
        if len(self._pending) > self._max_backlog:
            self._start_over()
        self._wake.set()

    @property
    def num_waiting(self) -> int:
        """Hashes that wait to be published; bounded by `max_backlog`, or by the snapshot's size."""
        return len(self._pending)

    @property
    def idle(self) -> bool:
        """All that was offered is published."""
        return not (self._pending or self._clear or self._resync or self._in_flight is not None)

    async def wait_idle(self, timeout_s: float) -> None:
        """Return when all that was offered is published; `DeadlineExceeded` after `timeout_s`."""
        await self._watch.until(lambda: self.idle, timeout_s)

    async def start(self) -> None:
        """Begin to publish. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"publish blocks of {self._worker_id}")

    async def aclose(self) -> None:
        """Stop publishing; what waits is dropped, as the lease's end clears it anyway. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        delay_s = first_delay_s = 0.05
        while not self._fenced:
            await self._wait_for_work()
            try:
                await self._publish_next()
                delay_s = first_delay_s
                continue
            except Fenced as error:
                _LOG.error("publishing ends: %s", error)
                self._give_up()
                return
            except OutOfSequence as error:
                _LOG.info("publishing starts over: %s", error)
                self._start_over()
            except TandemError as error:
                _LOG.warning("publishing waits: %s", error)
            except Exception:  # a bug must not end publishing silently
                _LOG.exception("publishing failed and starts over")
                self._start_over()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._max_delay_s)

    async def _wait_for_work(self) -> None:
        """Return when something waits, or when it is time for a check."""
        while self.idle:
            self._wake.clear()
            try:
                async with asyncio.timeout(self._check_s if self._sequence else None):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _publish_next(self) -> None:
        if self._in_flight is None:
            self._in_flight = self._take_batch()
            self._sequence += 1
        await self._index.publish(self._worker_id, self._epoch, self._sequence, self._in_flight)
        self._in_flight = None
        self._watch.notify()

    def _take_batch(self) -> Sequence[KvEvent]:
        """The next events to send, at most `batch_hashes` hashes, a hash once."""
        if self._resync:
            self._pending = dict.fromkeys(self._snapshot(), True)
            self._clear, self._resync = True, False
        batch = list(islice(self._pending.items(), self._batch_hashes))
        for block, _ in batch:
            del self._pending[block]
        events: list[KvEvent] = [CacheCleared()] if self._clear else []
        self._clear = False
        events.append(BlocksRemoved(tuple(block for block, stored in batch if not stored)))
        events.append(BlocksStored(tuple(block for block, stored in batch if stored)))
        return events

    def _start_over(self) -> None:
        """Forget what waits, the batch in flight too: a snapshot will say it all."""
        self._pending.clear()
        self._clear, self._resync = False, True
        self._in_flight = None

    def _give_up(self) -> None:
        self._fenced = True
        self._pending.clear()
        self._clear = self._resync = False
        self._in_flight = None
        self._watch.notify()
