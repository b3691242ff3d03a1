"""The reference transport: memory to memory within one process. What the contract suite is read against."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tandem.clock import Deadline
from tandem.errors import PeerLost, TransferFailed
from tandem.transport.base import Buffer

_PREFIX = b"inproc:"


class InprocReceive:
    """Implements `Receive`. Done when matched, cancelled or closed; settled in the same moment."""

    def __init__(self, into: memoryview) -> None:
        self.into = into
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def settled(self) -> bool:
        """See `Receive`."""
        return self._outcome.done()

    async def wait(self) -> None:
        """See `Receive`."""
        await asyncio.shield(self._outcome)

    def cancel(self) -> None:
        """See `Receive`."""
        self.fail("was cancelled")

    async def wait_settled(self) -> None:
        """See `Receive`."""
        await asyncio.wait([self._outcome])

    def complete(self) -> None:
        """The bytes are there."""
        if not self._outcome.done():
            self._outcome.set_result(None)

    def fail(self, why: str) -> None:
        """The bytes will never be there."""
        if not self._outcome.done():
            self._outcome.set_exception(TransferFailed(f"a receive {why}; send the blocks again"))
            self._outcome.exception()  # marks it as seen: perhaps nobody waits


@dataclass(eq=False, slots=True)
class _Parcel:
    """A message whose receive is not posted yet."""

    data: memoryview
    outcome: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class InprocEndpoint:
    """Implements `Endpoint`."""

    def __init__(self, owner: InprocTransport, peer: InprocTransport) -> None:
        self._owner = owner
        self._peer = peer
        self._closed = False
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def closed(self) -> bool:
        """See `Endpoint`."""
        return self._closed or self._peer.closed or self._owner.closed

    async def send(self, tag: int, data: Buffer) -> None:
        """See `Endpoint`."""
        if self.closed:
            raise PeerLost("the inproc peer is closed; connect again")
        parcel = _Parcel(memoryview(data).cast("B"))  # type: ignore[arg-type]
        self._waiting.add(parcel.outcome)
        try:
            self._peer.deliver(tag, parcel)
            await parcel.outcome
        finally:
            self._waiting.discard(parcel.outcome)
            self._peer.withdraw(tag, parcel)

    async def aclose(self) -> None:
        """See `Endpoint`."""
        self._closed = True
        for outcome in self._waiting:
            if not outcome.done():
                outcome.set_exception(PeerLost("the endpoint was closed amid a send"))


class InprocTransport:
    """Implements `Transport`. One event loop; addresses are valid within this process only."""

    _live: dict[bytes, InprocTransport] = {}  # noqa: RUF012 (the process's switchboard)
    _num_made = 0

    def __init__(self) -> None:
        InprocTransport._num_made += 1
        self.address = _PREFIX + str(InprocTransport._num_made).encode()
        self.closed = False
        self._posted: dict[int, InprocReceive] = {}
        self._parcels: dict[int, list[_Parcel]] = {}
        self._endpoints: list[InprocEndpoint] = []
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
        endpoint = InprocEndpoint(self, peer)
        self._endpoints.append(endpoint)
        return endpoint

    def post_receive(self, tag: int, into: Buffer) -> InprocReceive:
        """See `Transport`."""
        if self.closed:
            raise PeerLost("this transport is closed")
        receive = InprocReceive(memoryview(into).cast("B"))  # type: ignore[arg-type]
        waiting = self._parcels.get(tag)
        if waiting:
            _hand_over(waiting.pop(0), receive)
        else:
            self._posted[tag] = receive
        return receive

    def deliver(self, tag: int, parcel: _Parcel) -> None:
        """Take a peer's message: into the posted receive, or kept until there is one."""
        receive = self._posted.pop(tag, None)
        if receive is not None and not receive.settled:
            _hand_over(parcel, receive)
        else:
            self._parcels.setdefault(tag, []).append(parcel)

    def withdraw(self, tag: int, parcel: _Parcel) -> None:
        """The sender has gone: its message is no longer there. Delivered or unknown: no-op."""
        waiting = self._parcels.get(tag, [])
        if parcel in waiting:
            waiting.remove(parcel)
        if not waiting:
            self._parcels.pop(tag, None)

    async def aclose(self) -> None:
        """See `Transport`."""
        if self.closed:
            return
        self.closed = True
        del InprocTransport._live[self.address]
        for receive in self._posted.values():
            receive.fail("ended: the transport was closed")
        for waiting in list(self._parcels.values()):
            for parcel in waiting:
                if not parcel.outcome.done():
                    parcel.outcome.set_exception(PeerLost("the inproc peer was closed amid a send"))
        for endpoint in self._endpoints:
            await endpoint.aclose()
        self._posted.clear()
        self._endpoints.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _hand_over(parcel: _Parcel, receive: InprocReceive) -> None:
    if parcel.outcome.done():
        return
    if len(parcel.data) != len(receive.into):
        problem = f"{len(parcel.data)} bytes were sent and {len(receive.into)} expected"
        receive.fail(f"got the wrong size: {problem}")
        parcel.outcome.set_exception(TransferFailed(f"the peer refused a message: {problem}"))
        return
    receive.into[:] = parcel.data
    receive.complete()
    parcel.outcome.set_result(None)
