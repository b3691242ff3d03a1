"""Work that outlives the call that started it, and still has an owner: asyncio only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Background:
    """Tasks of one owner. A failure is logged, never lost; `aclose` leaves none behind."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, work: Coroutine[Any, Any, Result], name: str, *, awaited: bool = False
    ) -> asyncio.Task[Result]:
        """Start `work` now. With `awaited` somebody wants its result, and is told of its failure."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget if awaited else self._ended)
        return task

    async def join(self, timeout_s: float) -> bool:
        """Wait for what runs now, for at most `timeout_s`; true when none is left."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)
        return not self._tasks

    async def aclose(self, grace_s: float = 0.0) -> None:
        """Give the tasks `grace_s` to end, cancel the rest, and wait for their end. Idempotent."""
        if grace_s > 0:
            await self.join(grace_s)
        while self._tasks:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: whoever awaits may have gone

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed: %s", task.get_name(), error, exc_info=error)
