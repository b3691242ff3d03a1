"""Several streams as one, in the order in which things happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from tandem.tasks import Background

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


async def merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """Everything that `streams` bring. The first error of one closes all; so does closing this.

    A slow reader holds all of them back: nothing is buffered but one item.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[tuple[Item] | _End] = asyncio.Queue(maxsize=1)
    pumps = Background()
    try:
        for number, stream in enumerate(streams):
            pumps.spawn(_pump(stream, queue), f"choice {number}")
        num_open = len(streams)
        while num_open:
            event = await queue.get()
            if isinstance(event, _End):
                if event.error is not None:
                    raise event.error
                num_open -= 1
            else:
                yield event[0]
    finally:
        await pumps.aclose()


async def _pump(stream: AsyncGenerator[Item], queue: asyncio.Queue[tuple[Item] | _End]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((item,))
    except Exception as error:
        await queue.put(_End(error))
    else:
        await queue.put(_End(None))
