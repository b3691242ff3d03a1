"""Waiting for a mirror to show something, without polling it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tandem.errors import DeadlineExceeded


class Watch:
    """Wakes those who wait whenever the watched state may have changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Say that the state may have changed. Never blocks."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, predicate: Callable[[], bool], timeout_s: float) -> None:
        """Return once `predicate()` is true; raise `DeadlineExceeded` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate():
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the directory did not show what was waited for within {timeout_s:g} s"
            ) from error
