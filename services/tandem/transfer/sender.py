"""The sending end of transfers: computes a prompt, sends blocks as they fill, has the final word.

A thin shell around `handoff.SENDER`: what happens becomes an event, effects are carried out here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.clock import Clock, Deadline
from tandem.engine.loop import EngineLoop
from tandem.engine.results import ExportProgress
from tandem.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    PeerLost,
    Refused,
    TandemError,
    TicketRefused,
    TransferFailed,
    Unavailable,
)
from tandem.generation import DEADLINE_ERROR, CallContext, PrefillResult, SequenceSpec, TokenOutput
from tandem.ids import AttemptId, BlockId
from tandem.kv.ticket import FinalWord, PeerAddress, Ticket, TransferOutcome
from tandem.tasks import Background
from tandem.transfer.handoff import SENDER, SenderEffect, SenderEvent, SenderState
from tandem.transfer.peers import PeerLinks, PeerService, bounded
from tandem.transfer.plan import BlockMemory, check_ticket, due_blocks
from tandem.transfer.renewal import LeaseRenewal
from tandem.transport.base import Endpoint, Transport

logger = logging.getLogger(__name__)

_CLOSE_GRACE_S = 5.0
_WITHDRAW_GRACE_S = 1.0
_FIRST_RETRY_S = 0.05
_ALIVE = (SenderState.OPENING, SenderState.COMPUTING, SenderState.SENDING)


@dataclass(eq=False, slots=True)
class _Outgoing:
    """One transfer. `readers` are the tasks that open it or read its blocks: RELEASE waits for them."""

    spec: SequenceSpec
    ticket: Ticket
    answer: asyncio.Future[PrefillResult]
    next_position: int
    state: SenderState = SENDER.start
    endpoint: Endpoint | None = None
    readers: set[asyncio.Task[None]] = field(default_factory=set)
    checksums: dict[int, int] = field(default_factory=dict)
    """By position, of the blocks that have left."""
    num_sending: int = 0
    sending_since_s: float = 0.0
    busy_s: float = 0.0
    """Time during which blocks were on their way, so far."""
    first_token: TokenOutput | None = None
    error: TandemError | None = None
    """Why it was given up."""
    release: asyncio.Task[None] | None = None


class Sender:
    """All transfers from one worker. Every method on the event loop; none blocks it."""

    def __init__(
        self,
        loop: EngineLoop,
        storage: BlockMemory,
        transport: Transport,
        me: Callable[[], PeerAddress],
        *,
        fingerprint: str,
        clock: Clock,
        peers: Callable[[PeerAddress], PeerService],
        handshake_timeout_s: float,
        send_timeout_s: float,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`peers` gives the transfer service at an address. `send_timeout_s` bounds one chunk's send.

        `on_ended` is called whenever a transfer is forgotten.
        """
        self._loop = loop
        self._storage = storage
        self._clock = clock
        self._peers = peers
        self._send_timeout_s = send_timeout_s
        self._links = PeerLinks(
            transport,
            me,
            fingerprint=fingerprint,
            clock=clock,
            peers=peers,
            handshake_timeout_s=handshake_timeout_s,
        )
        self._transfers: dict[AttemptId, _Outgoing] = {}
        self._background = Background()
        self._renewal = LeaseRenewal(
            self._alive, self._disowned, peers=peers, clock=clock, background=self._background
        )
        self._on_ended = on_ended
        self._closed = False

    @property
    def num_open(self) -> int:
        """Transfers whose final word is not delivered yet."""
        return len(self._transfers)

    async def send(self, spec: SequenceSpec, ticket: Ticket, context: CallContext) -> PrefillResult:
        """Compute the prompt and send its wanted blocks; returns as soon as the first token is known.

        The last blocks and the final word follow in the background; should they fail, the receiver
        is told, and tells the attempt's reader. Cancelling the call before it returns cancels the
        transfer. Raises `LayoutMismatch`, `TicketRefused`, `PeerLost`, `TransferFailed`,
        `DeadlineExceeded`, `Cancelled`, and as `EngineLoop.export`.
        """
        if self._closed:
            raise Draining("this worker is shutting down; send this to another one")
        if spec.attempt_id in self._transfers:
            raise Refused(f"attempt {spec.attempt_id} is being sent already; draw a new id for every try")
        answer: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()
        transfer = _Outgoing(spec, ticket, answer, ticket.first_block)
        self._transfers[spec.attempt_id] = transfer
        self._read(transfer, self._open(transfer), "opening")
        self._renewal.wake()
        try:
            return await answer
        except asyncio.CancelledError:
            self._apply(transfer, SenderEvent.CANCEL, Cancelled("the caller went away"))
            raise

    def on_progress(self, progress: ExportProgress) -> None:
        """The engine has computed more of an export. Others' exports: no-op."""
        transfer = self._transfers.get(progress.attempt_id)
        if transfer is None:
            return
        if progress.error is not None:
            self._apply(transfer, SenderEvent.COMPUTE_FAILED, _engine_error(progress.error))
            return
        if transfer.state is SenderState.COMPUTING:
            self._send_due(transfer, progress)
        if progress.first_token is not None:
            transfer.first_token = progress.first_token
            result = PrefillResult(progress.first_token, progress.num_cached_tokens, progress.phases)
            self._apply(transfer, SenderEvent.COMPUTED, result=result)
            self._check_sent(transfer)

    async def cancel(self, attempt_id: AttemptId) -> None:
        """Give the attempt up: blocks are freed once nothing reads them, and the receiver is told.

        Returns without waiting for that. Idempotent; unknown: no-op.
        """
        transfer = self._transfers.get(attempt_id)
        if transfer is not None:
            self._apply(transfer, SenderEvent.CANCEL, Cancelled(f"attempt {attempt_id} was cancelled"))

    async def aclose(self) -> None:
        """Give up what still runs, deliver final words for a few seconds, close connections. Idempotent."""
        self._closed = True
        for transfer in tuple(self._transfers.values()):
            self._apply(transfer, SenderEvent.CANCEL, Draining("the sender is shutting down"))
        self._renewal.stop()
        deadline = Deadline.after(self._clock, _CLOSE_GRACE_S)
        while self._background and not deadline.passed(self._clock):
            await self._background.join(deadline.remaining_s(self._clock))
        await self._background.aclose()
        await self._links.aclose()

    # Events

    def _apply(
        self,
        transfer: _Outgoing,
        event: SenderEvent,
        error: TandemError | None = None,
        result: PrefillResult | None = None,
    ) -> None:
        before = transfer.state
        transfer.state, effects = SENDER.step(before, event)
        if transfer.state is SenderState.SETTLING and before is not SenderState.SETTLING:
            transfer.error = error or InternalError("no reason was given")
        for effect in effects:
            self._carry_out(transfer, effect, result)

    def _carry_out(self, transfer: _Outgoing, effect: SenderEffect, result: PrefillResult | None) -> None:
        match effect:
            case SenderEffect.EXPORT:
                self._read(transfer, self._export(transfer), "export")
            case SenderEffect.ANSWER:
                if result is not None and not transfer.answer.done():
                    transfer.answer.set_result(result)
            case SenderEffect.STOP:
                self._spawn(self._stop(transfer), transfer, "stop")
            case SenderEffect.RELEASE:
                transfer.release = self._spawn(self._release(transfer), transfer, "release")
            case SenderEffect.TELL_OK | SenderEffect.TELL_BAD:
                self._spawn(self._tell(transfer, _word(transfer)), transfer, "final word")

    def _read(self, transfer: _Outgoing, work: Coroutine[Any, Any, None], what: str) -> None:
        task = self._spawn(work, transfer, what)
        transfer.readers.add(task)
        task.add_done_callback(transfer.readers.discard)

    def _spawn(self, work: Coroutine[Any, Any, None], transfer: _Outgoing, what: str) -> asyncio.Task[None]:
        return self._background.spawn(work, f"{what} of transfer {transfer.ticket.transfer_id}")

    # Opening and computing

    async def _open(self, transfer: _Outgoing) -> None:
        try:
            check_ticket(transfer.ticket, transfer.spec, self._storage.layout)
            transfer.endpoint = await self._links.endpoint(transfer.ticket.receiver)
        except Exception as error:
            self._apply(transfer, SenderEvent.OPEN_FAILED, _ours(error))
        else:
            self._apply(transfer, SenderEvent.OPENED)

    async def _export(self, transfer: _Outgoing) -> None:
        try:
            await self._loop.export(transfer.spec)
        except Exception as error:
            self._apply(transfer, SenderEvent.COMPUTE_FAILED, _ours(error))

    def _send_due(self, transfer: _Outgoing, progress: ExportProgress) -> None:
        due = due_blocks(
            transfer.ticket,
            transfer.next_position,
            progress.num_computed_tokens,
            self._storage.layout.block_size_tokens,
        )
        if due:
            transfer.next_position = due.stop
            blocks = [(position, progress.block_ids[position]) for position in due]
            self._read(transfer, self._send_blocks(transfer, blocks), f"blocks {due.start} to {due.stop - 1}")

    def _check_sent(self, transfer: _Outgoing) -> None:
        if transfer.state is SenderState.SENDING and len(transfer.checksums) == transfer.ticket.num_blocks:
            self._apply(transfer, SenderEvent.ALL_SENT)

    async def _send_blocks(self, transfer: _Outgoing, blocks: list[tuple[int, BlockId]]) -> None:
        try:
            checksums = await asyncio.to_thread(self._checksums, blocks)
            await self._send_messages(transfer, blocks)
        except Exception as error:
            self._apply(transfer, SenderEvent.SEND_FAILED, _ours(error))
        else:
            transfer.checksums.update(checksums)
            self._check_sent(transfer)

    def _checksums(self, blocks: list[tuple[int, BlockId]]) -> dict[int, int]:
        return {position: self._storage.checksum(block_id) for position, block_id in blocks}

    async def _send_messages(self, transfer: _Outgoing, blocks: list[tuple[int, BlockId]]) -> None:
        """Returns, or raises, once no message reads its block any more, however long that takes."""
        endpoint = transfer.endpoint
        if endpoint is None:
            raise InternalError("blocks are due before the connection is open")
        if transfer.num_sending == 0:
            transfer.sending_since_s = self._clock.monotonic_s()
        transfer.num_sending += 1
        tasks = [
            asyncio.create_task(endpoint.send(transfer.ticket.tag(position), self._storage.block(block_id)))
            for position, block_id in blocks
        ]
        try:
            done, pending = await asyncio.wait(
                tasks, timeout=self._send_timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                await task
            if pending:
                raise PeerLost(
                    f"worker {transfer.ticket.receiver.worker_id} did not take {len(pending)} blocks "
                    f"within {self._send_timeout_s:g} s (transfer.send_timeout_s)"
                )
        finally:
            await _withdraw(endpoint, tasks)
            transfer.num_sending -= 1
            if transfer.num_sending == 0:
                transfer.busy_s += self._clock.monotonic_s() - transfer.sending_since_s

    # Ending

    async def _stop(self, transfer: _Outgoing) -> None:
        with suppress(Draining):  # an engine that has stopped computes nothing
            await self._loop.abort(transfer.spec.attempt_id)
        if not transfer.answer.done():
            transfer.answer.set_exception(transfer.error or InternalError("no reason was given"))
        readers = tuple(transfer.readers)
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        self._apply(transfer, SenderEvent.SETTLED)

    async def _release(self, transfer: _Outgoing) -> None:
        with suppress(Draining):  # nor does it hold any blocks
            await self._loop.release(transfer.spec.attempt_id)

    async def _tell(self, transfer: _Outgoing, word: FinalWord) -> None:
        """Deliver the final word, with retries until the receiver's lease must have ended anyway."""
        receiver = transfer.ticket.receiver
        deadline = Deadline.after(self._clock, transfer.ticket.lease_s)
        delay_s = _FIRST_RETRY_S
        try:
            while True:
                try:
                    call = self._peers(receiver).finish(word, CallContext(deadline))
                    await bounded(call, deadline, self._clock, f"worker {receiver.worker_id}")
                    return
                except (Unavailable, DeadlineExceeded) as error:
                    if deadline.remaining_s(self._clock) <= delay_s:
                        logger.warning("final word of %s was not delivered: %s", word.transfer_id, error)
                        return
                except TandemError as error:
                    level = logging.INFO if isinstance(error, TicketRefused) else logging.WARNING
                    logger.log(level, "final word of %s was refused: %s", word.transfer_id, error)
                    return
                await asyncio.sleep(delay_s)
                delay_s *= 2
        finally:
            if transfer.release is not None:
                await asyncio.wait([transfer.release])
            self._apply(transfer, SenderEvent.TOLD)
            del self._transfers[transfer.spec.attempt_id]
            self._on_ended()

    # Leases

    def _alive(self) -> list[Ticket]:
        return [transfer.ticket for transfer in self._transfers.values() if transfer.state in _ALIVE]

    def _disowned(self, ticket: Ticket, error: TandemError) -> None:
        transfer = self._transfers.get(ticket.attempt_id)
        if transfer is not None:
            self._apply(transfer, SenderEvent.DISOWNED, error)


async def _withdraw(endpoint: Endpoint, tasks: list[asyncio.Task[None]]) -> None:
    """Return once every send has ended: cancelled ones get a moment, then the endpoint is closed."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        _, stuck = await asyncio.wait(pending, timeout=_WITHDRAW_GRACE_S)
        if stuck:
            await endpoint.aclose()
            await asyncio.wait(stuck)
    await asyncio.gather(*tasks, return_exceptions=True)


def _word(transfer: _Outgoing) -> FinalWord:
    ticket, error = transfer.ticket, transfer.error
    ids = (ticket.transfer_id, ticket.attempt_id, ticket.receiver.epoch)
    wanted = range(ticket.first_block, ticket.first_block + ticket.num_blocks)
    if error is not None:
        cancelled = isinstance(error, Cancelled)
        return FinalWord(
            *ids, TransferOutcome.CANCELLED if cancelled else TransferOutcome.FAILED, detail=str(error)
        )
    return FinalWord(
        *ids,
        TransferOutcome.OK,
        ticket.num_tokens,
        tuple(transfer.checksums[position] for position in wanted),
        transfer.first_token,
        busy_s=transfer.busy_s,
    )


def _ours(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    logger.error("a transfer failed of a bug", exc_info=error)
    return InternalError(f"a transfer failed ({type(error).__name__}); the worker's log says more")


def _engine_error(message: str) -> TandemError:
    if message == DEADLINE_ERROR:
        return DeadlineExceeded("the deadline passed while the prompt was computed")
    return TransferFailed(f"the prompt could not be computed: {message}")
