"""A worker that says what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from tandem.directory.base import Role, WorkerLoad, WorkerRecord, WorkerState
from tandem.generation import CallContext, PrefillResult, SequenceOutput, SequenceSpec, TokenOutput
from tandem.ids import AttemptId, Epoch, GatewayId, TransferId, WorkerId
from tandem.kv.ticket import PeerAddress, Ticket
from tandem.request import FinishReason

FINGERPRINT = "f" * 16


def record_of(name: str, role: Role, epoch: int = 1) -> WorkerRecord:
    return WorkerRecord(
        address=PeerAddress(WorkerId(name), Epoch(epoch), f"{name}:1", name.encode()),
        role=role,
        state=WorkerState.READY,
        model_id="tiny",
        layout_fingerprint=FINGERPRINT,
        block_size_tokens=4,
        num_blocks=1000,
        max_context_tokens=4000,
        load=WorkerLoad(1000),
    )


def output(spec: SequenceSpec, *tokens: int, finish: FinishReason | None = None, **rest) -> SequenceOutput:
    return SequenceOutput(spec.attempt_id, tuple(map(TokenOutput, tokens)), finish, **rest)


@dataclass
class ScriptedWorker:
    """A `WorkerService`. `on_submit` and `on_reserve` are called with the spec and may `say` things."""

    record: WorkerRecord
    on_submit: Callable[[SequenceSpec], None] = lambda spec: None
    on_reserve: Callable[[SequenceSpec], None] = lambda spec: None
    on_prefill: Callable[[SequenceSpec], int | Exception] = lambda spec: 100
    hold_prefill: asyncio.Event | None = None
    calls: list[tuple[str, AttemptId]] = field(default_factory=list)
    cancelled: list[AttemptId] = field(default_factory=list)
    num_streams: int = 0
    num_open_streams: int = 0
    prefill_entered: asyncio.Event = field(default_factory=asyncio.Event)
    attach_error: Exception | None = None
    hold_attach: asyncio.Event | None = None

    def __post_init__(self) -> None:
        self._said: asyncio.Queue[SequenceOutput | Exception] = asyncio.Queue()

    def say(self, said: SequenceOutput | Exception) -> None:
        """Put on the output stream; an exception ends it."""
        self._said.put_nowait(said)

    async def attach(
        self, gateway_id: GatewayId, context: CallContext
    ) -> AsyncGenerator[tuple[SequenceOutput, ...]]:
        self.num_streams += 1
        self.num_open_streams += 1
        try:
            if self.hold_attach is not None:
                await self.hold_attach.wait()
            if self.attach_error is not None:
                raise self.attach_error
            yield ()
            while True:
                said = await self._said.get()
                if isinstance(said, Exception):
                    raise said
                yield (said,)
        finally:
            self.num_open_streams -= 1

    async def submit(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> None:
        self.calls.append(("submit", spec.attempt_id))
        self.on_submit(spec)

    async def reserve(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> Ticket:
        self.calls.append(("reserve", spec.attempt_id))
        self.on_reserve(spec)
        return Ticket(
            TransferId("a" * 32), spec.attempt_id, self.record.address, FINGERPRINT, 0, 1, 4, 0, 10.0
        )

    async def prefill(
        self, spec: SequenceSpec, ticket: Ticket, gateway_id: GatewayId, context: CallContext
    ) -> PrefillResult:
        self.calls.append(("prefill", spec.attempt_id))
        self.prefill_entered.set()
        if self.hold_prefill is not None:
            await self.hold_prefill.wait()
        first = self.on_prefill(spec)
        if isinstance(first, Exception):
            raise first
        return PrefillResult(TokenOutput(first), 0, ())

    async def cancel(self, attempt_id: AttemptId) -> None:
        self.cancelled.append(attempt_id)

    async def describe(self) -> WorkerRecord:
        return self.record


class ScriptedPeers:
    """Implements `links.Peers` over scripted workers."""

    def __init__(self, *workers: ScriptedWorker) -> None:
        self.workers = {(worker.record.worker_id, worker.record.epoch): worker for worker in workers}
        self.forgotten: list[WorkerId] = []

    def worker(self, record: WorkerRecord) -> ScriptedWorker:
        return self.workers[record.worker_id, record.epoch]

    async def forget(self, record: WorkerRecord) -> None:
        self.forgotten.append(record.worker_id)
