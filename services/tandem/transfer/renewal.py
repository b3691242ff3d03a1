"""A sender's signs of life: as long as it computes or sends, its tickets' leases are moved later."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from tandem.clock import Clock, Deadline
from tandem.errors import TandemError, TransferFailed
from tandem.generation import CallContext
from tandem.kv.ticket import PeerAddress, Ticket
from tandem.tasks import Background
from tandem.transfer.peers import PeerService, bounded

logger = logging.getLogger(__name__)

_RENEWALS_A_LEASE = 3


class LeaseRenewal:
    """Renews what `alive()` lists, one call a peer, three times a lease; ends with the last of them.

    `on_disowned` is told of each ticket that its receiver does not know any more (P36).
    """

    def __init__(
        self,
        alive: Callable[[], Sequence[Ticket]],
        on_disowned: Callable[[Ticket, TandemError], None],
        *,
        peers: Callable[[PeerAddress], PeerService],
        clock: Clock,
        background: Background,
    ) -> None:
        self._alive = alive
        self._on_disowned = on_disowned
        self._peers = peers
        self._clock = clock
        self._background = background
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """There is a new ticket, perhaps with a shorter lease than the others."""
        self._news.set()
        if self._task is None:
            self._task = self._background.spawn(self._run(), "lease renewal")

    def stop(self) -> None:
        """Renew nothing any more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        due: Deadline | None = None
        try:
            while tickets := self._alive():
                self._news.clear()
                soonest = Deadline.after(self._clock, _interval_s(tickets))
                due = soonest if due is None else min(due, soonest)
                try:
                    async with asyncio.timeout(due.remaining_s(self._clock)):
                        await self._news.wait()
                except TimeoutError:
                    await self._renew(self._alive())
                    due = None
        finally:
            self._task = None

    async def _renew(self, tickets: Sequence[Ticket]) -> None:
        by_peer: defaultdict[PeerAddress, list[Ticket]] = defaultdict(list)
        for ticket in tickets:
            by_peer[ticket.receiver].append(ticket)
        await asyncio.gather(*(self._renew_at(peer, theirs) for peer, theirs in by_peer.items()))

    async def _renew_at(self, peer: PeerAddress, tickets: Sequence[Ticket]) -> None:
        deadline = Deadline.after(self._clock, _interval_s(tickets))
        try:
            call = self._peers(peer).renew([t.transfer_id for t in tickets], CallContext(deadline))
            unknown = await bounded(call, deadline, self._clock, f"worker {peer.worker_id}")
        except TandemError as error:
            logger.warning("leases at worker %s were not renewed: %s", peer.worker_id, error)
            return
        for ticket in tickets:
            if ticket.transfer_id in unknown:
                problem = f"worker {peer.worker_id} does not know transfer {ticket.transfer_id} any more"
                logger.warning("%s; it is given up", problem)
                self._on_disowned(ticket, TransferFailed(problem))


def _interval_s(tickets: Sequence[Ticket]) -> float:
    return min(ticket.lease_s for ticket in tickets) / _RENEWALS_A_LEASE
