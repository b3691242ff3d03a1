"""A worker's place in the directory: announced, renewed with its load, fenced, and left."""

from __future__ import annotations

import asyncio
import logging

from tandem.config.settings import DirectorySettings
from tandem.directory.base import Directory, WorkerState
from tandem.directory.publisher import PrefixPublisher
from tandem.errors import Fenced, TandemError, Unavailable
from tandem.ids import BlockHash
from tandem.kv.events import BlocksStored
from tandem.worker.core import WorkerCore

logger = logging.getLogger(__name__)


class Registration:
    """Keeps one life of one worker in the directory. `lost` is set when it must stop serving.

    The directory out of reach does not stop a worker: it goes on with what it has, and announces
    again until it succeeds.
    """

    def __init__(self, core: WorkerCore, directory: Directory, settings: DirectorySettings) -> None:
        self.lost = asyncio.Event()
        self._core = core
        self._membership = directory.membership
        self._settings = settings
        identity = core.identity
        self._publisher = PrefixPublisher(
            directory.index, identity.worker_id, identity.epoch, lambda: _held(core)
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Announce the worker as ready. Raises `Fenced`; `Unavailable` when the store is out of reach."""
        self._core.state = WorkerState.READY
        await self.announce()
        await self._publisher.start()
        self._task = asyncio.create_task(self._renew_forever(), name="worker's heartbeat")

    async def announce(self) -> None:
        """Tell the directory how things are now. Raises `Fenced`, `Unavailable`."""
        await self._membership.announce(self._core.record(), self._settings.ttl_s)

    async def aclose(self) -> None:
        """Leave the directory; if it can't be reached, the lease's end does it. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._publisher.aclose()
        identity = self._core.identity
        try:
            await self._membership.leave(identity.worker_id, identity.epoch)
        except Unavailable as error:
            logger.warning("the directory does not know yet that this worker left: %s", error)

    async def _renew_forever(self) -> None:
        while self._core.loop.alive:
            self._publisher.offer(self._core.loop.drain_kv_events())
            await asyncio.sleep(self._settings.heartbeat_s)
            try:
                await self.announce()
            except Fenced as error:
                logger.error("this worker stops: %s", error)
                break
            except TandemError as error:
                logger.warning("the heartbeat waits for the directory: %s", error)
        self.lost.set()


def _held(core: WorkerCore) -> list[BlockHash]:
    """The blocks that can be shared now."""
    events = core.loop.snapshot_kv_events()
    return [block for event in events if isinstance(event, BlocksStored) for block in event.hashes]
