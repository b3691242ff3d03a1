"""What is under way inside UCX: one endpoint, one receive, and the requests behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.errors import PeerLost
from tandem.transport.base import Buffer
from tandem.transport.posted import PostedReceive

_OK = 0
_GREETING = memoryview(bytearray(1 << 16))
"""Large enough that UCX can't call it sent before the peer has answered."""
_GREETING_TAG = (1 << 64) - 1
_GRACE_S = 2.0
"""How long a send that nobody wants any more may take to end by itself, and a connection to close."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A request inside UCX. `buffer` must live as long; `done` is told the UCS status."""

    request: Any
    buffer: object
    done: Callable[[int], None]


class UcxReceive(PostedReceive):
    """Implements `Receive`. UCX writes into the buffer only between `begin` and `end`."""

    def __init__(self, into: memoryview, withdraw: Callable[[], None]) -> None:
        super().__init__(into)
        self._withdraw = withdraw
        self._in_ucx = False

    def cancel(self) -> None:
        """See `Receive`. One that is being written settles when its message is complete, or its peer gone."""
        if not self._in_ucx:
            self._withdraw()
            self.fail("was cancelled")

    def begin(self) -> None:
        """The message is here; UCX starts to write."""
        self._in_ucx = True

    def end(self, status: int) -> None:
        """UCX has written all it ever will."""
        self._in_ucx = False
        if status == _OK:
            self.complete()
        else:
            self.fail(f"broke off with UCX status {status}")


class UcxEndpoint:
    """Implements `Endpoint`."""

    def __init__(self, track: Callable[[Pending], None], endpoint: Any, array: Any, tag: Any) -> None:
        self._track = track
        self._endpoint = endpoint
        self._array = array
        self._tag = tag
        self._closed = False

    @property
    def closed(self) -> bool:
        """See `Endpoint`."""
        return self._closed or not self._endpoint.alive

    async def send(self, tag: int, data: Buffer) -> None:
        """See `Endpoint`."""
        if self.closed:
            raise PeerLost("the UCX connection is closed; connect again")
        done = self._submit(tag, data)
        try:
            status = await asyncio.shield(done)
        except asyncio.CancelledError:
            await self._quiet(done)
            raise
        if status != _OK:
            raise PeerLost(f"the peer was lost amid a send (UCX status {status})")

    async def greet(self) -> None:
        """Return once the peer has answered. Raises `PeerLost`; a cancelled call closes the endpoint.

        Until then UCX can neither notice that the peer is dead nor take a message back, so no KV
        block may be at stake.
        """
        try:
            status = await asyncio.shield(self._submit(_GREETING_TAG, _GREETING))
        except asyncio.CancelledError:
            self._closed = True
            raise
        if status != _OK:
            self._closed = True
            raise PeerLost(f"the peer does not answer (UCX status {status})")

    def _submit(self, tag: int, data: Buffer) -> asyncio.Future[int]:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        array = self._array(data)
        request = self._endpoint.tag_send(array, tag=self._tag(tag))
        self._track(Pending(request, array, done.set_result))
        return done

    async def _quiet(self, done: asyncio.Future[int]) -> None:
        """Wait until a send is over; one that hangs costs the connection.

        A frozen peer may still read the buffer when it wakes up. It gets whatever is there then,
        into memory that it has promised to nobody: the final word of this transfer is not OK.
        """
        await asyncio.wait([done], timeout=_GRACE_S)
        if not done.done():
            await self.aclose()
            await asyncio.wait([done], timeout=_GRACE_S)

    async def aclose(self) -> None:
        """See `Endpoint`."""
        if self._closed:
            return
        self._closed = True
        if not self._endpoint.alive:
            return  # UCX has closed it already
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        request = self._endpoint.close()
        if request is not None:
            self._track(Pending(request, None, done.set_result))
            await asyncio.wait([done], timeout=_GRACE_S)
