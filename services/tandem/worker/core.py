"""One worker: an engine, both ends of transfers, and the services that gateways and peers call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tandem.clock import Clock
from tandem.config.settings import TransferSettings
from tandem.directory.base import Role, WorkerRecord, WorkerState
from tandem.directory.watch import Watch
from tandem.engine.engine import Engine
from tandem.engine.loop import EngineLoop
from tandem.engine.results import StepResult
from tandem.errors import DeadlineExceeded, Draining, PeerLost, TandemError, TransferFailed
from tandem.generation import CallContext, PhaseTiming, PrefillResult, SequenceOutput, SequenceSpec
from tandem.ids import AttemptId, Epoch, GatewayId, IdSource, TransferId, WorkerId
from tandem.kv.layout import KvLayout
from tandem.kv.storage import KvStorage
from tandem.kv.ticket import FinalWord, Hello, PeerAddress, Ticket
from tandem.request import FinishReason
from tandem.rpc.services import TransferService
from tandem.tasks import Background
from tandem.telemetry.metrics import WorkerMetrics
from tandem.telemetry.names import Outcome
from tandem.telemetry.spans import Tracer
from tandem.transfer.receiver import Receiver
from tandem.transfer.sender import Sender
from tandem.transport.base import Transport
from tandem.worker.attachments import Attachments
from tandem.worker.phase_spans import PhaseSpans, outcome_of_output


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is, for one life. `control` is its gRPC address, as others reach it."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    model_id: str
    control: str = ""


class WorkerCore:
    """Implements `WorkerService` and `TransferService`. All methods on one event loop.

    The pool it belongs to decides nothing here: any worker prefills, decodes and does both.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: Engine,
        layout: KvLayout,
        storage: KvStorage,
        transport: Transport,
        *,
        clock: Clock,
        ids: IdSource,
        tracer: Tracer,
        peers: Callable[[PeerAddress], TransferService],
        transfer: TransferSettings,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        """`peers` gives the transfer service at a peer's address."""
        self.identity = identity
        self.state = WorkerState.STARTING
        self.loop = EngineLoop(engine, self._on_step)
        self._engine_settings = engine.settings
        self._layout = layout
        self._transport = transport
        self._attachments = Attachments()
        self._spans = PhaseSpans(tracer, identity.worker_id)
        self._metrics = metrics
        self._background = Background()
        self._ended = Watch()
        self.receiver = Receiver(
            self.loop,
            storage,
            transport,
            lambda: self.address,
            fingerprint=layout.fingerprint,
            clock=clock,
            ids=ids,
            lease_s=transfer.lease_s,
            on_failed=self._transfer_failed,
            on_ended=self._ended.notify,
        )
        self.sender = Sender(
            self.loop,
            storage,
            transport,
            lambda: self.address,
            fingerprint=layout.fingerprint,
            clock=clock,
            peers=peers,
            handshake_timeout_s=transfer.handshake_timeout_s,
            send_timeout_s=transfer.send_timeout_s,
            on_ended=self._ended.notify,
        )

    @property
    def address(self) -> PeerAddress:
        """How peers reach this worker."""
        identity = self.identity
        return PeerAddress(identity.worker_id, identity.epoch, identity.control, self._transport.address)

    @property
    def num_open(self) -> int:
        """Attempts and transfers that still hold something here; 0 when nothing leaks (P6)."""
        return (
            self._attachments.num_attempts + len(self._spans) + self.receiver.num_open + self.sender.num_open
        )

    def record(self) -> WorkerRecord:
        """What the directory is told, as of now."""
        settings = self._engine_settings
        return WorkerRecord(
            address=self.address,
            role=self.identity.role,
            state=self.state,
            model_id=self.identity.model_id,
            layout_fingerprint=self._layout.fingerprint,
            block_size_tokens=settings.block_size_tokens,
            num_blocks=settings.num_blocks,
            max_context_tokens=settings.limit_tokens,
            load=self.loop.load(),
            capabilities={"transport": self._transport.name},
        )

    async def start(self) -> None:
        """Start the engine's loop. Once only."""
        await self.loop.start()

    async def drain(self, timeout_s: float) -> bool:
        """Take no new work; let what runs end, for at most `timeout_s`. True when nothing is left."""
        self.state = WorkerState.DRAINING
        try:
            await self._ended.until(lambda: self.num_open == 0, timeout_s)
        except DeadlineExceeded:
            return False
        return True

    async def aclose(self) -> None:
        """End transfers, then the engine. Idempotent."""
        self.state = WorkerState.DRAINING
        await self.sender.aclose()
        await self.receiver.aclose()
        await self.loop.stop()
        await self._background.aclose()

    # WorkerService

    async def attach(
        self, gateway_id: GatewayId, context: CallContext
    ) -> AsyncGenerator[tuple[SequenceOutput, ...]]:
        """See `WorkerService`."""
        attachment = self._attachments.open(gateway_id)
        try:
            yield ()
            async for message in attachment.messages():
                yield message
        finally:
            for attempt_id in self._attachments.close(gateway_id, attachment):
                self._background.spawn(self.cancel(attempt_id), f"abort of orphaned attempt {attempt_id}")

    async def submit(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> None:
        """See `WorkerService`."""
        with self._opened(spec, gateway_id, context):
            await self.loop.submit(spec)

    async def reserve(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> Ticket:
        """See `WorkerService`."""
        with self._opened(spec, gateway_id, context):
            return await self.receiver.open(spec)

    async def prefill(
        self, spec: SequenceSpec, ticket: Ticket, gateway_id: GatewayId, context: CallContext
    ) -> PrefillResult:
        """See `WorkerService`. Losing the receiver is `TransferFailed`: this worker is well."""
        self._require_open()
        self._spans.begin(spec.attempt_id, context.trace_headers)
        try:
            result = await self.sender.send(spec, ticket, context)
        except PeerLost as error:
            raise TransferFailed(f"the receiver can't be reached: {error}") from error
        finally:
            self._spans.forget(spec.attempt_id)
        return replace(result, phases=self._spans.signed(result.phases))

    async def cancel(self, attempt_id: AttemptId) -> None:
        """See `WorkerService`."""
        await self.sender.cancel(attempt_id)
        await self.receiver.cancel(attempt_id)
        try:
            await self.loop.abort(attempt_id)
            await self.loop.flush()  # its last output, if it has one, goes out first
        except Draining:
            pass  # an engine that has stopped runs nothing
        # One that was only reserved here has said nothing so far; for all others this is dropped.
        self._deliver(SequenceOutput(attempt_id, finish=FinishReason.CANCELLED))

    async def describe(self) -> WorkerRecord:
        """See `WorkerService`."""
        return self.record()

    # TransferService

    async def handshake(self, hello: Hello, context: CallContext) -> Hello:
        """See `TransferService`."""
        return self.receiver.answer(hello)

    async def finish(self, word: FinalWord, context: CallContext) -> None:
        """See `TransferService`."""
        await self.receiver.finish(word)

    async def renew(self, transfer_ids: Sequence[TransferId], context: CallContext) -> tuple[TransferId, ...]:
        """See `TransferService`."""
        return self.receiver.renew(transfer_ids)

    # Inside

    def _require_open(self) -> None:
        if self.state is WorkerState.DRAINING:
            raise Draining(f"worker {self.identity.worker_id} is shutting down; send this to another one")

    @contextmanager
    def _opened(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> Iterator[None]:
        """Outputs and spans of an attempt have a place; taken away again if it doesn't begin."""
        self._require_open()
        self._attachments.register(spec.attempt_id, gateway_id)
        self._spans.begin(spec.attempt_id, context.trace_headers)
        try:
            yield
        except BaseException:
            self._forget(spec.attempt_id)
            raise

    def _forget(self, attempt_id: AttemptId) -> None:
        self._attachments.forget(attempt_id)
        self._spans.forget(attempt_id)
        self._ended.notify()

    def _on_step(self, result: StepResult) -> None:
        for output in result.outputs:
            self._deliver(output)
        for progress in result.exports:
            if progress.phases:
                self._count(progress.phases)
                outcome = Outcome.OK if progress.error is None else Outcome.ERROR
                self._spans.record(progress.attempt_id, self._spans.signed(progress.phases), outcome)
            self.sender.on_progress(progress)
        if self._metrics is not None:
            self._metrics.set_load(self.loop.load())
            self._metrics.set_open_transfers(self.receiver.num_open + self.sender.num_open)

    def _deliver(self, output: SequenceOutput) -> None:
        if self._metrics is not None:
            self._metrics.tokens_generated(len(output.tokens))
        if output.finish is not None:
            output = replace(output, phases=self._spans.signed(output.phases))
            self._count(output.phases)
            self._spans.record(output.attempt_id, output.phases, outcome_of_output(output))
            self._spans.forget(output.attempt_id)
        self._attachments.deliver(output)
        self._ended.notify()

    def _count(self, phases: tuple[PhaseTiming, ...]) -> None:
        if self._metrics is not None:
            self._metrics.phases_ended(phases)

    def _transfer_failed(self, attempt_id: AttemptId, error: TandemError) -> None:
        if self._metrics is not None:
            self._metrics.transfer_failed()
        self._deliver(SequenceOutput(attempt_id, finish=FinishReason.ERROR, error=str(error)))
