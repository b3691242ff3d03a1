"""Both halves of the directory over one Redis, with the tasks that keep them true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tandem.clock import Clock
from tandem.directory.base import WorkerRecord
from tandem.directory.follower import StreamFollower
from tandem.directory.redis_index import RedisPrefixIndex, index_stream, list_owners, purge
from tandem.directory.redis_membership import WORKER_STREAM, RedisMembership
from tandem.directory.redis_store import RedisStore
from tandem.directory.watch import Watch
from tandem.errors import TandemError
from tandem.ids import Epoch, WorkerId

_LOG = logging.getLogger(__name__)
_REAP_S = 1.0


class _PurgingMembership(RedisMembership):
    """Leaving also purges what the worker published."""

    def __init__(self, store: RedisStore, clock: Clock, watch: Watch, outage_grace_s: float) -> None:
        super().__init__(store, clock, watch, outage_grace_s=outage_grace_s)
        self._purge_store = store

    async def leave(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """See `Membership`. Raises `Unavailable`: then the lease's end does it."""
        await super().leave(worker_id, epoch)
        for owner in await list_owners(self._purge_store):
            if owner.worker_id == worker_id and owner.epoch <= epoch:
                await purge(self._purge_store, owner)


class RedisDirectory:
    """Implements `Directory`. A worker needs only to write; a gateway calls `start` to have mirrors.

    Redis gone: writing raises `Unavailable` in about a second; reading goes on from memory, for
    `outage_grace_s` at most; contact is taken up again by itself.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        clock: Clock,
        *,
        timeout_s: float = 0.5,
        block_s: float = 1.0,
        outage_grace_s: float = 120.0,
    ) -> None:
        self._store = RedisStore(url, timeout_s=timeout_s, block_s=block_s)
        self._watch = Watch()
        self.membership = _PurgingMembership(self._store, clock, self._watch, outage_grace_s)
        self.index = RedisPrefixIndex(self._store, namespace, self.membership.epoch_of, self._watch)
        self._namespace = namespace
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to mirror, and to purge after dead workers. Doesn't wait for Redis. Idempotent."""
        if self._tasks:
            return
        workers = StreamFollower(self._store, WORKER_STREAM, self.membership)
        blocks = StreamFollower(self._store, index_stream(self._namespace), self.index)
        self._tasks = [
            asyncio.create_task(workers.run(), name="mirror of workers"),
            asyncio.create_task(blocks.run(), name="mirror of blocks"),
            asyncio.create_task(self._reap_forever(), name="purge after dead workers"),
        ]

    async def ping(self) -> None:
        """Raise `Unavailable` or `ConfigError` when Redis can't be used."""
        await self._store.command("PING")

    @property
    def in_contact(self) -> bool:
        """The mirrors stand and Redis answered when last asked."""
        return self.membership.in_contact

    def workers(self) -> tuple[WorkerRecord, ...]:
        """Short for `membership.workers()`."""
        return self.membership.workers()

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> None:
        """See `Directory`. Looked at about once a second even without a change: leases end silently."""
        await self._watch.until(predicate, timeout_s)

    async def reap(self) -> None:
        """Purge after every worker without a lease, once. Raises `Unavailable`."""
        for owner in await list_owners(self._store):
            if self.membership.epoch_of(owner.worker_id) != owner.epoch:
                await purge(self._store, owner)

    async def aclose(self) -> None:
        """End the tasks and close every connection. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _reap_forever(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)  # a timer, so that leases are reaped without traffic
            if not self.in_contact:
                continue  # nobody could renew: judge no one
            try:
                await self.reap()
            except TandemError as error:
                _LOG.warning("purging after dead workers: %s", error)
            except Exception:  # a bug must not end the purge silently
                _LOG.exception("purging after dead workers failed; tried again")
