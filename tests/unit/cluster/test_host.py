from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem.cluster.host import NodeHost
from tandem.errors import ConfigError


class FakeNode:
    """Open until told otherwise; remembers what was done to it."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.drained = self.closed = False
        self.lost = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[FakeNode]:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        try:
            yield self
        finally:
            self.closed = True

    async def drain(self) -> bool:
        assert not self.closed
        self.drained = True
        return True

    async def wait_closed(self) -> None:
        await self._closing.wait()

    def break_down(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._closing.set)


def test_a_node_is_open_until_it_is_stopped_and_drained_first() -> None:
    node = FakeNode()
    host = NodeHost(node.open, pytest.fail)
    assert host.address(5.0) == node.address
    assert not node.closed
    host.stop(5.0)
    host.stop(5.0)
    assert node.drained
    assert node.closed


def test_a_node_that_ends_by_itself_is_reported() -> None:
    node, lost = FakeNode(), threading.Event()
    host = NodeHost(node.open, lost.set)
    host.address(5.0)
    node.break_down()
    assert lost.wait(5.0)
    assert node.closed
    assert not node.drained
    host.stop(5.0)


def test_a_node_that_can_not_be_opened_says_why() -> None:
    failed = threading.Event()

    @asynccontextmanager
    async def broken() -> AsyncIterator[FakeNode]:
        raise ConfigError("no memory")
        yield FakeNode()

    host = NodeHost(broken, pytest.fail, failed.set)
    with pytest.raises(ConfigError, match="no memory"):
        host.address(5.0)
    assert failed.wait(5.0)
    host.stop(5.0)


def test_a_stop_while_it_opens_closes_it_at_once() -> None:
    node, entered, go_on = FakeNode(), threading.Event(), threading.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[FakeNode]:
        entered.set()
        await asyncio.to_thread(go_on.wait)
        async with node.open():
            yield node

    host = NodeHost(slow, pytest.fail)
    assert entered.wait(5.0)
    stopper = threading.Thread(target=host.stop, args=(5.0,))
    stopper.start()
    go_on.set()
    stopper.join(5.0)
    assert node.closed
