from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tandem.directory.follower import Entry, StreamFollower
from tandem.errors import InternalError, Unavailable


class FakeStore:
    """A stream in memory; reading past its end waits until the test says that the time is up."""

    def __init__(self) -> None:
        self.entries: list[tuple[bytes, dict[bytes, bytes]]] = []
        self.counter = 0
        self.failures: list[Exception] = []
        self.silent = asyncio.Event()

    def add(self, number: int, **fields: bytes) -> None:
        self.counter = number
        entry_id = b"%d-0" % (len(self.entries) + 1)
        self.entries.append((entry_id, {b"n": b"%d" % number, **{k.encode(): v for k, v in fields.items()}}))

    async def script(self, lua: str, keys: object, arguments: object) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        return [b"%d" % self.counter, b"%d-0" % len(self.entries)]

    async def command(self, *arguments: object) -> bytes:
        return b"%d" % self.counter

    async def read_stream(
        self, stream: bytes, after: bytes, count: int
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        if self.failures:
            raise self.failures.pop(0)
        fresh = self.entries[int(after.split(b"-")[0]) :]
        if not fresh:
            await self.silent.wait()
            self.silent.clear()
        return fresh


class RecordingSink:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.happened = asyncio.Event()

    async def rebuild(self, *, after_outage: bool) -> None:
        self._note("rebuild after outage" if after_outage else "rebuild")

    def apply(self, entry: Entry) -> None:
        if b"bad" in entry:
            raise InternalError("unreadable")
        self._note(f"apply {entry[b'n'].decode()}")

    def tick(self) -> None: ...

    def lost(self) -> None:
        self._note("lost")

    def _note(self, what: str) -> None:
        self.log.append(what)
        self.happened.set()

    async def until(self, predicate: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(5.0):
            while not predicate(self.log):
                self.happened.clear()
                await self.happened.wait()


async def follow(store: FakeStore, sink: RecordingSink, expected: list[str]) -> None:
    task = asyncio.create_task(StreamFollower(store, b"s", sink).run())  # type: ignore[arg-type]
    try:
        await sink.until(lambda log: len(log) >= len(expected))
        assert sink.log == expected
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_entries_are_applied_in_order_after_the_snapshot() -> None:
    store, sink = FakeStore(), RecordingSink()
    store.add(1)
    original = sink.rebuild

    async def rebuild_while_writing(*, after_outage: bool) -> None:
        await original(after_outage=after_outage)
        store.add(2)
        store.add(3)

    sink.rebuild = rebuild_while_writing  # type: ignore[method-assign]
    await follow(store, sink, ["rebuild", "apply 2", "apply 3"])


async def test_p19_a_missing_entry_brings_a_rebuild() -> None:
    store, sink = FakeStore(), RecordingSink()
    first = True
    original = sink.rebuild

    async def rebuild_and_lose(*, after_outage: bool) -> None:
        nonlocal first
        await original(after_outage=after_outage)
        if first:
            first = False
            store.add(1)
            store.add(3)

    sink.rebuild = rebuild_and_lose  # type: ignore[method-assign]
    await follow(store, sink, ["rebuild", "apply 1", "rebuild"])


async def test_p19_a_counter_that_moved_without_entries_brings_a_rebuild() -> None:
    store, sink = FakeStore(), RecordingSink()
    store.counter = 5
    task = asyncio.create_task(StreamFollower(store, b"s", sink).run())  # type: ignore[arg-type]
    try:
        await sink.until(lambda log: log == ["rebuild"])
        store.counter = 0  # flushed
        store.silent.set()
        await asyncio.sleep(0)
        store.silent.set()
        async with asyncio.timeout(5.0):
            while sink.log != ["rebuild", "rebuild"]:
                store.silent.set()
                await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_unreadable_entry_is_skipped() -> None:
    store, sink = FakeStore(), RecordingSink()
    original = sink.rebuild

    async def rebuild_while_writing(*, after_outage: bool) -> None:
        await original(after_outage=after_outage)
        store.add(1, bad=b"")
        store.add(2)

    sink.rebuild = rebuild_while_writing  # type: ignore[method-assign]
    await follow(store, sink, ["rebuild", "apply 2"])


async def test_p20_an_outage_is_told_and_followed_by_a_rebuild() -> None:
    store, sink = FakeStore(), RecordingSink()
    store.failures = [Unavailable("down"), Unavailable("down")]
    await follow(store, sink, ["lost", "lost", "rebuild after outage"])


async def test_a_bug_is_logged_and_the_mirror_starts_over() -> None:
    store, sink = FakeStore(), RecordingSink()
    store.failures = [ZeroDivisionError()]
    await follow(store, sink, ["lost", "rebuild after outage"])
