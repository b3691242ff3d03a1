"""Connections of a sender to its receivers: one greeting and one endpoint for each life of a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from tandem.clock import Clock, Deadline
from tandem.errors import PeerLost, TicketRefused
from tandem.generation import CallContext
from tandem.ids import Epoch, TransferId, WorkerId
from tandem.kv.ticket import FinalWord, Hello, PeerAddress
from tandem.tasks import Background
from tandem.transfer.plan import PROTOCOL_VERSION, check_hello
from tandem.transport.base import Endpoint, Transport

Answer = TypeVar("Answer")

_Life = tuple[WorkerId, Epoch]


class PeerService(Protocol):
    """What a sender calls on a receiver: `rpc.services.TransferService`, which this layer can't see."""

    async def handshake(self, hello: Hello, context: CallContext) -> Hello:
        """Exchange identities. Raises `LayoutMismatch`."""
        ...

    async def finish(self, word: FinalWord, context: CallContext) -> None:
        """The final word of a transfer. Raises `TicketRefused`."""
        ...

    async def renew(self, transfer_ids: Sequence[TransferId], context: CallContext) -> tuple[TransferId, ...]:
        """Move these leases later; returns those that are unknown there."""
        ...


async def bounded(call: Awaitable[Answer], deadline: Deadline, clock: Clock, what: str) -> Answer:
    """The answer of `call`; `PeerLost` naming `what` when it doesn't come before `deadline`."""
    try:
        async with asyncio.timeout(deadline.remaining_s(clock)):
            return await call
    except TimeoutError:
        raise PeerLost(f"{what} did not answer in time; it is gone or hangs") from None


class PeerLinks:
    """Endpoints to peers, each opened once, on first need, after a greeting that both sides accept.

    Peers don't wait for each other (P35), and callers of one peer share its greeting. A failure is
    told to all who wait for it and not kept: the next call tries anew. So does one that finds the
    endpoint closed, or the peer in a newer life.
    """

    def __init__(
        self,
        transport: Transport,
        me: Callable[[], PeerAddress],
        *,
        fingerprint: str,
        clock: Clock,
        peers: Callable[[PeerAddress], PeerService],
        handshake_timeout_s: float,
    ) -> None:
        self._transport = transport
        self._me = me
        self._fingerprint = fingerprint
        self._clock = clock
        self._peers = peers
        self._handshake_timeout_s = handshake_timeout_s
        self._endpoints: dict[_Life, Endpoint] = {}
        self._opening: dict[_Life, asyncio.Task[Endpoint]] = {}
        self._background = Background()

    async def endpoint(self, peer: PeerAddress) -> Endpoint:
        """An open endpoint to this life of the peer.

        Raises `PeerLost`, `LayoutMismatch`, or `TicketRefused` if another life answers. Cancelling
        the call doesn't stop what others wait for.
        """
        life = (peer.worker_id, peer.epoch)
        endpoint = self._endpoints.get(life)
        if endpoint is not None and not endpoint.closed:
            return endpoint
        opening = self._opening.get(life)
        if opening is None:
            opening = self._background.spawn(self._open(peer), f"greeting of {peer.worker_id}", awaited=True)
            self._opening[life] = opening
            opening.add_done_callback(lambda _: self._opening.pop(life))
        return await asyncio.shield(opening)

    async def aclose(self) -> None:
        """Close every endpoint. Idempotent."""
        await self._background.aclose()
        endpoints, self._endpoints = self._endpoints, {}
        for endpoint in endpoints.values():
            await endpoint.aclose()

    async def _open(self, peer: PeerAddress) -> Endpoint:
        deadline = Deadline.after(self._clock, self._handshake_timeout_s)
        who = f"worker {peer.worker_id}"
        hello = Hello(PROTOCOL_VERSION, self._me(), self._fingerprint)
        greeting = self._peers(peer).handshake(hello, CallContext(deadline))
        answer = await bounded(greeting, deadline, self._clock, who)
        check_hello(answer, self._fingerprint)
        if (answer.peer.worker_id, answer.peer.epoch) != (peer.worker_id, peer.epoch):
            raise TicketRefused(
                f"{who} of epoch {peer.epoch} was expected at {peer.control}, but "
                f"{answer.peer.worker_id} of epoch {answer.peer.epoch} answered; reserve anew"
            )
        connecting = self._transport.connect(peer.transport, deadline)
        endpoint = await bounded(connecting, deadline, self._clock, f"the KV endpoint of {who}")
        await self._drop_stale(peer.worker_id)
        self._endpoints[(peer.worker_id, peer.epoch)] = endpoint
        return endpoint

    async def _drop_stale(self, worker_id: WorkerId) -> None:
        """Forget closed endpoints and earlier lives, so that restarts don't pile up."""
        stale = [life for life, e in self._endpoints.items() if e.closed or life[0] == worker_id]
        for endpoint in [self._endpoints.pop(life) for life in stale]:
            await endpoint.aclose()
