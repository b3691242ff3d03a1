"""Keeping a mirror: a snapshot, then the stream of changes; a gap or a lost connection starts over.

Every entry carries a counter `n`, one up each time, so an entry that was trimmed away, or a Redis
that came back empty, is seen as a gap. When the stream is silent the counter itself is looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from tandem.directory.redis_store import RedisStore
from tandem.errors import TandemError

_LOG = logging.getLogger(__name__)
_BATCH = 256
_POSITION = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
return {redis.call('GET', KEYS[2]) or '0', last[1] and last[1][1] or '0-0'}
"""

Entry = Mapping[bytes, bytes]


class StreamSink(Protocol):
    """The mirror that is kept."""

    async def rebuild(self, *, after_outage: bool) -> None:
        """Replace everything by a snapshot. May raise `Unavailable`; then nothing is replaced.

        Entries made while the snapshot is read are applied after it: applying one twice, or one
        that the snapshot already reflects, must end in the same state.
        """
        ...

    def apply(self, entry: Entry) -> None:
        """Apply one change. Raises `TandemError` for one that can't be read; it is skipped."""
        ...

    def tick(self) -> None:
        """Redis just answered, and all that it said was applied."""
        ...

    def lost(self) -> None:
        """Redis doesn't answer. Called once for each failed try to reach it."""
        ...


class StreamFollower:
    """One task that keeps one `StreamSink` up to date until it is cancelled."""

    def __init__(self, store: RedisStore, stream: bytes, sink: StreamSink) -> None:
        self._store = store
        self._stream = stream
        self._counter = stream + b":n"
        self._sink = sink

    async def run(self) -> None:
        """Never returns and never raises but by cancellation."""
        delay_s = first_delay_s = 0.05
        after_outage = False
        while True:
            try:
                position = await self._rebuild(after_outage=after_outage)
                after_outage, delay_s = False, first_delay_s
                await self._tail(*position)
            except TandemError as error:
                _LOG.warning("mirror of %s: %s", self._stream.decode(), error)
            except Exception:  # a bug must not end the mirror silently: say it, start over
                _LOG.exception("mirror of %s failed and is rebuilt", self._stream.decode())
            else:
                continue  # a gap: rebuild at once
            after_outage = True
            self._sink.lost()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, 1.0)

    async def _rebuild(self, *, after_outage: bool) -> tuple[int, bytes]:
        """Snapshot; returns the stream's counter and last id from just before it."""
        number, last_id = await self._store.script(_POSITION, [self._stream, self._counter], [])
        await self._sink.rebuild(after_outage=after_outage)
        self._sink.tick()
        return int(number), last_id

    async def _tail(self, number: int, last_id: bytes) -> None:
        """Apply entries as they come; return when one is missing."""
        while True:
            entries = await self._store.read_stream(self._stream, last_id, _BATCH)
            if not entries and int(await self._store.command("GET", self._counter) or 0) != number:
                # Either written between the two calls, or the stream restarted below our id.
                entries = await self._store.read_stream(self._stream, last_id, _BATCH)
                if not entries:
                    return
            for entry_id, entry in entries:
                last_id = entry_id
                if int(entry[b"n"]) != number + 1:
                    return
                number += 1
                try:
                    self._sink.apply(entry)
                except TandemError as error:
                    _LOG.warning("mirror of %s skips an entry: %s", self._stream.decode(), error)
            self._sink.tick()
