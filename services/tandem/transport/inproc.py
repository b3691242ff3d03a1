"""The reference transport: memory to memory within one process. What the contract suite is read against."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from tandem.clock import Deadline
from tandem.errors import PeerLost
from tandem.transport.base import Buffer
from tandem.transport.posted import PostedReceive

_PREFIX = b"inproc:"


class InprocReceive(PostedReceive):
    """Implements `Receive`. Done when matched, cancelled or closed; settled in the same moment."""

    def cancel(self) -> None:
        """See `Receive`."""
        self.fail("was cancelled")


class InprocEndpoint:
    """Implements `Endpoint`."""

    def __init__(self, owner: InprocTransport, peer: InprocTransport) -> None:
        self._owner = owner
        self._peer = peer
        self._closed = False

    @property
    def closed(self) -> bool:
        """See `Endpoint`."""
        return self._closed or self._peer.closed or self._owner.closed

    async def send(self, tag: int, data: Buffer) -> None:
        """See `Endpoint`."""
        if self.closed:
            raise PeerLost("the inproc peer is closed; connect again")
        await self._peer.deliver(tag, memoryview(data).cast("B"))  # type: ignore[arg-type]
        if self.closed:
            raise PeerLost("the inproc peer was closed amid a send; connect again")

    async def aclose(self) -> None:
        """See `Endpoint`."""
        self._closed = True


class InprocTransport:
    """Implements `Transport`. One event loop; addresses are valid within this process only."""

    _live: dict[bytes, InprocTransport] = {}  # noqa: RUF012 (the process's switchboard)
    _num_made = 0

    def __init__(self) -> None:
        InprocTransport._num_made += 1
        self.address = _PREFIX + str(InprocTransport._num_made).encode()
        self.closed = False
        self._posted: dict[int, InprocReceive] = {}
        InprocTransport._live[self.address] = self

    @property
    def name(self) -> str:
        """See `Transport`."""
        return "inproc"

    async def connect(self, address: bytes, deadline: Deadline) -> InprocEndpoint:
        """See `Transport`."""
        peer = InprocTransport._live.get(address)
        if peer is None or self.closed:
            raise PeerLost(
                f"no inproc transport at {address!r} in this process; "
                "between processes use transfer.transport=ucx"
            )
        return InprocEndpoint(self, peer)

    def post_receive(self, tag: int, into: Buffer) -> InprocReceive:
        """See `Transport`."""
        if self.closed:
            raise PeerLost("this transport is closed")
        receive = self._posted[tag] = InprocReceive(memoryview(into).cast("B"))  # type: ignore[arg-type]
        return receive

    async def deliver(self, tag: int, data: memoryview) -> None:
        """Take a peer's message: into the posted receive, or dropped if there is none (any more)."""
        receive = self._posted.pop(tag, None)
        if receive is None or receive.settled:
            return
        if len(data) != len(receive.into):
            receive.fail(f"got {len(data)} bytes, not {len(receive.into)}")
            return
        receive.into[:] = data
        receive.complete()

    async def aclose(self) -> None:
        """See `Transport`."""
        if self.closed:
            return
        self.closed = True
        del InprocTransport._live[self.address]
        for receive in self._posted.values():
            receive.fail("ended: the transport was closed")
        self._posted.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
