"""A node in a thread of its own event loop: for hosts whose loop isn't ours, such as a Ray actor."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

import uvloop

logger = logging.getLogger(__name__)


class Node(Protocol):
    """What a host needs of a node."""

    @property
    def address(self) -> str:
        """Where it serves, ``host:port``."""
        ...

    async def drain(self) -> bool:
        """Take no new work and let what runs end."""
        ...

    async def wait_closed(self) -> None:
        """Return when the node must stop by itself."""
        ...


class NodeHost:
    """Opens a node, keeps it open, and closes it when told to or when it must stop.

    `on_lost` is called in the node's thread when the node has stopped by itself, `on_failed` when it
    could not be opened; `address` tells why.
    """

    def __init__(
        self,
        open_node: Callable[[], AbstractAsyncContextManager[Node]],
        on_lost: Callable[[], None],
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_node = open_node
        self._on_lost = on_lost
        self._on_failed = on_failed
        self._address: Future[str] = Future()
        self._stopping = threading.Event()
        self._wake: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-node", daemon=True)
        self._thread.start()

    def address(self, timeout_s: float) -> str:
        """Where the node serves, once it does. Blocks; raises what opening it raised, or `TimeoutError`."""
        return self._address.result(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Drain and close. Blocks until done, for at most `timeout_s`; idempotent."""
        self._stopping.set()
        wake = self._wake
        if wake is not None:
            with suppress(RuntimeError):  # the loop has just closed by itself
                wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            lost = uvloop.run(self._serve())
        except BaseException as error:
            self._wake = None
            if not self._address.done():
                self._address.set_exception(error)
                self._on_failed()
                return
            logger.exception("the node broke down")
            lost = True
        self._wake = None
        if lost:
            self._on_lost()

    async def _serve(self) -> bool:
        """Keep the node open; true when it stopped by itself."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(stop.set)
        if self._stopping.is_set():
            stop.set()
        async with self._open_node() as node:
            self._address.set_result(node.address)
            told, lost = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(node.wait_closed())
            try:
                await asyncio.wait((told, lost), return_when=asyncio.FIRST_COMPLETED)
            finally:
                told.cancel()
                lost.cancel()
            if not stop.is_set():
                return True
            await node.drain()
        return False
