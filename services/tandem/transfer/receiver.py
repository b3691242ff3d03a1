"""The receiving end of transfers: promises memory, waits for the bytes, and hands them to the engine.

A thin shell around `handoff.RECEIVER`: what happens becomes an event, effects are carried out here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from tandem.clock import Clock, Deadline
from tandem.engine.loop import EngineLoop
from tandem.engine.results import Reservation
from tandem.errors import Cancelled, Draining, InternalError, TandemError, TicketRefused, TransferFailed
from tandem.generation import Phase, PhaseTiming, SequenceSpec
from tandem.ids import AttemptId, BlockId, IdSource, TransferId
from tandem.kv.ticket import FinalWord, Hello, PeerAddress, Ticket, TransferOutcome
from tandem.tasks import Background
from tandem.telemetry import names
from tandem.transfer.handoff import RECEIVER, ReceiverEffect, ReceiverEvent, ReceiverState
from tandem.transfer.plan import PROTOCOL_VERSION, BlockMemory, check_hello, check_length, check_word
from tandem.transport.base import Receive, Transport

_CLOSE_GRACE_S = 5.0


@dataclass(eq=False, slots=True)
class _Incoming:
    """One transfer. `block_ids[i]` is filled by `receives[i]`, position ``ticket.first_block + i``."""

    ticket: Ticket
    block_ids: tuple[BlockId, ...]
    lease: Deadline
    receives: list[Receive] = field(default_factory=list)
    state: ReceiverState = RECEIVER.start
    word: FinalWord | None = None
    word_s: float = 0.0
    first_landed: tuple[int, float] | None = None
    """Wall-clock nanoseconds and monotonic seconds of the first block's arrival."""
    timer: asyncio.TimerHandle | None = None


class Receiver:
    """All transfers to one worker. Every method on the event loop; none blocks it.

    `on_failed` is called once for every transfer that ends otherwise than by `admit` or `cancel`.
    """

    def __init__(
        self,
        loop: EngineLoop,
        storage: BlockMemory,
        transport: Transport,
        me: Callable[[], PeerAddress],
        *,
        fingerprint: str,
        clock: Clock,
        ids: IdSource,
        lease_s: float,
        on_failed: Callable[[AttemptId, TandemError], None],
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`me` says how peers reach this worker now; `lease_s` is how long a sender may be silent.

        `on_ended` is called whenever a transfer is forgotten.
        """
        self._loop = loop
        self._storage = storage
        self._transport = transport
        self._me = me
        self._fingerprint = fingerprint
        self._clock = clock
        self._ids = ids
        self._lease_s = lease_s
        self._on_failed = on_failed
        self._on_ended = on_ended
        self._transfers: dict[TransferId, _Incoming] = {}
        self._by_attempt: dict[AttemptId, _Incoming] = {}
        self._opening: set[AttemptId] = set()
        self._withdrawn: set[AttemptId] = set()
        self._background = Background()
        self._closed = False

    @property
    def num_open(self) -> int:
        """Transfers that hold blocks, or wait for them."""
        return len(self._transfers) + len(self._opening)

    def answer(self, hello: Hello) -> Hello:
        """Answer a sender's greeting. Raises `LayoutMismatch` (P15)."""
        check_hello(hello, self._fingerprint)
        return Hello(PROTOCOL_VERSION, self._me(), self._fingerprint)

    async def open(self, spec: SequenceSpec) -> Ticket:
        """Reserve blocks for the whole prompt, post receives for those not cached here, promise them.

        Waits its turn for free blocks. Raises as `EngineLoop.reserve`, `InvalidRequest`, `Draining`.
        Cancelling the call gives everything back.
        """
        self._require_open()
        check_length(spec, self._storage.layout)
        attempt_id = spec.attempt_id
        self._opening.add(attempt_id)
        try:
            reservation = await self._loop.reserve(spec)
            # From here on nothing is awaited: a cancelled caller can't leave a transfer half made.
            return self._promise(spec, reservation)
        finally:
            self._opening.discard(attempt_id)
            self._withdrawn.discard(attempt_id)

    async def finish(self, word: FinalWord) -> None:
        """Take the sender's final word; what comes of it is told by outputs, or by `on_failed`.

        Raises `TicketRefused` for an unknown, used or expired ticket, or one of another life.
        """
        transfer = self._transfers.get(word.transfer_id)
        if transfer is None:
            raise TicketRefused(f"transfer {word.transfer_id} is unknown, used or expired here; reserve anew")
        ticket = transfer.ticket
        if (word.attempt_id, word.receiver_epoch) != (ticket.attempt_id, ticket.receiver.epoch):
            raise TicketRefused(
                f"transfer {word.transfer_id} is of attempt {ticket.attempt_id} and epoch "
                f"{ticket.receiver.epoch}; the word names {word.attempt_id} and {word.receiver_epoch}"
            )
        error = _what_is_wrong(word, ticket)
        if error is None and transfer.word is None:
            transfer.word, transfer.word_s = word, self._clock.monotonic_s()
            self._extend(transfer)
        self._apply(transfer, ReceiverEvent.WORD_OK if error is None else ReceiverEvent.WORD_BAD, error)

    def renew(self, transfer_ids: Iterable[TransferId]) -> tuple[TransferId, ...]:
        """Move these leases later, never earlier; returns those that are unknown here (P36)."""
        unknown: list[TransferId] = []
        for transfer_id in transfer_ids:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.state in (ReceiverState.SETTLING, ReceiverState.RELEASED):
                unknown.append(transfer_id)
            else:
                self._extend(transfer)
        return tuple(unknown)

    async def cancel(self, attempt_id: AttemptId) -> None:
        """Give the attempt up; its blocks are freed once no byte can be written into them any more.

        Returns without waiting for that. Idempotent; unknown or admitted: no-op.
        """
        if attempt_id in self._opening:
            self._withdrawn.add(attempt_id)
            await _unless_stopped(self._loop.abort(attempt_id))
        transfer = self._by_attempt.get(attempt_id)
        if transfer is not None:
            self._apply(transfer, ReceiverEvent.CANCEL)

    async def aclose(self) -> None:
        """Give up every transfer, and wait until all have settled, for a few seconds. Idempotent.

        Blocks whose receives have not settled by then stay taken: the transport is closed next.
        """
        self._closed = True
        for transfer in tuple(self._transfers.values()):
            self._apply(transfer, ReceiverEvent.CANCEL)
        deadline = Deadline.after(self._clock, _CLOSE_GRACE_S)
        while self._background and not deadline.passed(self._clock):
            await self._background.join(deadline.remaining_s(self._clock))
        await self._background.aclose()

    # Opening

    def _require_open(self) -> None:
        if self._closed:
            raise Draining("this worker is shutting down; send this to another one")

    def _promise(self, spec: SequenceSpec, reservation: Reservation) -> Ticket:
        layout = self._storage.layout
        first_block = reservation.num_cached_tokens // layout.block_size_tokens
        ticket = Ticket(
            transfer_id=TransferId(self._ids.hex128()),
            attempt_id=spec.attempt_id,
            receiver=self._me(),
            layout_fingerprint=self._fingerprint,
            first_block=first_block,
            num_blocks=len(reservation.block_ids) - first_block,
            num_tokens=len(spec.token_ids),
            num_cached_tokens=reservation.num_cached_tokens,
            lease_s=self._lease_s,
        )
        transfer = _Incoming(
            ticket, reservation.block_ids[first_block:], Deadline.after(self._clock, self._lease_s)
        )
        self._transfers[ticket.transfer_id] = self._by_attempt[ticket.attempt_id] = transfer
        try:
            self._require_open()
            if spec.attempt_id in self._withdrawn:
                raise Cancelled(f"attempt {spec.attempt_id} was cancelled while it waited for blocks")
            for position, block_id in enumerate(transfer.block_ids, first_block):
                block = self._storage.block(block_id)
                transfer.receives.append(self._transport.post_receive(ticket.tag(position), block))
        except BaseException:
            self._apply(transfer, ReceiverEvent.CANCEL)
            raise
        transfer.timer = asyncio.get_running_loop().call_later(self._lease_s, self._lease_fired, transfer)
        self._spawn(self._watch(transfer), transfer, "arrival")
        return ticket

    # Events

    def _apply(self, transfer: _Incoming, event: ReceiverEvent, error: TandemError | None = None) -> None:
        transfer.state, effects = RECEIVER.step(transfer.state, event)
        if transfer.state is ReceiverState.COMMITTED:
            self._forget(transfer)
        for effect in effects:
            self._carry_out(transfer, effect, error)

    def _carry_out(self, transfer: _Incoming, effect: ReceiverEffect, error: TandemError | None) -> None:
        match effect:
            case ReceiverEffect.CHECK:
                self._spawn(self._check(transfer), transfer, "check")
            case ReceiverEffect.ADMIT:
                self._spawn(self._admit(transfer), transfer, "admission")
            case ReceiverEffect.CANCEL_RECEIVES:
                self._spawn(self._settle(transfer), transfer, "settling")
            case ReceiverEffect.RELEASE:
                self._spawn(self._release(transfer), transfer, "release")
            case ReceiverEffect.REPORT:
                self._on_failed(transfer.ticket.attempt_id, error or InternalError("no reason was given"))
            case ReceiverEffect.REFUSE:
                raise TicketRefused(f"transfer {transfer.ticket.transfer_id} is used up; reserve anew")

    def _extend(self, transfer: _Incoming) -> None:
        transfer.lease = max(transfer.lease, Deadline.after(self._clock, self._lease_s))

    def _lease_fired(self, transfer: _Incoming) -> None:
        remaining_s = transfer.lease.remaining_s(self._clock)
        if remaining_s > 0:
            event_loop = asyncio.get_running_loop()
            transfer.timer = event_loop.call_later(remaining_s, self._lease_fired, transfer)
            return
        transfer.timer = None
        missing = "blocks" if transfer.word is not None else "final word"
        error = TransferFailed(
            f"the sender's {missing} did not come within {self._lease_s:g} s of its last sign of life"
        )
        self._apply(transfer, ReceiverEvent.EXPIRED, error)

    # Effects, each a task of its own

    async def _watch(self, transfer: _Incoming) -> None:
        try:
            for receive in transfer.receives:
                await receive.wait()
                if transfer.first_landed is None:
                    transfer.first_landed = (self._clock.wall_ns(), self._clock.monotonic_s())
        except TandemError as error:
            self._apply(transfer, ReceiverEvent.LOST, error)
        else:
            self._apply(transfer, ReceiverEvent.LANDED)

    async def _settle(self, transfer: _Incoming) -> None:
        for receive in transfer.receives:
            receive.cancel()
        for receive in transfer.receives:
            await receive.wait_settled()
        self._apply(transfer, ReceiverEvent.SETTLED)

    async def _check(self, transfer: _Incoming) -> None:
        damaged = await asyncio.to_thread(_first_damaged, transfer, self._storage)
        if damaged is None:
            self._apply(transfer, ReceiverEvent.CHECKED)
            return
        error = TransferFailed(f"the checksum of block {damaged} is wrong; its bytes were damaged on the way")
        self._apply(transfer, ReceiverEvent.CORRUPT, error)

    async def _admit(self, transfer: _Incoming) -> None:
        word = transfer.word
        try:
            if word is None or word.first_token is None:
                raise InternalError("a transfer was admitted without its final word")
            await self._loop.admit(
                transfer.ticket.attempt_id, word.first_token, phases=(self._phase(transfer),)
            )
        except TandemError as error:
            self._apply(transfer, ReceiverEvent.REFUSED, error)
        else:
            self._apply(transfer, ReceiverEvent.ADMITTED)

    async def _release(self, transfer: _Incoming) -> None:
        await _unless_stopped(self._loop.release(transfer.ticket.attempt_id))
        self._forget(transfer)

    def _forget(self, transfer: _Incoming) -> None:
        if transfer.timer is not None:
            transfer.timer.cancel()
        del self._transfers[transfer.ticket.transfer_id]
        del self._by_attempt[transfer.ticket.attempt_id]
        self._on_ended()

    def _spawn(self, work: Coroutine[None, None, None], transfer: _Incoming, what: str) -> None:
        self._background.spawn(work, f"{what} of transfer {transfer.ticket.transfer_id}")

    def _phase(self, transfer: _Incoming) -> PhaseTiming:
        """From the first block's arrival until all are checked; `exposed_s` of it after the word.

        The exposed part is what the sequence waits for; the rest ran while the sender computed.
        `busy_s` is the sender's account of how long blocks were on their way.
        """
        now_s = self._clock.monotonic_s()
        start_ns, start_s = transfer.first_landed or (self._clock.wall_ns(), now_s)
        return PhaseTiming(
            Phase.TRANSFER,
            start_ns,
            now_s - start_s,
            {
                names.NUM_BLOCKS: transfer.ticket.num_blocks,
                names.NUM_BYTES: transfer.ticket.num_blocks * self._storage.layout.block_bytes,
                names.EXPOSED_S: now_s - transfer.word_s,
                names.BUSY_S: transfer.word.busy_s if transfer.word is not None else 0.0,
                names.TRANSPORT: self._transport.name,
            },
        )


async def _unless_stopped(call: Awaitable[None]) -> None:
    """An engine that has stopped holds no blocks any more."""
    with suppress(Draining):
        await call


def _what_is_wrong(word: FinalWord, ticket: Ticket) -> TandemError | None:
    match word.outcome:
        case TransferOutcome.OK:
            problem = check_word(word, ticket)
            return None if problem is None else TransferFailed(f"the sender broke its ticket: {problem}")
        case TransferOutcome.CANCELLED:
            return Cancelled(f"the sender of attempt {word.attempt_id} was told to stop")
        case TransferOutcome.FAILED:
            return TransferFailed(f"the sender failed: {word.detail or 'it did not say why'}")


def _first_damaged(transfer: _Incoming, storage: BlockMemory) -> int | None:
    """Position of the first block whose bytes are not the sender's. In a thread."""
    assert transfer.word is not None
    for i, (block_id, checksum) in enumerate(zip(transfer.block_ids, transfer.word.checksums, strict=True)):
        if storage.checksum(block_id) != checksum:
            return transfer.ticket.first_block + i
    return None
